"""Dropout in the pass of a norm: the generator's own answers, one mask on every backend, seeds, gradients, errors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from table import cpu_setting, rows, saved_tensors
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import foundry_kernels as fk
from foundry_kernels import _triton
from foundry_kernels.core import dropout, extension
from foundry_kernels.ops.rms_norm.sharding import sharding

OPS = {"add_rms_norm": fk.add_rms_norm, "add_layer_norm": fk.add_layer_norm}
ROWS = [pytest.param(r, id=r.id) for r in rows("reference", "triton", "native") if r.op.name in OPS]
BACKENDS = [pytest.param(op, b, id=f"{name}-{b}") for name, op in OPS.items() for b in fk.OPS[name].backends("cpu")]
needs_native = pytest.mark.skipif(extension.MISSING is not None, reason=str(extension.MISSING))
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


@pytest.mark.parametrize("name", KNOWN_ANSWERS)
def test_known_answers(name: str) -> None:
    counter, key, expected = KNOWN_ANSWERS[name]
    words = dropout.philox4x32(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, key)))  # type: ignore[arg-type]
    assert tuple(map(int, words)) == expected


def kept(op: Callable[..., tuple[Tensor, Tensor]], shape: tuple[int, ...], p: float, seed: object, **options) -> Tensor:
    """Which elements of a tensor of ones a backend keeps."""
    x = torch.ones(shape, dtype=options.pop("dtype", torch.float32), device=options.pop("device", "cpu"))
    _, h = op(x, torch.zeros_like(x), dropout_p=p, dropout_seed=seed, **options)
    scale = torch.tensor(1.0 / (1.0 - p), dtype=torch.float32).to(x.dtype)
    assert torch.equal(h, (h != 0) * scale.to(h.device))
    return (h != 0).cpu()


@pytest.mark.parametrize("row", ROWS)
def test_each_backend_gives_the_known_words(row) -> None:
    """The four words of counter 0 and key 0 decide about the first four columns: each is at its own threshold."""
    for column, word in enumerate(KNOWN_ANSWERS["zeros"][2]):
        for p, expected in ((word / 2**32, True), ((word + 1) / 2**32, False)):
            with row.active():
                found = kept(OPS[row.op.name], (1, 4), p, 0, backend=row.backend, device=row.device)
            assert bool(found[0, column]) is expected


@pytest.mark.parametrize("row", ROWS)
def test_one_mask_on_every_backend(row) -> None:
    for shape, p, seed in (((3, 2), 0.5, 7), ((2, 3, 1003), 0.1, 2**40 + 1), ((2, 64), 0.999, LARGEST_SEED)):
        expected = dropout.keep_mask(shape, p, torch.tensor(seed))
        for dtype in row.dtypes:
            with row.active():
                found = kept(OPS[row.op.name], shape, p, seed, dtype=dtype, backend=row.backend, device=row.device)
            assert torch.equal(found, expected), (shape, dtype)


@pytest.mark.skipif(not _triton.INTERPRET, reason="the parity suite has wide rows where they are not interpreted")
def test_wide_rows_in_the_interpreter() -> None:
    """Rows that are read in blocks of columns, forward and backward."""
    a, residual = torch.ones(1, 16411, requires_grad=True), torch.zeros(1, 16411)
    expected = dropout.keep_mask(a.shape, 0.5, torch.tensor(9))
    _, h = fk.add_rms_norm(a, residual, dropout_p=0.5, dropout_seed=9, backend="triton")
    assert torch.equal(h, 2.0 * expected)
    assert torch.equal(*torch.autograd.grad(h.sum(), a), 2.0 * expected)


@needs_native
@pytest.mark.parametrize("name", extension.build_info().get("usable_instruction_sets", []))
def test_neither_instruction_set_nor_threads_change_it(name: str) -> None:
    shape = (37, 2011)
    expected = dropout.keep_mask(shape, 0.3, torch.tensor(5))
    for threads in (1, 3):
        with cpu_setting(name, threads):
            for dtype in (torch.float32, torch.bfloat16):
                assert torch.equal(kept(fk.add_rms_norm, shape, 0.3, 5, dtype=dtype, backend="native"), expected)


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


@pytest.mark.parametrize(("op", "backend"), BACKENDS)
def test_forward_and_backward_agree(op, backend: str) -> None:
    """The gradient of h alone: dx is the scaled mask, and the residual's gradient passes."""
    x, residual = torch.randn(2, 5, 70, requires_grad=True), torch.randn(2, 5, 70, requires_grad=True)
    _, h = op(x, residual, dropout_p=0.25, dropout_seed=3, backend=backend)
    dx, dresidual = torch.autograd.grad(h.sum(), (x, residual))
    mask = dropout.keep_mask(x.shape, 0.25, torch.tensor(3))
    assert 0.6 < mask.float().mean() < 0.9
    torch.testing.assert_close(dx, mask / 0.75, rtol=1e-6, atol=0.0)
    assert torch.equal(dresidual, torch.ones_like(x))
    torch.testing.assert_close(h, residual + x * mask / 0.75, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("row", [r for r in ROWS if torch.float64 in r.values[0].dtypes])
def test_gradcheck(row) -> None:
    g = torch.Generator().manual_seed(0)
    x, residual, weight = (
        torch.randn(s, generator=g, dtype=torch.float64, requires_grad=True) for s in ((1, 5), (1, 5), (5,))
    )

    def function(*args: Tensor) -> tuple[Tensor, Tensor]:
        return OPS[row.op.name](*args, dropout_p=0.5, dropout_seed=11, backend=row.backend)

    assert 0 < dropout.keep_mask((1, 5), 0.5, torch.tensor(11)).sum() < 5
    assert torch.autograd.gradcheck(function, (x, residual, weight))


@pytest.mark.parametrize(("op", "backend"), BACKENDS)
def test_no_probability_is_no_dropout(op, backend: str) -> None:
    x, residual = torch.randn(2, 7, 40)
    for plain, other in zip(
        op(x, residual, backend=backend), op(x, residual, dropout_p=0.0, dropout_seed=1, backend=backend), strict=True
    ):
        assert torch.equal(plain, other)


@pytest.mark.parametrize(("op", "backend"), BACKENDS)
def test_what_is_dropped_stays_nan(op, backend: str) -> None:
    """It does so in F.dropout too, whose mask is a factor of 0."""
    x = torch.full((1, 64), torch.inf)
    _, h = op(x, torch.zeros(1, 64), dropout_p=0.5, dropout_seed=0, backend=backend)
    assert torch.equal(h.isnan(), ~dropout.keep_mask((1, 64), 0.5, torch.tensor(0)))


@pytest.mark.parametrize(("op", "backend"), BACKENDS)
def test_seeds(op, backend: str) -> None:
    def draw(seed: object = None) -> Tensor:
        return kept(op, (4, 64), 0.5, seed, backend=backend)

    assert torch.equal(draw(5), draw(5))
    assert torch.equal(draw(5), draw(torch.tensor([5])))
    assert not torch.equal(draw(5), draw(5 + 2**32))
    torch.manual_seed(0)
    first, second = draw(), draw()
    assert not torch.equal(first, second)
    torch.manual_seed(0)
    assert torch.equal(draw(), first)


@pytest.mark.parametrize(("op", "backend"), BACKENDS)
def test_the_mask_is_not_saved(op, backend: str) -> None:
    x, residual = torch.randn(2, 16, 64, requires_grad=True)
    seed = torch.tensor(1)
    if backend == "reference":
        pytest.skip("autograd saves what it needs")
    with saved_tensors() as saved:
        op(x, residual, dropout_p=0.5, dropout_seed=seed, backend=backend)
    assert any(t.data_ptr() == seed.data_ptr() for t in saved)
    assert sum(t.numel() for t in saved) == 16 * 64 + 16 * (2 if op is fk.add_layer_norm else 1) + 1


@pytest.mark.parametrize(("op", "backend"), BACKENDS)
def test_activation_checkpointing_makes_the_mask_again(op, backend: str) -> None:
    x, residual = torch.randn(2, 8, 32, requires_grad=True)

    def step(call: Callable[..., tuple[Tensor, Tensor]]) -> tuple[Tensor, ...]:
        torch.manual_seed(4)
        y, h = call(lambda a, b: op(a, b, dropout_p=0.5, backend=backend), x, residual)
        torch.rand(3)  # the generator moves on before the backward pass
        return y, h, *torch.autograd.grad((y * h).sum(), (x, residual))

    plain = step(lambda f, *args: f(*args))
    again = step(lambda f, *args: checkpoint(f, *args, use_reentrant=False))
    assert all(map(torch.equal, plain, again))
    assert not torch.equal(plain[2], plain[3])


def test_compiled() -> None:
    """Without a seed, each call draws one, which its backward pass uses."""
    x, residual = torch.randn(2, 8, 32, requires_grad=True)

    def function(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return fk.add_rms_norm(a, b, dropout_p=0.5)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    masks = []
    for manual in (0, None, 0):
        if manual is not None:
            torch.manual_seed(manual)
        _, h = compiled(x, residual)
        (dx,) = torch.autograd.grad(h.sum(), x)
        torch.testing.assert_close(h, residual + x * dx)
        masks.append(dx != 0)
    assert torch.equal(masks[0], masks[2])
    assert not torch.equal(masks[0], masks[1])


@pytest.mark.parametrize(("op", "backend"), BACKENDS)
def test_a_residual_of_another_dtype_is_added_in_the_wider_one(op, backend: str) -> None:
    x, residual = torch.randn(3, 8).bfloat16(), torch.randn(3, 8)
    y, h = op(x, residual, dropout_p=0.5, dropout_seed=2, backend=backend)
    assert torch.equal(h, (dropout.dropout(x, 0.5, torch.tensor(2)) + residual).bfloat16())
    norm = fk.layer_norm if op is fk.add_layer_norm else fk.rms_norm
    assert torch.equal(y, norm(h, backend=backend))


x = torch.ones(2, 8)

BAD: dict[str, tuple[dict[str, object], type[Exception], str]] = {
    "negative": ({"dropout_p": -0.1}, ValueError, r"dropout_p must be in \[0, 1\); got -0.1"),
    "one": ({"dropout_p": 1.0}, ValueError, r"dropout_p must be in \[0, 1\); got 1.0"),
    "nan": ({"dropout_p": float("nan")}, ValueError, r"dropout_p must be in \[0, 1\)"),
    "text": ({"dropout_p": "0.1"}, TypeError, "dropout_p must be a float; got str"),
    "a flag": ({"dropout_p": True}, TypeError, "dropout_p must be a float; got bool"),
    "seed of floats": ({"dropout_seed": 0.5}, TypeError, "dropout_seed must be an int; got float"),
    "seed below 0": ({"dropout_seed": -1}, ValueError, "dropout_seed must be >= 0; got -1"),
    "seed too large": ({"dropout_seed": 2**63}, ValueError, r"dropout_seed must be below 2\^63"),
    "seed dtype": ({"dropout_seed": torch.tensor(1.0)}, TypeError, "dropout_seed must be int64.*torch.float32"),
    "seeds": ({"dropout_seed": torch.ones(2).long()}, ValueError, r"dropout_seed must hold one number; got .*\(2,\)"),
    "seed elsewhere": (
        {"dropout_seed": torch.ones((), dtype=torch.int64, device="meta")},
        ValueError,
        "dropout_seed must be on x's device cpu; got meta",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input(what: str) -> None:
    options, error, message = BAD[what]
    for op in OPS.values():
        with pytest.raises(error, match=message):
            op(x, x, **{"dropout_p": 0.5, **options})


@needs_native
def test_the_bare_operators_check_too() -> None:
    seed, rstd = torch.tensor(1), torch.ones(2)
    forward, backward = torch.ops.foundry_kernels.rms_norm_fwd, torch.ops.foundry_kernels.rms_norm_dropout_bwd
    for args, message in (
        ((x, 0.5, None), "dropout_p needs a dropout_seed"),
        ((None, 0.5, seed), "there is none"),
        ((x, 1.0, seed), r"dropout_p must be in \[0, 1\)"),
        ((x, 0.5, seed.repeat(2)), "dropout_seed must hold one number"),
    ):
        residual, *drop = args
        with pytest.raises(ValueError, match=message):
            forward(x, residual, None, 1e-6, 0.0, False, False, *drop)
    with pytest.raises(TypeError, match="dropout_seed must be int64"):
        backward(x, None, x, None, rstd, 0.0, False, True, False, 0.5, seed.float())


@pytest.mark.parametrize("norm", [fk.nn.RMSNorm, fk.nn.LayerNorm])
def test_modules(norm) -> None:
    module, a, residual = norm((4, 8)), torch.randn(3, 4, 8), torch.randn(3, 4, 8)
    op = fk.add_rms_norm if norm is fk.nn.RMSNorm else fk.add_layer_norm
    eps = {"eps": torch.finfo(torch.float32).eps} if norm is fk.nn.RMSNorm else {}
    flat = op(a.view(3, 32), residual.view(3, 32), torch.ones(32), **eps, dropout_p=0.5, dropout_seed=1)
    for found, expected in zip(module(a, residual, dropout_p=0.5, dropout_seed=1), flat, strict=True):
        assert torch.equal(found, expected.view(3, 4, 8))
    with pytest.raises(ValueError, match="dropout_p needs a residual"):
        module(a, dropout_p=0.5)


def test_rows_are_not_sharded_over_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sharding({"dropout_seed": None})[1] == "..."
    assert sharding({"dropout_seed": torch.tensor(1)})[1] == ""
    monkeypatch.setattr(dropout, "is_dtensor", lambda tensor: True)
    fk.add_rms_norm(x, x, dropout_p=0.5, dropout_seed=1)
    with pytest.raises(ValueError, match="dropout_seed must be given where x is a DTensor"):
        fk.add_rms_norm(x, x, dropout_p=0.5)
