"""Dropout in the pass of a norm, an activation or an adapter: the generator's own answers, one mask on every backend,
seeds, checkpoints, modules. Attention's is in flash_attention/test_dropout.py."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from built import needs_native
from table import Row, rows
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import foundry_kernels as fk
from foundry_kernels import _triton
from foundry_kernels.core import dropout

NORMS = ("add_rms_norm", "add_layer_norm")
#: They drop x and add it to another tensor; the others drop their result.
ADDING = (*NORMS, "lora_linear")
ROWS = [
    r
    for r in rows("reference", "triton", "native")
    if "dropout_p" in inspect.signature(r.op.public).parameters and not r.op.name.startswith("flash")
]
over_rows = pytest.mark.parametrize("row", [pytest.param(r, id=r.id) for r in ROWS])
over_kernels = pytest.mark.parametrize("row", [pytest.param(r, id=r.id) for r in ROWS if r.backend != "reference"])
of_references = pytest.mark.parametrize("row", [pytest.param(r, id=r.id) for r in ROWS if r.backend == "reference"])
LARGEST_SEED = 2**63 - 1

#: Counter, key and words: the published answers of Random123 for philox4x32 of ten rounds.
KNOWN_ANSWERS = {
    "zeros": ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    "ones": ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    "pi": (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
}


def inputs(row: Row, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Positive ones, so that no result is 0 but what is dropped: gate and up, x and a bias, or x and a residual or the
    output of a layer."""
    g = torch.Generator().manual_seed(0)
    shapes = shape, shape[-1:] if row.op.name.startswith("bias") else shape
    first, other = (torch.rand(s, generator=g).add_(0.5).to(row.device, dtype) for s in shapes)
    return first, other * 0 if row.op.name in ADDING else other


def dropped(row: Row, *args: Tensor, **options: Any) -> Tensor:
    """The result to which the mask is applied. An adapter whose matrices are identities adds x after dropout to the
    layer's output."""
    if row.op.name == "lora_linear":
        x, base = args
        identity = torch.eye(x.shape[-1], device=row.device)
        return row.op.public(x, None, identity, identity, base=base, backend=row.backend, **options)
    found = row.op.public(*args, backend=row.backend, **options)
    return found[1] if isinstance(found, tuple) else found


def kept(row: Row, shape: tuple[int, ...], p: float, seed: object, dtype: torch.dtype = torch.float32) -> Tensor:
    """Which elements of a result a backend keeps."""
    return (dropped(row, *inputs(row, shape, dtype), dropout_p=p, dropout_seed=seed) != 0).cpu()


# --- the mask ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KNOWN_ANSWERS)
def test_known_answers(name: str) -> None:
    counter, key, expected = KNOWN_ANSWERS[name]
    words = dropout.philox4x32(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, key)))  # type: ignore[arg-type]
    assert tuple(map(int, words)) == expected


@over_rows
def test_each_backend_gives_the_known_words(row: Row) -> None:
    """The four words of counter 0 and key 0 decide about the first four columns: each is at its own threshold."""
    for column, word in enumerate(KNOWN_ANSWERS["zeros"][2]):
        for p, expected in ((word / 2**32, True), ((word + 1) / 2**32, False)):
            assert bool(kept(row, (1, 4), p, 0)[0, column]) is expected


@over_rows
def test_one_mask_on_every_backend(row: Row) -> None:
    """The parity cases compare smaller ones, in every dtype and layout."""
    wide = 259 if row.op.name == "lora_linear" else 1031  # the identities are square, and slow in the interpreter
    for shape, p, seed in (((3, 2), 0.5, 7), ((2, 3, wide), 0.1, 2**40 + 1), ((64,), 0.999, LARGEST_SEED)):
        assert torch.equal(kept(row, shape, p, seed), dropout.keep_mask(shape, p, torch.tensor(seed))), shape
    for p in (0.0, 2.0**-40):
        assert kept(row, (4, 64), p, 5).all()


@pytest.mark.skipif(not _triton.INTERPRET, reason="the parity suite has wide rows where they are not interpreted")
def test_wide_rows_in_the_interpreter() -> None:
    """Rows that are read in blocks of columns, forward and backward."""
    a, residual = torch.ones(1, 16411, requires_grad=True), torch.zeros(1, 16411)
    expected = dropout.keep_mask(a.shape, 0.5, torch.tensor(9))
    _, h = fk.add_rms_norm(a, residual, dropout_p=0.5, dropout_seed=9, backend="triton")
    assert torch.equal(h, 2.0 * expected)
    assert torch.equal(*torch.autograd.grad(h.sum(), a), 2.0 * expected)


@pytest.mark.parametrize("p", [0.1, 0.5, 1.0 - 2.0**-12])
def test_the_rate_is_that_of_independent_draws(p: float) -> None:
    """All of it, each column, each row, and agreement with neighbours in every direction, the next seed's mask among
    them, within five standard deviations."""
    n = 512
    mask, next_seed = (dropout.keep_mask((n, n), p, torch.tensor(seed)).double() for seed in (1, 2))

    def check(found: Tensor, expected: float, of: int) -> None:
        deviation = (expected * (1.0 - expected) / of) ** 0.5
        assert ((found - expected).abs() <= 5.0 * deviation + 1.0 / of).all()

    check(mask.mean(), 1.0 - p, n * n)
    check(mask.mean(0), 1.0 - p, n)
    check(mask.mean(1), 1.0 - p, n)
    both = p * p + (1.0 - p) * (1.0 - p)
    for other in (mask.roll(1, 1), mask.roll(4, 1), mask.roll(1, 0), mask.T, next_seed):
        check((mask == other).double().mean(), both, n * n // 2)


def test_the_probability_is_exact_to_32_bits() -> None:
    assert [dropout.threshold(p) for p in (2.0**-33, 2.0**-32, 0.5, 1.0 - 2.0**-32)] == [0, 1, 2**31, 2**32 - 1]
    assert dropout.threshold(1.0 - 2.0**-53) == 2**32 - 1, "something is kept with every p below 1"


# --- calls ------------------------------------------------------------------------------------------------------------


@of_references
def test_it_is_the_operation_times_a_mask(row: Row) -> None:
    """Forward, and backward with a cotangent that is dropped out."""
    a, b = (x.sub_(1.0).requires_grad_() for x in inputs(row, (2, 5, 70)))
    factors = dropout.keep_mask(a.shape, 0.25, torch.tensor(3)) * torch.tensor(1.0 / 0.75, dtype=torch.float32)
    dy = torch.randn(a.shape)
    found = dropped(row, a, b, dropout_p=0.25, dropout_seed=3)
    expected = a * factors + b if row.op.name in ADDING else dropped(row, a, b) * factors
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    grads = (torch.autograd.grad(y, (a, b), dy) for y in (found, expected))
    for grad, other in zip(*grads, strict=True):
        torch.testing.assert_close(grad, other, rtol=1e-6, atol=1e-6)


@over_rows
def test_what_is_dropped_stays_nan(row: Row) -> None:
    """It does so in F.dropout too, whose mask is a factor of 0."""
    if row.op.name in ("geglu", "bias_gelu") and row.backend == "reference":
        pytest.skip("PyTorch's own GELU of infinity is NaN on a CPU")
    a, b = inputs(row, (64, 64))
    a.fill_diagonal_(torch.inf)
    drop = {"dropout_p": 0.5, "dropout_seed": 0}
    if row.op.name == "lora_linear":  # whose rank is 1, because identities multiply infinities by 0
        ones = torch.ones_like(a[:1])
        y = row.op.public(a, None, ones, ones.mT, base=b, backend=row.backend, **drop)
    else:
        y = dropped(row, a, b, **drop)
    mask = dropout.keep_mask((64, 64), 0.5, torch.tensor(0)).diagonal()
    found = y.diagonal().cpu()
    assert torch.equal(found.isnan(), torch.zeros_like(mask) if row.op.name == "glu" else ~mask)


@over_rows
def test_seeds(row: Row) -> None:
    """A number or a tensor; without one, the next number of the generator."""

    def draw(seed: object = None) -> Tensor:
        return kept(row, (4, 64), 0.5, seed)

    assert torch.equal(draw(5), draw(torch.tensor([5], device=row.device)))
    assert not torch.equal(draw(5), draw(5 + 2**32))
    torch.manual_seed(0)
    first, second = draw(), draw()
    assert not torch.equal(first, second)
    torch.manual_seed(0)
    assert torch.equal(draw(), first)


@over_kernels
def test_checkpointing_makes_the_mask_again(row: Row) -> None:
    a, b = (x.requires_grad_() for x in inputs(row, (8, 32)))

    def step(call: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        torch.manual_seed(4)
        y = call(lambda *args: dropped(row, *args, dropout_p=0.5), a, b)
        torch.rand(3)  # the generator moves on before the backward pass
        return y, *torch.autograd.grad(y.square().sum(), (a, b))

    plain = step(lambda f, *args: f(*args))
    again = step(lambda f, *args: checkpoint(f, *args, use_reentrant=False))
    assert all(map(torch.equal, plain, again))


def test_compiled() -> None:
    """Without a seed, each call draws one, which its backward pass uses."""
    gate, up, residual = torch.rand(3, 8, 32).add_(0.5).requires_grad_()
    x, bias = torch.rand(8, 32, requires_grad=True), torch.rand(32)

    def function() -> tuple[Tensor, ...]:
        h = fk.add_rms_norm(gate, residual, dropout_p=0.5)[1]
        return fk.reglu(gate, up, dropout_p=0.5), fk.bias_silu(x, bias, dropout_p=0.5), h

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    torch.manual_seed(0)
    first = compiled()
    for y, leaf in zip(first, (up, x, gate), strict=True):
        (grad,) = torch.autograd.grad(y.sum(), leaf, retain_graph=True)
        mask = (y - residual).abs() > 1e-6 if y is first[2] else y != 0
        assert torch.equal(grad != 0, mask)
    second = compiled()
    assert not any(torch.equal(a != 0, b != 0) for a, b in zip(first[:2], second[:2], strict=True))
    torch.manual_seed(0)
    assert all(map(torch.equal, first, compiled()))


@pytest.mark.parametrize("row", [pytest.param(r, id=r.id) for r in ROWS if r.op.name in NORMS])
def test_a_residual_of_another_dtype_is_added_in_the_wider_one(row: Row) -> None:
    x, residual = torch.randn(3, 8).bfloat16(), torch.randn(3, 8)
    y, h = row.op.public(x, residual, dropout_p=0.5, dropout_seed=2, backend=row.backend)
    assert torch.equal(h, (dropout.dropout(x, 0.5, torch.tensor(2)) + residual).bfloat16())
    norm = fk.layer_norm if row.op.name == "add_layer_norm" else fk.rms_norm
    assert torch.equal(y, norm(h, backend=row.backend))


# --- modules ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [fk.nn.RMSNorm, fk.nn.LayerNorm])
def test_norms(norm: Any) -> None:
    module, a, residual = norm((4, 8)), torch.randn(3, 4, 8), torch.randn(3, 4, 8)
    op = fk.add_rms_norm if norm is fk.nn.RMSNorm else fk.add_layer_norm
    eps = {"eps": torch.finfo(torch.float32).eps} if norm is fk.nn.RMSNorm else {}
    flat = op(a.view(3, 32), residual.view(3, 32), torch.ones(32), **eps, dropout_p=0.5, dropout_seed=1)
    for found, expected in zip(module(a, residual, dropout_p=0.5, dropout_seed=1), flat, strict=True):
        assert torch.equal(found, expected.view(3, 4, 8))
    with pytest.raises(ValueError, match="dropout_p needs a residual"):
        module(a, dropout_p=0.5)


@pytest.mark.parametrize("backend", ["reference", pytest.param("native", marks=needs_native)])
@pytest.mark.parametrize("make", [fk.nn.GatedMLP, fk.nn.MLP], ids=lambda make: make.__name__)
def test_a_block_drops_what_it_has_activated(make: Any, backend: str) -> None:
    """The seed is the next number of the generator, and what is recomputed repeats the mask."""
    gated = make is fk.nn.GatedMLP
    activation = "reglu" if gated else "silu"
    block = make(16, 40, activation=activation, dropout=0.5, backend=backend)
    x = torch.randn(3, 7, 16, requires_grad=True)
    results = []
    for recompute in ("none", "product", "projections")[: 3 if gated else 2]:
        block.recompute = recompute
        torch.manual_seed(9)
        y = block(x)
        torch.rand(1)
        results.append((y, *torch.autograd.grad(y.square().sum(), (x, *block.parameters()))))
    torch.manual_seed(9)
    mask = dropout.keep_mask((3, 7, 40), 0.5, dropout.draw_seed(x))
    inner = F.relu(block.w1(x)) * block.w3(x) if gated else F.silu(block.w1(x))
    torch.testing.assert_close(results[0][0], block.w2(inner * mask * 2.0))
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))
    with torch.no_grad():  # in training, where a decoding step reads its weights in one pass
        torch.manual_seed(9)
        torch.testing.assert_close(block(x[:1, :1]), block.w2(inner[:1, :1] * mask[:1, :1] * 2.0))
        before = torch.get_rng_state()
        torch.testing.assert_close(block.eval()(x), block.w2(inner))
        assert torch.equal(torch.get_rng_state(), before)


def test_the_experts_drop_what_they_have_activated() -> None:
    torch.manual_seed(0)
    block = fk.nn.MoE(8, 12, 4, 2, dropout=0.5, shared_width=16, activation="glu", backend="reference")
    x = torch.randn(5, 8)
    torch.manual_seed(1)
    first = block(x)
    torch.manual_seed(1)
    assert torch.equal(block(x), first)
    assert not torch.equal(block(x), first)
    for part in (block.experts, block.shared):
        torch.manual_seed(1)
        part.eval()
        assert not torch.equal(block(x), first)
        part.train()
    samples = torch.stack([block(x) for _ in range(60)])
    expected = block.eval()(x)
    spread = samples.std(0) / len(samples) ** 0.5
    assert ((samples.mean(0) - expected).abs() < 5.0 * spread + 1e-6).all(), "its mean is that of evaluation"


# --- operators and devices --------------------------------------------------------------------------------------------


@needs_native
def test_the_bare_operators_check_too() -> None:
    ops, x, seed, rstd = torch.ops.foundry_kernels, torch.ones(2, 8), torch.tensor(1), torch.ones(2)
    calls: list[Callable[..., Any]] = [
        lambda *drop: ops.glu_fwd(x, x, "relu", 1.0, None, 0.0, False, *drop),
        lambda *drop: ops.glu_bwd(x, x, x, "relu", True, True, 1.0, None, 0.0, False, *drop),
        lambda *drop: ops.bias_act_fwd(x, None, "relu", *drop),
        lambda *drop: ops.bias_act_bwd(x, x, None, "relu", True, False, *drop),
        lambda *drop: ops.rms_norm_fwd(x, x, None, 1e-6, 0.0, False, False, *drop),
        lambda *drop: ops.lora_down(x, x, 1.0, *drop),
        lambda *drop: ops.lora_up(x, x[:, :1], rstd.repeat(4)[:, None], 1.0, *drop),
        lambda *drop: ops.lora_up_(x.clone(), x[:, :1], rstd.repeat(4)[:, None], 1.0, *drop),
        lambda *drop: ops.lora_outer(x, x, 1.0, False, *drop),
        lambda *drop: ops.rms_norm_dropout_bwd(x, None, x, None, rstd, 0.0, False, True, False, *drop),
    ]
    for drop, error, message in (
        ((0.5, None), ValueError, "dropout_p needs a dropout_seed"),
        ((1.0, seed), ValueError, r"dropout_p must be in \[0, 1\)"),
        ((0.5, seed.repeat(2)), ValueError, "dropout_seed must hold one number"),
        ((0.5, seed.float()), TypeError, "dropout_seed must be int64"),
    ):
        for call in calls[:-1] if drop[1] is None else calls:
            with pytest.raises(error, match=message):
                call(*drop)


def test_nothing_is_sharded_over_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    seed, x = torch.tensor(1), torch.ones(2, 8)
    along = {"swiglu": "...n", "bias_gelu": "...n", "rms_norm": "...", "lora_linear": "0km"}
    for name, letters in along.items():
        rules = fk.OPS[name].sharding
        assert rules is not None
        assert rules.sharding({"up": x, "dropout_seed": None})[1] == letters
        assert rules.sharding({"up": x, "dropout_seed": seed})[1] == ""
        assert rules.sharding({"dropout_seed": seed})[1] == ""
    monkeypatch.setattr(dropout, "is_dtensor", lambda tensor: True)
    ops: tuple[Callable[..., Any], ...] = (
        fk.reglu,
        fk.bias_relu,
        lambda x, **options: fk.add_rms_norm(x, x, **options),
        lambda x, **options: fk.lora_linear(x, x, x, x[:, :2], **options),
    )
    for op in ops:
        op(x, dropout_p=0.5, dropout_seed=1)
        with pytest.raises(ValueError, match=r"dropout_seed must be given where (gate|x) is a DTensor"):
            op(x, dropout_p=0.5)
