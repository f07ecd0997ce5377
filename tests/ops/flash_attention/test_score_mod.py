"""`score_mod` of the public functions: every example on the backends that run it, and what it is combined with."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attention_inputs import plain_options
from score_functions import EXAMPLES, Sizes, eager
from torch import Tensor

import foundry_kernels as fk
from foundry_kernels.core.registry import override
from foundry_kernels.ops.flash_attention import FLASH_ATTENTION, FLASH_ATTENTION_VARLEN, LACKS

SIZES = Sizes()
CAUSAL = torch.ones(SIZES.queries, SIZES.keys, dtype=torch.bool).tril()


def inputs(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0, heads_k: int = 2) -> list[Tensor]:
    """q of this shape, and k and v with fewer heads."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (shape, *[(*shape[:-3], heads_k, *shape[-2:])] * 2)
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def tensors_of(name: str, captured: dict[str, Tensor]) -> list[Tensor]:
    return [captured[n] for n in EXAMPLES[name].trained]


@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("name", EXAMPLES)
def test_examples(name: str, causal: bool) -> None:
    """The reference, forward and backward with the gradients of captured tensors, in float64."""
    captured = EXAMPLES[name].captured(SIZES, torch.float64)
    fn, q_k_v = EXAMPLES[name].score_mod(captured), inputs(*SIZES[:3], 8)
    out, lse = fk.flash_attention(*q_k_v, score_mod=fn, causal=causal, return_lse=True, backend="reference")
    wanted = eager(*q_k_v, fn, CAUSAL if causal else None)
    leaves, rows = [*q_k_v, *tensors_of(name, captured)], (wanted[1] > -math.inf)[..., None]
    torch.testing.assert_close(lse, wanted[1])
    torch.testing.assert_close(out, wanted[0].masked_fill(~rows, 0.0))
    gradient = torch.randn_like(out)
    found = torch.autograd.grad(out, leaves, gradient)
    expected = torch.autograd.grad(wanted[0].masked_fill(~rows, 0.0), leaves, gradient)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("unread", [False, True], ids=["", "in one matrix"])
@pytest.mark.parametrize("name", ["documents", "head_gate", "mla_rope", "prefix_lm"])
def test_packed_sequences(name: str, unread: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sequence is an entry of the batch, whose queries and keys are counted from 0."""
    captured = EXAMPLES[name].captured(SIZES, torch.float64)
    fn, (q, k, v) = EXAMPLES[name].score_mod(captured), inputs(*SIZES[:3], 8)
    dense = fk.flash_attention(q, k, v, score_mod=fn, causal=True, backend="reference")
    ends = torch.arange(0, SIZES.batch + 1, dtype=torch.int32) * SIZES.queries
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: unread)  # so that lengths are not read
    packed = fk.flash_attention_varlen(
        *(x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)), ends, ends, SIZES.queries, SIZES.keys, score_mod=fn,
        causal=True, backend="reference",
    )  # fmt: skip
    torch.testing.assert_close(packed.unflatten(0, (SIZES.batch, -1)).transpose(1, 2), dense)
    leaves, gradient = [q, k, v, *tensors_of(name, captured)], torch.randn_like(dense)
    found = torch.autograd.grad(packed.unflatten(0, (SIZES.batch, -1)).transpose(1, 2), leaves, gradient)
    for x, y in zip(found, torch.autograd.grad(dense, leaves, gradient), strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("unread", [False, True], ids=["", "in one matrix"])
def test_pages(unread: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are counted from the end of the padding; a backward pass is refused for a captured tensor too."""
    gate = torch.randn(2, 4, 9, requires_grad=True)
    q, k, v = (x.detach() for x in inputs(2, 4, 1, 8, dtype=torch.float32))
    pages = torch.randn(2, 4, 3, 2, 8)  # k and v: 4 pages of 3 positions
    table, used, padding = torch.tensor([[3, 1], [0, 2]]), torch.tensor([6, 5]), torch.tensor([1, 0])
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: unread)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score * gate[b, h, kv_idx]

    out = fk.flash_attention_varlen(
        q[:, :, 0], *pages, torch.tensor([0, 1, 2]), None, 1, 6, block_table=table, seqused_k=used, leftpad_k=padding,
        score_mod=score_mod, backend="reference",
    )  # fmt: skip
    for n in range(2):
        k, v = (x[table[n]].flatten(0, 1)[padding[n] : used[n]].transpose(0, 1)[None] for x in pages)
        own = eager(q[n : n + 1], k, v, lambda s, b, h, i, j, n=n: score_mod(s, b + n, h, i, j))[0]
        torch.testing.assert_close(out[n], own[0, :, 0])
    with pytest.raises(RuntimeError, match="pages are for inference"):
        out.sum().backward()


def test_order_of_options() -> None:
    """After the cap, ALiBi and the bias, before the masks; NaN and infinity beside a hidden pair reach nothing."""
    q, k, v = inputs(*SIZES[:3], 8)
    slopes, table = torch.rand(4, dtype=torch.float64), torch.randn(20, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(4, 1, 20, dtype=torch.float64, requires_grad=True)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return 0.1 * score * score * torch.sqrt((q_idx - kv_idx).double()) + torch.log(table[q_idx - kv_idx].abs())

    out = fk.flash_attention(
        q, k, v, score_mod=score_mod, softcap=2.0, alibi_slopes=slopes, attn_mask=bias, causal=True, backend="reference"
    )
    away = (torch.arange(20)[:, None] - torch.arange(20)).clamp_min(0)
    scores = 2.0 * torch.tanh(q @ k.repeat_interleave(2, 1).mT * 8**-0.5 / 2.0) - slopes[:, None, None] * away + bias
    scores = 0.1 * scores * scores * away.double().masked_fill(away == 0, 1.0).sqrt().masked_fill(away == 0, 0.0)
    scores = (scores + torch.log(table[away].abs())).masked_fill(~CAUSAL, -math.inf)
    wanted, leaves = scores.softmax(-1) @ v.repeat_interleave(2, 1), (q, k, v, bias, table)
    torch.testing.assert_close(out, wanted)
    for x, y in zip(*(torch.autograd.grad(x.sum() + x.sin().sum(), leaves) for x in (out, wanted)), strict=True):
        torch.testing.assert_close(x, y)


def test_derivatives_of_every_order() -> None:
    """gradcheck, the second derivative, forward mode and vmap of the reference."""
    q, k, v = inputs(1, 2, 3, 2, heads_k=1)
    table = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)

    def attend(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return torch.where(q_idx >= kv_idx, score * table[h, q_idx - kv_idx], torch.tanh(score))

        return fk.flash_attention(q, k, v, score_mod=score_mod)

    assert torch.autograd.gradcheck(attend, (q, k, v, table), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(attend, (q, k, v, table))
    together = torch.func.vmap(attend, (0, None, None, None))(torch.stack([q, q + 1]), k, v, table)
    torch.testing.assert_close(together[1], attend(q + 1, k, v, table))


def test_a_captured_table_of_low_precision_is_rounded_once() -> None:
    """Its gradient is a sum of thousands of terms; two calls agree in every bit."""
    q, k, v = inputs(2, 4, 64, 8, dtype=torch.bfloat16)
    table = torch.randn(4, dtype=torch.bfloat16, requires_grad=True)
    wide = table.detach().double().requires_grad_()

    def gradient(table: Tensor, *q_k_v: Tensor) -> Tensor:
        out = fk.flash_attention(*q_k_v, score_mod=lambda s, b, h, i, j: s * table[h], backend="reference")
        return torch.autograd.grad(out.float().square().sum(), table)[0]

    found = gradient(table, q, k, v)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, gradient(table, q, k, v))
    torch.testing.assert_close(found.double(), gradient(wide, *(x.double() for x in (q, k, v))), rtol=0.02, atol=0.02)


def test_batch_invariance() -> None:
    q, k, v = (x.detach() for x in inputs(3, 4, 9, 8, dtype=torch.float32))
    gate = torch.randn(3, 4)
    whole = fk.flash_attention(q, k, v, score_mod=lambda s, b, h, i, j: s * gate[b, h], batch_invariant=True,
                               backend="reference")  # fmt: skip
    alone = fk.flash_attention(*(x[2:] for x in (q, k, v)), score_mod=lambda s, b, h, i, j: s * gate[b + 2, h],
                               backend="reference")  # fmt: skip
    assert torch.equal(whole[2:], alone)


def test_checkpointing() -> None:
    q, k, v = inputs(2, 4, 9, 8)
    table = torch.randn(9, 9, dtype=torch.float64, requires_grad=True)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return fk.flash_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + table[i, j])

    gradients = [
        torch.autograd.grad(out.square().sum(), (q, k, v, table))
        for out in (attend(q, k, v), torch.utils.checkpoint.checkpoint(attend, q, k, v, use_reentrant=False))
    ]
    for x, y in zip(*gradients, strict=True):
        assert torch.equal(x, y)


def test_a_table_changed_between_the_passes_is_refused() -> None:
    q, k, v = inputs(1, 4, 9, 8)
    table = torch.randn(9, 9, dtype=torch.float64)
    out = fk.flash_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + table[i, j])
    table.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("name", ["alibi", pytest.param("t5_bias", marks=pytest.mark.slow)])
def test_compiled(name: str) -> None:
    """Without a graph break, with the captured tensors as inputs of the graph: other values need no new graph."""
    example, graphs = EXAMPLES[name], []
    q_k_v = inputs(*SIZES[:3], 8)

    def count(graph: Any, args: Any) -> Any:
        graphs.append(graph)
        return graph

    def attend(q: Tensor, k: Tensor, v: Tensor, captured: dict[str, Tensor]) -> Tensor:
        return fk.flash_attention(q, k, v, score_mod=example.score_mod(captured), causal=True, backend="reference")

    compiled = torch.compile(attend, backend=count, fullgraph=True)
    for seed in (0, 1):
        captured = example.captured(SIZES, torch.float64, seed)
        leaves = [*q_k_v, *tensors_of(name, captured)]
        found, wanted = (torch.autograd.grad(f(*q_k_v, captured).sin().sum(), leaves) for f in (compiled, attend))
        for x, y in zip(found, wanted, strict=True):
            torch.testing.assert_close(x, y)
    assert len(graphs) == 1


def test_the_module() -> None:
    """With a cache, kv_idx counts from its first key."""
    module, x = fk.nn.Attention(32, 4, 2), torch.randn(2, 6, 32)
    table = torch.randn(4, 6, requires_grad=True)
    assert not torch.equal(module(x, score_mod=lambda s, b, h, i, j: s + table[h, j]), module(x))
    module(x, score_mod=lambda s, b, h, i, j: s + table[h, j]).sum().backward()
    assert table.grad is not None

    class Store:
        k = v = torch.zeros(2, 2, 0, 8)
        length = property(lambda self: self.k.shape[2])

        def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            self.k, self.v = torch.cat([self.k, k], 2), torch.cat([self.v, v], 2)
            return self.k, self.v

    store = Store()
    steps = [module(x[:, n : n + 2], cache=store, score_mod=lambda s, b, h, i, j: s + table[h, j]) for n in (0, 2, 4)]
    torch.testing.assert_close(torch.cat(steps, 1), module(x, score_mod=lambda s, b, h, i, j: s + table[h, j]))


@pytest.mark.parametrize("spec", [FLASH_ATTENTION, FLASH_ATTENTION_VARLEN], ids=lambda spec: spec.name)
@pytest.mark.parametrize("option", sorted({x for by_device in LACKS.values() for d in by_device.values() for x in d}))
def test_a_backend_without_an_option_is_passed_over_and_refuses_by_name(spec: Any, option: str) -> None:
    with override(spec, "native", missing=None, devices=None), override(spec, "triton", missing=None, devices=None):
        for device in ("cpu", "cuda"):
            lacking = [b for b in LACKS if option in LACKS[b].get(device, ())]
            assert spec._first("auto", device, torch.float32, (option,)).backend not in lacking
            for backend in lacking:
                assert spec._first(backend, device, torch.float32, (option,)) is None
                reason = spec.why_not(backend, device, torch.float32, (option,))
                assert reason == f"does not support {option} on {device}"


def test_no_score_mod_is_no_program() -> None:
    assert plain_options(1, 1).needs() == ()
    assert plain_options(1, 1)._replace(score_mod=(0, 1, 1)).needs() == ("score_mod",)
