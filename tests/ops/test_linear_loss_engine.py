"""The engine under the linear losses with a loss that the package does not have: what a fourth one needs. And the calls
of few tokens that do without the engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from built import needs_native
from torch import Tensor

import foundry_kernels as fk
from foundry_kernels.core.options import Options
from foundry_kernels.core.registry import OpSpec, no_direct_call
from foundry_kernels.ops._linear_loss import chunks
from foundry_kernels.ops._linear_loss.operators import make_backend
from foundry_kernels.ops._linear_loss.problem import GRADIENTS, Chunk, Loss, RowKernel
from foundry_kernels.testing import make_cotangents, run


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
        torch.randn(shape, generator=generator, requires_grad=True)
        for shape in ((2, 5, 6), (7, 6), (7,), (2, 5, 2), (7, 2))
    ]
    hidden, weight, bias, low, up = leaves
    target = torch.randint(7, (2, 5), generator=generator).index_fill(1, torch.tensor(2), -100)
    options = BrierOptions(-100, reduction, chunk_size, False)
    inputs = (hidden, weight, target, bias, low, up)
    found = linear_brier(*inputs, options)
    with torch.no_grad():
        assert torch.equal(linear_brier(*inputs, options)["loss"], found["loss"])

    counts, logits = target != -100, hidden @ weight.t() + bias + low @ up.t()
    exact = brier(logits, target.clamp(min=0)) * counts
    reduced = {"none": exact, "sum": exact.sum(), "mean": exact.sum() / counts.sum()}[reduction]
    torch.testing.assert_close(found["loss"], reduced)
    torch.testing.assert_close(found["confidence"], logits.softmax(-1).amax(-1) * counts)
    assert not found["confidence"].requires_grad
    cotangent = torch.randn(reduced.shape, generator=generator)
    for a, e in zip(*(torch.autograd.grad(x, leaves, cotangent) for x in (found["loss"], reduced)), strict=True):
        torch.testing.assert_close(a, e)


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", [op for op in fk.OPS.values() if op.name.startswith("linear_")], ids=lambda op: op.name)
def test_few_tokens_skip_the_strategies(op: OpSpec, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and gradients equal those of the general path, values in float32 bit for bit."""
    own, taken = op.direct, [0, 0]

    def counted(*args: Any) -> Any:
        out = own(*args)
        taken[torch.is_grad_enabled()] += out is not None
        return out

    for case in op.cases.CASES[op.name]:
        args = case.make(dtype)
        monkeypatch.setattr(op, "direct", no_direct_call)
        outputs = run(op, args, case.options, backend="native").outputs
        cotangents = make_cotangents(outputs, case.cotangent)
        general = run(op, args, case.options, cotangents, backend="native").items()
        monkeypatch.setattr(op, "direct", counted)
        found = run(op, args, case.options, cotangents, backend="native").items()
        with torch.no_grad():
            alone = run(op, args, case.options, backend="native").outputs
        low = dtype == torch.bfloat16
        if not low and "chunk_size" not in case.options:
            assert all(torch.equal(found[name], y) for name, y in general.items() if "output" in name), case.id
        for x, y in [*((found[name], general[name]) for name in general), *zip(alone, outputs, strict=True)]:
            size = max(1.0, float(y.nan_to_num().abs().max())) if y.numel() else 1.0
            torch.testing.assert_close(
                x, y, equal_nan=True, rtol=2e-2 if low else 1e-5, atol=(2e-2 if low else 2e-6) * size
            )
    assert min(taken) > 2


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_which_calls_make_all_logits(dtype: torch.dtype) -> None:
    """Without gradients those of few tokens; with them where the logits are a fraction of the weight's gradient, and no
    token is ignored, whose hidden state may not be finite."""

    def takes(
        tokens: int, width: int, classes: int, reduction: str = "none", learn: bool = True, ignored: int = 0
    ) -> bool:
        hidden = torch.zeros(tokens, width, dtype=dtype)
        weight = torch.zeros(classes, width, dtype=dtype, requires_grad=learn)
        target = torch.zeros(tokens, dtype=torch.int64)
        target[:ignored] = -100
        rest = (None, None, -100, reduction, 0.0, 0.0, None, 1.0)
        return fk.OPS["linear_cross_entropy"].direct("native", hidden, weight, target, *rest) is not None

    fast = chunks.fast_products(dtype)
    assert takes(4, 8, 5)
    assert not takes(4, 8, 5, ignored=1)
    assert takes(4, 8, 5, learn=False, ignored=1)
    assert not takes(257, 8, 5, learn=False)
    assert takes(100, 64, 1000, learn=False) == (fast or dtype == torch.float32)
    assert [takes(n, 128, 2000) for n in (128, 129)] == [fast, False]
    few = fast or dtype == torch.float32
    assert [takes(n, 128, 3000, "mean") for n in (8, 9)] == [few, False]
