"""Every example of a score function on every backend that has them, in all directions, against a float64 form."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from score_functions import EXAMPLES, Example, Sizes, eager
from torch import Tensor

import foundry_kernels as fk
from foundry_kernels.core import registry
from foundry_kernels.ops.flash_attention import FLASH_ATTENTION, flash_attention_varlen

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS = [b for b in registry.BACKENDS if FLASH_ATTENTION.why_not(b, DEVICE, None, ("score_mod",)) is None]
over_backends = pytest.mark.parametrize("backend", BACKENDS)
over_examples = pytest.mark.parametrize("name", EXAMPLES)

Attend = Callable[..., tuple[Tensor, Tensor]]


def results(
    attend: Attend, example: Example, sizes: Sizes, dtype: torch.dtype, captured: torch.dtype, causal: bool = False
) -> dict[str, Tensor]:
    """The results and gradients of a call, for cotangents that are the same for all dtypes."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"q": (*sizes[:3], 16), "k": (sizes.batch, 2, sizes.keys, 16), "v": (sizes.batch, 2, sizes.keys, 16)}
    drawn = {n: torch.randn(shape, generator=generator, dtype=torch.float64) for n, shape in shapes.items()}
    given = {n: x.to(DEVICE, dtype).requires_grad_() for n, x in drawn.items()}
    tensors = example.captured(sizes, captured)
    tensors = {n: x.detach().to(DEVICE).requires_grad_(x.requires_grad) for n, x in tensors.items()}
    out, lse = attend(*given.values(), example.score_mod(tensors))
    some = lse.detach().isfinite()
    weight = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(DEVICE)
    loss = (out.double() * weight).sum() + lse.double().where(some, 0.0).sum()
    wanted = given | {n: tensors[n] for n in example.trained}
    found = dict(zip(wanted, torch.autograd.grad(loss, list(wanted.values())), strict=True))
    return {"out": out.detach(), "lse": lse.detach().where(some, 0.0)} | found


def check(actual: dict[str, Tensor], of_reference: dict[str, Tensor], exact: dict[str, Tensor]) -> None:
    """The rule of `testing.policy`; a gradient that sums many terms is measured by the reference's own error."""
    for name, x in exact.items():
        error, base = ((y[name].double() - x).abs().max() for y in (actual, of_reference))
        assert error <= 2 * base + 2e-6 * max(1.0, float(x.abs().max())), (name, float(error), float(base))


def reference(q: Tensor, k: Tensor, v: Tensor, score_mod: object, **options: object) -> tuple[Tensor, Tensor]:
    return fk.flash_attention(q, k, v, score_mod=score_mod, return_lse=True, backend="reference", **options)  # type: ignore[call-overload,no-any-return]


@over_examples
@over_backends
def test_all_directions(name: str, backend: str) -> None:
    """Two backward passes through one graph have the same bits."""
    example, sizes = EXAMPLES[name], Sizes(2, 4, 36, 36)

    def attend(q: Tensor, k: Tensor, v: Tensor, score_mod: object) -> tuple[Tensor, Tensor]:
        return fk.flash_attention(q, k, v, score_mod=score_mod, return_lse=True, backend=backend)  # type: ignore[call-overload,no-any-return]

    exact = results(lambda q, k, v, fn: eager(q, k, v, fn), example, sizes, torch.float64, torch.float64)
    actual = results(attend, example, sizes, torch.float32, torch.float32)
    check(actual, results(reference, example, sizes, torch.float32, torch.float32), exact)
    if backend != "reference":
        again = results(attend, example, sizes, torch.float32, torch.float32)
        assert all(torch.equal(x, again[n]) for n, x in actual.items())


@over_examples
@over_backends
def test_decoding(name: str, backend: str) -> None:
    """Few queries and split keys: q_idx begins at 0."""
    example, sizes = EXAMPLES[name], Sizes(2, 4, 2, 140)
    if example.square:
        pytest.skip("has no meaning for fewer queries than keys")
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, t, 16, generator=generator).to(DEVICE) for n, t in ((4, 2), (2, 140), (2, 140)))
    tensors = {n: x.detach().to(DEVICE) for n, x in example.captured(sizes).items()}
    actual, of_reference = (
        {"out": fk.flash_attention(q, k, v, score_mod=example.score_mod(tensors), backend=name)}
        for name in (backend, "reference")
    )
    wide = {n: x.double() if x.is_floating_point() else x for n, x in tensors.items()}
    expected, _ = eager(q.double(), k.double(), v.double(), example.score_mod(wide))
    check(actual, of_reference, {"out": expected})


@pytest.mark.parametrize("name", ["t5_bias", "mla_rope", "head_gate", "alibi"])
@over_backends
def test_packed_sequences(name: str, backend: str) -> None:
    """b is the number of the sequence; each is as alone, with gradients of what all read."""
    example, sizes, lengths = EXAMPLES[name], Sizes(3, 4, 33, 33), (33, 0, 9)
    starts = torch.tensor([0, 33, 33, 42], dtype=torch.int32, device=DEVICE)

    def packed(q: Tensor, k: Tensor, v: Tensor, score_mod: object) -> tuple[Tensor, Tensor]:
        rows = [torch.cat([x[n, :, :t].transpose(0, 1) for n, t in enumerate(lengths)]) for x in (q, k, v)]
        found = flash_attention_varlen(
            *rows, starts, starts, 33, 33, score_mod=score_mod, causal=True, return_lse=True, backend=backend
        )  # type: ignore[call-overload]
        return padded(found[0].transpose(0, 1)), padded(found[1])

    def padded(x: Tensor) -> Tensor:
        parts = [x[:, i:j] for i, j in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)]
        return torch.stack([torch.cat([y, y.new_zeros(y.shape[0], 33 - y.shape[1], *y.shape[2:])], 1) for y in parts])

    def dense(q: Tensor, k: Tensor, v: Tensor, score_mod: object) -> tuple[Tensor, Tensor]:
        seen = torch.ones(33, 33, dtype=torch.bool, device=DEVICE).tril()
        exist = torch.arange(33, device=DEVICE) < torch.tensor(lengths, device=DEVICE)[:, None, None]
        out, lse = eager(q, k, v, score_mod, seen & exist[:, None].transpose(2, 3) & exist[:, None])  # type: ignore[arg-type]
        return out, lse.where(exist, 0.0)

    exact = results(dense, example, sizes, torch.float64, torch.float64)
    actual = results(packed, example, sizes, torch.float32, torch.float32)
    check(actual, results(dense, example, sizes, torch.float32, torch.float32), exact)


@pytest.mark.skipif("triton" not in BACKENDS, reason="no Triton")
def test_heads_of_a_shard() -> None:
    """A function gets the numbers of sequences and heads in the whole, also for the gradient of what it reads."""
    from foundry_kernels.ops.flash_attention import reference as plain
    from foundry_kernels.ops.flash_attention import triton
    from foundry_kernels.ops.flash_attention.checks import make_options
    from foundry_kernels.ops.flash_attention.options import AttentionArguments

    q, k, v = (torch.randn(1, n, 36, 16, device=DEVICE) for n in (4, 2, 2))
    heads = torch.tensor([[(3 << 32) + 8 + i for i in range(4)]], device=DEVICE)
    table = torch.randn(5, 12, 7, device=DEVICE, requires_grad=True)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score * table[b, h, kv_idx % 7] + h + b

    given = AttentionArguments(score_mod=score_mod)
    options = make_options(q, (None, None, 36, 36), given)._replace(dropout_heads=heads)
    found = []
    for attend in (plain.flash_attention, triton.flash_attention):
        out = attend(q, k, v, options)
        assert isinstance(out, Tensor)
        found.append((out.detach(), *torch.autograd.grad(out.square().sum(), table)))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
    assert found[1][1].nonzero()[:, :2].unique(dim=0).tolist() == [[3, 8 + i] for i in range(4)]


def test_a_function_that_changes_nothing_is_none() -> None:
    from foundry_kernels.ops.flash_attention.score_program.arguments import program_of

    q = torch.randn(1, 2, 3, 4)
    assert program_of(lambda score, b, h, q_idx, kv_idx: score.to(torch.float32), q, (1, 2, 3, 3), None) == (None, None)
