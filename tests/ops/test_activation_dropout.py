"""Dropout in the pass of an activation: one mask on every backend, gradients, seeds, what is saved, modules, errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from table import cpu_setting, rows, saved_tensors
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import foundry_kernels as fk
from foundry_kernels.core import dropout, extension
from foundry_kernels.ops.bias_gelu.sharding import sharding as bias_sharding
from foundry_kernels.ops.swiglu.sharding import sharding as gated_sharding

GATED, PLAIN = ("swiglu", "geglu", "glu", "reglu"), ("bias_gelu", "bias_silu", "bias_relu")
ROWS = [pytest.param(r, id=r.id) for r in rows("reference", "triton", "native") if r.op.name in (*GATED, *PLAIN)]
BACKENDS = [pytest.param(name, b, id=f"{name}-{b}") for name in (*GATED, *PLAIN) for b in fk.OPS[name].backends("cpu")]
needs_native = pytest.mark.skipif(extension.MISSING is not None, reason=str(extension.MISSING))
INSTRUCTION_SETS = extension.build_info().get("usable_instruction_sets", [])


def inputs(name: str, shape: tuple[int, ...], **options: Any) -> tuple[Tensor, Tensor]:
    """Positive ones, so that no result is 0 but what is dropped: gate and up, or x and a bias."""
    second = shape if name in GATED else shape[-1:]
    g = torch.Generator().manual_seed(0)
    first, other = (torch.rand(s, generator=g).add_(0.5).to(**options) for s in (shape, second))
    return first, other


def kept(name: str, shape: tuple[int, ...], p: float, seed: object, backend: str, **options: Any) -> Tensor:
    """Which elements of a result a backend keeps."""
    op, args = getattr(fk, name), inputs(name, shape, **options)
    y = op(*args, dropout_p=p, dropout_seed=seed, backend=backend)
    return (y != 0).cpu()


@pytest.mark.parametrize("row", ROWS)
def test_one_mask_on_every_backend(row) -> None:
    for shape, p, seed in (((3, 2), 0.5, 7), ((2, 3, 1031), 0.1, 2**40 + 1), ((64,), 0.999, 2**63 - 1)):
        expected = dropout.keep_mask(shape, p, torch.tensor(seed))
        for dtype in row.dtypes:
            with row.active():
                found = kept(row.op.name, shape, p, seed, row.backend, dtype=dtype, device=row.device)
            assert torch.equal(found, expected), (shape, dtype)


@pytest.mark.parametrize("backend", fk.OPS["swiglu"].backends("cpu"))
@pytest.mark.parametrize("options", [{}, {"interleaved": True}, {"limit": 7.0, "interleaved": True}, {"alpha": 1.7}])
def test_packed_arguments_drop_the_same(options: dict[str, Any], backend: str) -> None:
    """The mask is that of the result, whatever the arguments look like; so is that of their gradient."""
    gate_up = torch.rand(2, 3, 2 * 37).add_(0.5).requires_grad_()
    y = fk.swiglu(gate_up, **options, dropout_p=0.5, dropout_seed=3, backend=backend)
    mask = dropout.keep_mask((2, 3, 37), 0.5, torch.tensor(3))
    assert torch.equal(y != 0, mask)
    (grad,) = torch.autograd.grad(y, gate_up, torch.ones_like(y))
    halves = (grad[..., ::2], grad[..., 1::2]) if options.get("interleaved") else grad.chunk(2, -1)
    assert all(torch.equal(half != 0, mask) for half in halves)


@needs_native
@pytest.mark.parametrize("name", INSTRUCTION_SETS)
def test_neither_instruction_set_nor_threads_change_it(name: str) -> None:
    """Rows of more than a tile, that are split for bfloat16, in parts of a thousand columns."""
    shape = (5, 9011)
    expected = dropout.keep_mask(shape, 0.3, torch.tensor(5))
    for threads in (1, 3):
        with cpu_setting(name, threads):
            for dtype in (torch.float32, torch.bfloat16):
                for op in ("reglu", "bias_relu"):
                    assert torch.equal(kept(op, shape, 0.3, 5, "native", dtype=dtype), expected)


@pytest.mark.parametrize(("name", "backend"), BACKENDS)
def test_it_is_the_operation_times_a_mask(name: str, backend: str) -> None:
    """Forward, and backward with a cotangent that is dropped out."""
    op, (a, b) = getattr(fk, name), inputs(name, (2, 5, 70))
    a, b = (a - 1.0).requires_grad_(), (b - 1.0).requires_grad_()
    factors = dropout.keep_mask(a.shape, 0.25, torch.tensor(3)) * torch.tensor(1.0 / 0.75, dtype=torch.float32)
    dy = torch.randn(a.shape)
    plain, found = op(a, b, backend=backend), op(a, b, dropout_p=0.25, dropout_seed=3, backend=backend)
    torch.testing.assert_close(found, plain * factors, rtol=1e-6, atol=0.0)
    expected = torch.autograd.grad(plain, (a, b), dy * factors)
    for grad, other in zip(torch.autograd.grad(found, (a, b), dy), expected, strict=True):
        torch.testing.assert_close(grad, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("name", "backend"), BACKENDS)
def test_what_is_dropped_stays_nan(name: str, backend: str) -> None:
    """It does so in F.dropout too, whose mask is a factor of 0."""
    if name in ("geglu", "bias_gelu") and backend == "reference":
        pytest.skip("PyTorch's own GELU of infinity is NaN on a CPU")
    op, (a, b) = getattr(fk, name), inputs(name, (1, 64))
    y = op(torch.full_like(a, torch.inf), b, dropout_p=0.5, dropout_seed=0, backend=backend)
    mask = dropout.keep_mask((1, 64), 0.5, torch.tensor(0))
    assert torch.equal(y.isnan(), torch.zeros_like(mask) if name == "glu" else ~mask)


@pytest.mark.parametrize(("name", "backend"), BACKENDS)
def test_seeds(name: str, backend: str) -> None:
    def draw(seed: object = None, p: float = 0.5) -> Tensor:
        return kept(name, (4, 64), p, seed, backend)

    assert torch.equal(draw(5), draw(torch.tensor([5])))
    assert not torch.equal(draw(5), draw(5 + 2**32))
    assert draw(5, 0.0).all()
    torch.manual_seed(0)
    first, second = draw(), draw()
    assert not torch.equal(first, second)
    torch.manual_seed(0)
    assert torch.equal(draw(), first)


@pytest.mark.parametrize(("name", "backend"), [each for each in BACKENDS if each.values[1] != "reference"])
def test_the_mask_is_not_saved_but_made_again(name: str, backend: str) -> None:
    op, (a, b) = getattr(fk, name), inputs(name, (16, 64))
    a, b, seed = a.requires_grad_(), b.requires_grad_(), torch.tensor(1)
    with saved_tensors() as saved:
        op(a, b, dropout_p=0.5, dropout_seed=seed, backend=backend)
    assert {t.data_ptr() for t in saved} == {a.data_ptr(), b.data_ptr(), seed.data_ptr()}

    def step(call: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        torch.manual_seed(4)
        y = call(lambda *args: op(*args, dropout_p=0.5, backend=backend), a, b)
        torch.rand(3)  # the generator moves on before the backward pass
        return y, *torch.autograd.grad(y.square().sum(), (a, b))

    plain = step(lambda f, *args: f(*args))
    again = step(lambda f, *args: checkpoint(f, *args, use_reentrant=False))
    assert all(map(torch.equal, plain, again))


def test_compiled() -> None:
    """Without a seed, each call draws one, which its backward pass uses."""
    gate, up = (t.requires_grad_() for t in inputs("reglu", (8, 32)))
    x, bias = (t.requires_grad_() for t in inputs("bias_silu", (8, 32)))

    def function() -> tuple[Tensor, Tensor]:
        return fk.reglu(gate, up, dropout_p=0.5), fk.bias_silu(x, bias, dropout_p=0.5)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    y, z = compiled()
    dgate, dx = torch.autograd.grad((y.sum(), z.sum()), (gate, x))
    assert torch.equal(dgate != 0, y != 0)
    assert torch.equal(dx != 0, z != 0)
    assert not torch.equal(y != 0, compiled()[0] != 0)


# --- modules ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["reference", "native"])
@pytest.mark.parametrize("make", [fk.nn.GatedMLP, fk.nn.MLP], ids=lambda make: make.__name__)
def test_a_block_drops_what_it_has_activated(make, backend: str) -> None:
    """The seed is the next number of the generator, and what is recomputed repeats the mask."""
    if backend == "native" and extension.MISSING is not None:
        pytest.skip(extension.MISSING)
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
    samples = torch.stack([block(x) for _ in range(500)])
    expected = block.eval()(x)
    spread = samples.std(0) / len(samples) ** 0.5
    assert ((samples.mean(0) - expected).abs() < 5.0 * spread + 1e-6).all(), "its mean is that of evaluation"


# --- errors -----------------------------------------------------------------------------------------------------------

BAD: dict[str, tuple[dict[str, object], type[Exception], str]] = {
    "one": ({"dropout_p": 1.0}, ValueError, r"dropout_p must be in \[0, 1\); got 1.0"),
    "text": ({"dropout_p": "0.1"}, TypeError, "dropout_p must be a float; got str"),
    "seed below 0": ({"dropout_seed": -1}, ValueError, "dropout_seed must be >= 0; got -1"),
    "seed dtype": ({"dropout_seed": torch.tensor(1.0)}, TypeError, "dropout_seed must be int64.*torch.float32"),
    "seed elsewhere": (
        {"dropout_seed": torch.ones((), dtype=torch.int64, device="meta")},
        ValueError,
        "dropout_seed must be on (gate|x)'s device cpu; got meta",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input(what: str) -> None:
    options, error, message = BAD[what]
    for name in (*GATED, *PLAIN):
        with pytest.raises(error, match=message):
            getattr(fk, name)(*inputs(name, (2, 8)), **{"dropout_p": 0.5, **options})


@needs_native
def test_the_bare_operators_check_too() -> None:
    ops, x, seed = torch.ops.foundry_kernels, torch.ones(2, 8), torch.tensor(1)
    for drop, message in (
        ((0.5, None), "dropout_p needs a dropout_seed"),
        ((1.0, seed), r"dropout_p must be in \[0, 1\)"),
        ((0.5, seed.repeat(2)), "dropout_seed must hold one number"),
    ):
        for call in (
            lambda drop: ops.glu_fwd(x, x, "relu", 1.0, None, 0.0, False, *drop),
            lambda drop: ops.glu_bwd(x, x, x, "relu", True, True, 1.0, None, 0.0, False, *drop),
            lambda drop: ops.bias_act_fwd(x, None, "relu", *drop),
            lambda drop: ops.bias_act_bwd(x, x, None, "relu", True, False, *drop),
        ):
            with pytest.raises(ValueError, match=message):
                call(drop)
    with pytest.raises(TypeError, match="dropout_seed must be int64"):
        ops.bias_act_fwd(x, None, "relu", 0.5, seed.float())
    with pytest.raises(ValueError, match="activation must be one of silu, gelu, gelu_tanh, sigmoid, relu; got tanh"):
        ops.glu_fwd(x, x, "tanh")
    with pytest.raises(ValueError, match="activation must be one of gelu, gelu_tanh, silu, relu; got sigmoid"):
        ops.bias_act_fwd(x, None, "sigmoid")


def test_nothing_is_sharded_over_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    seed, x = torch.tensor(1), torch.ones(2, 8)
    for rule in (gated_sharding, bias_sharding):
        assert rule({"up": x, "dropout_seed": None})[1] == "...n"
        assert rule({"up": x, "dropout_seed": seed})[1] == ""
    assert gated_sharding({"dropout_seed": seed})[1] == ""
    monkeypatch.setattr(dropout, "is_dtensor", lambda tensor: True)
    for op in (fk.reglu, fk.bias_relu):
        op(x, dropout_p=0.5, dropout_seed=1)
        with pytest.raises(ValueError, match=r"dropout_seed must be given where (gate|x) is a DTensor"):
            op(x, dropout_p=0.5)
