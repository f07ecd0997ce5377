"""FlashAttention 3's function that combines the results for several parts of the keys."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from foundry_kernels.core.checks import check_device, check_float, check_shape
from foundry_kernels.core.registry import FLOATS


def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Combines the results of attention to several parts of the keys into the result for all keys.

    Args:
        out_partial: ``[num_splits, B, T, H, D]``, or packed ``[num_splits, total, H, D]``, any strides; float32, as in
            FlashAttention 3, or bfloat16, float16 or float64.
        lse_partial: ``[num_splits, B, T, H]`` or ``[num_splits, total, H]``, natural logarithms, likewise: queries
            before heads, where the functions here return ``[B, H, T]``. -inf means that a query has seen no key of this
            part, which then contributes nothing, whatever its `out_partial` is.
        out: ``[B, T, H, D]`` or ``[total, H, D]`` to write the result into, of `out_dtype` if both are given.
        out_dtype: of the result; out_partial's if None.

    Returns:
        ``(out, lse)``: `out`, or a new tensor, and lse ``[B, T, H]`` or ``[total, H]`` float32 (float64 if an argument
        is). A query that has seen no key at all has output 0 and lse -inf. Gradients flow to both arguments, from both
        results. Plain PyTorch on every device, in float32 (float64 if an argument is), rounded once.

    Raises:
        TypeError: a tensor is not floating-point, or `out_dtype` no floating dtype.
        ValueError: shapes, dtypes or devices do not fit, or there is no part.
    """
    check_float("out_partial", out_partial)
    check_float("lse_partial", lse_partial)
    if out_partial.dim() not in (4, 5):
        raise ValueError(
            "out_partial must be [num_splits, B, T, H, D] or [num_splits, total, H, D]; "
            f"got shape {tuple(out_partial.shape)}"
        )
    if out_partial.shape[0] == 0:
        raise ValueError(f"out_partial must have at least one split; got shape {tuple(out_partial.shape)}")
    check_shape("lse_partial", lse_partial, tuple(out_partial.shape[:-1]), "out_partial's without the last dimension")
    check_device("lse_partial", lse_partial, "out_partial", out_partial)
    if out_dtype is not None and out_dtype not in FLOATS:
        raise TypeError(f"out_dtype must be float32, bfloat16, float16 or float64; got {out_dtype}")
    if out is not None:
        check_float("out", out)
        check_shape("out", out, tuple(out_partial.shape[1:]), "out_partial's without the first dimension")
        check_device("out", out, "out_partial", out_partial)
        if out_dtype is not None and out.dtype != out_dtype:
            raise ValueError(f"out must have out_dtype {out_dtype}; got {out.dtype}")
    wide = torch.promote_types(torch.promote_types(out_partial.dtype, lse_partial.dtype), torch.float32)
    lse = lse_partial.to(wide)
    largest = lse.detach().amax(0)
    seen = largest != -math.inf
    # -inf less -inf, and the derivative of the logarithm of 0, would be NaN.
    largest = torch.where(seen, largest, 0.0)
    weights = (lse - largest).exp()
    total = torch.where(seen, weights.sum(0), 1.0)
    weights = (weights / total)[..., None]
    parts = torch.where(lse[..., None] == -math.inf, 0.0, out_partial.to(wide))
    found = (parts * weights).sum(0)
    whole = torch.where(seen, total.log() + largest, -math.inf)
    if out is not None:
        return out.copy_(found), whole
    return found.to(out_partial.dtype if out_dtype is None else out_dtype), whole
