"""What the parity cases do not cover of the native cross_entropy on the CPU: instruction sets, threads, streamed
gradients, the bare operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from table import cpu_setting
from torch import Tensor

import foundry_kernels as fk
from foundry_kernels.core import extension

SETS = extension.build_info().get("usable_instruction_sets", [])
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
pytestmark = pytest.mark.skipif(extension.MISSING is not None, reason=str(extension.MISSING))


def inputs(n_rows: int, n_classes: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    return torch.randn(n_rows, n_classes, generator=g).to(dtype), torch.randint(n_classes, (n_rows,), generator=g)


def step(x: Tensor, target: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Loss and gradient."""
    x = x.detach().requires_grad_()
    loss = fk.cross_entropy(x, target, backend="native", **options)
    assert isinstance(loss, Tensor)
    (grad,) = torch.autograd.grad(loss, x, torch.ones_like(loss))
    return loss.detach(), grad


def test_the_number_of_threads_does_not_change_a_bit() -> None:
    x, target = inputs(301, 1003)
    results = []
    for threads in (1, 2, 5):
        with cpu_setting(extension.build_info()["instruction_set"], threads):
            results.append(step(x, target, label_smoothing=0.1, z_loss=0.1))
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SETS)
def test_gradients_larger_than_the_caches(name: str, dtype: torch.dtype) -> None:
    """Above 16 MB they are streamed, from wherever a row starts: the same bits as from small calls, which are not."""
    width = 50_257
    n_rows = (17 << 20) // (width * dtype.itemsize) + 1
    x, target = inputs(n_rows, width, dtype)
    target[3] = -100
    with cpu_setting(name, 2):
        whole = step(x, target, reduction="none")
        parts = [step(*part, reduction="none") for part in zip(x.split(50), target.split(50), strict=True)]
    assert whole[1].nbytes > 16 << 20
    for a, e in zip(whole, zip(*parts, strict=True), strict=True):
        assert torch.equal(a, torch.cat(e))


def test_the_bare_operators_check_too() -> None:
    """torch.ops.foundry_kernels.* are reachable without the public function."""
    x, target, ops = torch.ones(2, 4), torch.zeros(2, dtype=torch.int64), torch.ops.foundry_kernels
    rest = (-100, "mean", 0.0, 0.0, None)
    with pytest.raises(ValueError, match="target must have shape"):
        ops.cross_entropy(x, target[:1], None, *rest, False, False)
    with pytest.raises(ValueError, match="reduction must be one of none, mean, sum; got max"):
        ops.cross_entropy(x, target, None, -100, "max", 0.0, 0.0, None, False, False)
    with pytest.raises(TypeError, match="target must be int32 or int64"):
        ops.cross_entropy(x, x[:, 0], None, *rest, False, False)
    with pytest.raises(ValueError, match="weight must have shape"):
        ops.cross_entropy(x, target, x[0, :2], *rest, False, False)
    with pytest.raises(TypeError, match="unsupported dtype"):
        ops.cross_entropy(x.double(), target, None, *rest, False, False)
    with pytest.raises(IndexError, match=r"target must be in 0 \.\. 3"):
        ops.cross_entropy_bwd(x[0, 0], x, target + 4, None, x[:, 0], x[:, 0], None, *rest)
    with pytest.raises(ValueError, match="dloss must have a value for each loss"):
        ops.cross_entropy_bwd(x[0, 0], x, target, None, x[:, 0], x[:, 0], None, -100, "none", 0.0, 0.0, None)
    with pytest.raises(ValueError, match="lse and lse_low one for each token"):
        ops.cross_entropy_bwd(x[0, 0], x, target, None, x[:1, 0], x[:, 0], None, *rest)
    assert ops.cross_entropy(x.to("meta"), target.to("meta"), None, *rest, False, False)[0].shape == ()
