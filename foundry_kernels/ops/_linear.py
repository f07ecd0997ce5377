"""Linear layers on `grouped_mm` with one group. Their rows have the same bits in any batch:
`foundry_kernels.batch_invariant` replaces `torch.nn.functional.linear` with them. Otherwise they use the matmuls of
`_products.py`."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from foundry_kernels.core import invariance
from foundry_kernels.core.autocast import autocast_dtype
from foundry_kernels.core.registry import _transformed, is_subclass
from foundry_kernels.ops.grouped_mm import grouped_mm

Linear = Callable[..., Tensor]

#: PyTorch's own function, even if it is replaced later.
TORCHS: Linear = F.linear


def chosen() -> Linear:
    """Returns `F.linear` or, while `batch_invariant` is on, its replacement. A backward pass that recomputes a layer
    uses this, because the switch may be off by then."""
    return linear if invariance.on else TORCHS


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, batch_invariant: bool = True) -> Tensor:
    """``F.linear(x, weight, bias)`` by :func:`foundry_kernels.grouped_mm` with one group.

    The matmul is rounded to x's dtype before the bias is added. The gradient of `weight` sums over the rows in a fixed
    order, so it is the same for any number of threads. There is no second derivative. Subclasses of Tensor, devices
    other than CPU and CUDA, integers and `torch.func` transforms run on PyTorch's function.

    Args:
        x: ``[..., K]`` float32, bfloat16 or float16.
        weight: ``[N, K]`` or ``[K]``, of x's dtype and device. bias: ``[N]`` or ``[]``, or None.
        batch_invariant: as in `grouped_mm`.

    Raises:
        ValueError: shapes, dtypes or devices do not match.
        BackendUnavailable: there is no such matmul for this dtype or device.
    """
    if any(t is not None and _is_torchs(t) for t in (x, weight, bias)) or _transformed():
        return TORCHS(x, weight, bias)
    if (low := autocast_dtype(x)) is not None:
        x, weight, bias = x.to(low), weight.to(low), None if bias is None else bias.to(low)
    if x.shape[-1] != weight.shape[-1]:
        raise ValueError(f"weight must be [N, K] with x's last dimension {x.shape[-1]}; got {tuple(weight.shape)}")
    rows = x.reshape(-1, x.shape[-1])
    offs = torch.full((1,), rows.shape[0], dtype=torch.int32, device=x.device)
    matrix = weight.reshape(-1, weight.shape[-1]).t().unsqueeze(0)
    y = grouped_mm(rows, matrix, offs, batch_invariant=batch_invariant).view(*x.shape[:-1], *weight.shape[:-1])
    return y if bias is None else y + bias


def _is_torchs(x: Tensor) -> bool:
    """Whether PyTorch's function is called for `x`, which then raises its own errors."""
    plain = isinstance(x, Tensor) and not is_subclass(x) and not x.is_nested
    return not plain or not x.is_floating_point() or x.device.type not in ("cpu", "cuda")
