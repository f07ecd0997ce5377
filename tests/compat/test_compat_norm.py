"""Norms and activations under torch's signatures: what torch's samples, in `test_compat_samples.py`, leave out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from foundry_kernels.compat import gelu, layer_norm, rms_norm, silu

X = torch.linspace(-4.0, 4.0, 24).view(2, 3, 4)
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.transpose(0, 2),
    "expanded": lambda x: x[:1].expand(5, 3, 4),
    "every second": lambda x: x[..., ::2],
    "scalar": lambda x: x[0, 0, 0],
    "vector": lambda x: x[0, 0],
    "empty": lambda x: x[:0],
    "no width": lambda x: x[..., :0],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_activations_take_any_layout(layout: str) -> None:
    for ours, theirs in ((gelu, F.gelu), (silu, F.silu)):
        found = []
        for function in (ours, theirs):
            x = X.clone().requires_grad_()
            y = function(LAYOUTS[layout](x))
            found.append((y.detach(), *torch.autograd.grad(y, x, torch.ones_like(y))))
        for a, e in zip(*found, strict=True):
            torch.testing.assert_close(a, e)


@pytest.mark.parametrize("learns", [False, True])
def test_silu_in_place(learns: bool) -> None:
    found = []
    for function in (silu, F.silu):
        leaf = X.clone().requires_grad_(learns)
        x = leaf * 2.0
        y = function(x, inplace=True)
        assert y is x
        found.append((y.detach(), *(torch.autograd.grad(y.sum(), leaf) if learns else ())))
    for a, e in zip(*found, strict=True):
        torch.testing.assert_close(a, e)
    with pytest.raises(RuntimeError, match="leaf that requires a gradient"):
        silu(X.clone().requires_grad_(), inplace=True)


@pytest.mark.parametrize("function", [rms_norm, layer_norm])
def test_norms_over_several_dimensions(function: Callable[..., Tensor]) -> None:
    theirs = getattr(F, function.__name__)
    weight = torch.linspace(-1.0, 1.0, 12).view(3, 4)
    for x in (X, X[:0], X.transpose(1, 2).contiguous().transpose(1, 2)):
        torch.testing.assert_close(function(x, [3, 4], weight), theirs(x, [3, 4], weight))
    tiny = 1e-4 * X
    torch.testing.assert_close(function(tiny, (4,)), theirs(tiny, (4,)))
