"""Few rows at a time, as in decoding: several projections of one input in one pass over their weights.

The operator `decode_linear` reads each layer's own weight where it is. Nothing is packed, copied or kept between calls,
so loading, moving, casting or replacing a weight needs no thought. A layer is called as it is wherever calling it could
be more than a product with its weight: under autograd, autocast, a transform or a hook, in another class, with a bias,
with a weight that is no plain dense tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from foundry_kernels.core import extension
from foundry_kernels.core.registry import _transformed

#: Rows up to which a pass over the weights is faster than torch's products; the operator takes no more.
MAX_ROWS = 8

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_PLAIN = (Tensor, nn.Parameter)


_linear = extension.operator("decode_linear")
#: Rotates queries into a new tensor and keys into a cache, and copies values into another; see csrc/torch.
rope_append = extension.operator("rope_append")


def is_observed(module: nn.Module) -> bool:
    """Whether something else is to happen when the module is called: hooks, or a `forward` of its own."""
    return bool(
        module._forward_pre_hooks
        or module._forward_hooks
        or module._backward_pre_hooks
        or module._backward_hooks
        or "forward" in module.__dict__
    )


def is_plain(layer: nn.Module) -> bool:
    """Whether calling `layer` is `F.linear` with its weight and nothing more."""
    return type(layer) is nn.Linear and layer.bias is None and not is_observed(layer)


def serves(x: Tensor, backend: str) -> bool:
    """Whether `project` may take x ``[..., dim]``, as far as that does not depend on the layers."""
    return (
        _linear is not None
        and backend in ("auto", "native")
        and not torch.is_grad_enabled()
        and type(x) is Tensor
        and x.is_cpu
        and x.dtype in _DTYPES
        and 0 < x.numel() <= MAX_ROWS * x.shape[-1]
        and not torch.is_autocast_enabled("cpu")
        and not _transformed()
        and not _has_any_global_hook()
    )


def project(x: Tensor, *layers: nn.Module) -> Tensor | None:
    """The layers' results for an x that is served, one behind the other in the last dimension; None where one of them
    has to be called."""
    weights: list[Any] = []
    for layer in layers:
        if not is_plain(layer):
            return None
        weights.append(layer.weight)
    return multiply(x, *weights)


def multiply(x: Tensor, *weights: Tensor) -> Tensor | None:
    """The same with the layers' weights ``[N, dim]``."""
    for weight in weights:
        plain = type(weight) in _PLAIN and weight.layout is torch.strided
        if not plain or weight.dtype != x.dtype or not weight.is_cpu:
            return None
    assert _linear is not None
    return _linear(x, weights)
