"""The engine under the linear losses with a loss that the package does not have: what a fourth one needs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from foundry_kernels.core.options import Options
from foundry_kernels.ops._linear_loss.operators import make_backend
from foundry_kernels.ops._linear_loss.problem import GRADIENTS, Chunk, Loss, RowKernel


class BrierOptions(Options, schema_types={"ignore_index": "int"}):
    ignore_index: int
    reduction: str
    chunk_size: int | None
    batch_invariant: bool

    logit_scale, softcap = 1.0, None

    def results(self) -> tuple[str, ...]:
        return "loss", "confidence"


def brier(logits: Tensor, target: Tensor) -> Tensor:
    p = logits.softmax(-1)
    return (p - torch.nn.functional.one_hot(target, p.shape[-1])).square().sum(-1)


class Rows(RowKernel):
    cpu = True

    def forward(self, chunk: Chunk, wanted: frozenset[str], dloss: Tensor | None) -> dict[str, Tensor]:
        found = {"loss": brier(chunk.logits, chunk.target), "confidence": chunk.logits.softmax(-1).amax(-1)}
        if dloss is not None:
            self.gradients_(chunk, dloss, (), 0)
        return found

    def gradients_(self, chunk: Chunk, dloss: Tensor, saved: tuple[Tensor, ...], first: int) -> None:
        with torch.enable_grad():
            x = chunk.logits.detach().clone().requires_grad_()
            chunk.logits.copy_(torch.autograd.grad(brier(x, chunk.target), x, dloss)[0])


LOSS = Loss("linear_brier", BrierOptions, outputs=("loss", "confidence", *GRADIENTS), reduced=("loss",), tiles=False)
LIBRARY = torch.library.Library("foundry_kernels_test", "FRAGMENT")


def define(schema: str, function: Any, fake: Any) -> Any:
    """In a namespace of its own: suites enumerate the package's operators."""
    name = schema.split("(")[0]
    LIBRARY.define(schema)
    LIBRARY.impl(name, function, "CPU")
    return getattr(torch.ops.foundry_kernels_test, name).default


linear_brier = make_backend(LOSS, Rows, "", define)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("chunk_size", [None, 3])
def test_a_fourth_loss(reduction: str, chunk_size: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    leaves: list[Any] = [
        torch.randn(shape, generator=generator, requires_grad=True) for shape in ((2, 5, 6), (7, 6), (7,))
    ]
    hidden, weight, bias = leaves
    target = torch.randint(7, (2, 5), generator=generator).index_fill(1, torch.tensor(2), -100)
    options = BrierOptions(-100, reduction, chunk_size, False)
    found = linear_brier(hidden, weight, target, bias, options)
    with torch.no_grad():
        assert torch.equal(linear_brier(hidden, weight, target, bias, options)["loss"], found["loss"])

    counts, logits = target != -100, hidden @ weight.t() + bias
    exact = brier(logits, target.clamp(min=0)) * counts
    reduced = {"none": exact, "sum": exact.sum(), "mean": exact.sum() / counts.sum()}[reduction]
    torch.testing.assert_close(found["loss"], reduced)
    torch.testing.assert_close(found["confidence"], logits.softmax(-1).amax(-1) * counts)
    assert not found["confidence"].requires_grad
    cotangent = torch.randn(reduced.shape, generator=generator)
    for a, e in zip(*(torch.autograd.grad(x, leaves, cotangent) for x in (found["loss"], reduced)), strict=True):
        torch.testing.assert_close(a, e)
