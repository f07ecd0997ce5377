"""PyTorch's `torch.nn.attention.varlen.varlen_attn`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, SupportsFloat, SupportsIndex

from torch import Tensor

from foundry_kernels.compat.flash_attn import check_no_pages
from foundry_kernels.compat.flash_attn_3 import attend_segments
from foundry_kernels.compat.kvcache import check_num_splits
from foundry_kernels.compat.scalars import as_float, as_int, as_window
from foundry_kernels.compat.sdpa import positive_scale
from foundry_kernels.core.checks import check_float, check_rank
from foundry_kernels.ops.flash_attention import Options


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: SupportsIndex,
    max_k: SupportsIndex,
    *,
    return_aux: Any = None,
    scale: SupportsFloat | None = None,
    window_size: Iterable[SupportsIndex] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: None = None,
    num_splits: SupportsIndex | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """``torch.nn.attention.varlen.varlen_attn`` on this package's kernels, on CPUs too.

    Args:
        query: ``[total_q, H, D]`` float32, bfloat16, float16 or float64, any strides.
        key: ``[total_k, Hk, D]``.
        value: ``[total_k, Hk, Dv]``.
        cu_seq_q, cu_seq_k: ``[B + 1]`` int32 or int64: where each sequence begins, and the total.
        max_q, max_k: at least the length of the longest sequence.
        return_aux: an ``AuxRequest`` of that module, whose `lse` says whether to return it, or None.
        scale: factor on the scores, of any sign; ``1 / sqrt(D)`` if None.
        window_size: ``(left, right)``, -1 for unbounded: (-1, 0) is causal, the last query being where the last key is.
        enable_gqa: whether H may be any multiple of Hk; otherwise they must be equal.
        seqused_k: ``[B]`` int32 or int64, or None: only so many of each sequence's first keys are in use. Gradients
            flow with it too.
        block_table: must be None: there is no paged cache.
        num_splits: accepted; each backend chooses by itself how to split the work.
        backend: "auto", "reference", "triton" or "native".

    Returns:
        ``[total_q, H, Dv]``, or this and the lse ``[H, total_q]`` float32. A query that sees no key has output 0 and
        lse -inf.

    Raises:
        TypeError, ValueError: an argument does not fit.
        BackendUnavailable: the named backend does not support this device or dtype.
    """
    check_no_pages(block_table)
    for name, x, layout in (("query", query, "[total_q, H, D]"), ("key", key, "[total_k, Hk, D]")):
        check_float(name, x)
        check_rank(name, x, 3, layout)
    if cu_seq_k is None:
        raise ValueError("cu_seq_k must be given: it may be None only with block_table, which is not supported")
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ValueError(f"key must have query's {query.shape[1]} heads unless enable_gqa=True; got {key.shape[1]}")
    if num_splits is not None:
        check_num_splits(num_splits)
    left, right = as_window(window_size)
    query, factor = positive_scale(query, None if scale is None else as_float("scale", scale))
    options: Options = {
        "scale": factor,
        "window": None if left is None and right is None else (left, right),
        "softcap": None,
        "backend": backend,
    }
    packed = (query, key, value, cu_seq_q, cu_seq_k, as_int("max_q", max_q), as_int("max_k", max_k))
    out, lse = attend_segments(packed, None, seqused_k, None, 0, options)
    return (out, lse) if return_aux is not None and return_aux.lse else out
