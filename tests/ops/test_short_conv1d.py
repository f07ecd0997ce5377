"""Short convolutions beyond the parity suite: documents, states, single steps, transformers' functions, errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from table import rows
from torch import Tensor

import foundry_kernels as fk
from foundry_kernels.ops.short_conv1d import SHORT_CONV1D_STEP
from foundry_kernels.testing.policy import compare

BACKENDS = ["reference", *(row.backend for row in rows() if row.op.name == "short_conv1d" and row.device == "cpu")]
LENGTHS = (3, 0, 1, 9, 0, 2, 70)
CHANNELS = 20

over_backends = pytest.mark.parametrize("backend", BACKENDS)


def drawn(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=g).to(dtype) for shape in shapes]


def bounds(*lengths: int) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)])


def same(backend: str, a: Tensor, b: Tensor) -> bool:
    """Bit by bit; of the reference nearly, because PyTorch's SiLU has other bits at the end of a tensor."""
    return torch.equal(a, b) if backend != "reference" else torch.allclose(a, b, rtol=1e-5, atol=1e-6)


def gradients(y: Tensor, *wanted: Tensor) -> tuple[Tensor, ...]:
    (dy,) = drawn(tuple(y.shape))
    return torch.autograd.grad(y, wanted, dy.to(y.dtype))


@over_backends
def test_packed_documents_equal_separate_ones(backend: str) -> None:
    """Bit by bit, with states, forward and in the gradient of x; those of the filter are sums in another order."""
    x, weight, bias, state = drawn((1, sum(LENGTHS), CHANNELS), (CHANNELS, 4), (CHANNELS,), (len(LENGTHS), CHANNELS, 3))
    for t in (x, weight, bias, state):
        t.requires_grad_()
    options: dict[str, Any] = {"activation": "silu", "return_final_state": True, "backend": backend}
    y, final = fk.short_conv1d(x, weight, bias, cu_seqlens=bounds(*LENGTHS), initial_state=state, **options)
    pieces = zip(x.split(LENGTHS, 1), state.split(1), strict=True)
    each = [fk.short_conv1d(piece, weight, bias, initial_state=before, **options) for piece, before in pieces]
    assert same(backend, y, torch.cat([one for one, _ in each], 1))
    assert torch.equal(final, torch.cat([last for _, last in each]))
    packed, separate = (gradients(out, x, state, weight, bias) for out in (y, torch.cat([one for one, _ in each], 1)))
    assert same(backend, packed[0], separate[0])
    assert same(backend, packed[1], separate[1])
    for a, b in zip(packed[2:], separate[2:], strict=True):
        torch.testing.assert_close(a, b)


@over_backends
@pytest.mark.parametrize("where", ["x", "dy", "state"])
def test_nan_stays_in_its_document(backend: str, where: str) -> None:
    lengths = (5, 2, 6)
    x, weight, state, dy = drawn((1, 13, CHANNELS), (CHANNELS, 4), (3, CHANNELS, 3), (1, 13, CHANNELS))
    {"x": x[:, 5:7], "dy": dy[:, 5:7], "state": state[1]}[where].fill_(torch.nan)
    x.requires_grad_(), state.requires_grad_()
    y = fk.short_conv1d(x, weight, activation="silu", cu_seqlens=bounds(*lengths), initial_state=state, backend=backend)
    dx, dstate = torch.autograd.grad(y, (x, state), dy)
    others = torch.ones(13, dtype=torch.bool)
    others[5:7] = False
    assert y[:, others].isfinite().all()
    assert dx[:, others].isfinite().all()
    assert dstate[[0, 2]].isfinite().all()
    assert dx[:, 5:7].isnan().all()


@over_backends
def test_a_sequence_in_parts_equals_the_whole(backend: str) -> None:
    """Also its gradients, which flow through the states."""
    x, weight, bias = (t.requires_grad_() for t in drawn((2, 30, CHANNELS), (CHANNELS, 4), (CHANNELS,)))
    whole = fk.short_conv1d(x, weight, bias, "silu", backend=backend)
    parts: list[Tensor] = []
    state: Tensor | None = None
    for piece in x.split((1, 2, 1, 11, 15), 1):
        y, state = fk.short_conv1d(
            piece, weight, bias, "silu", initial_state=state, return_final_state=True, backend=backend
        )
        parts.append(y)
    assert same(backend, whole, torch.cat(parts, 1))
    for a, b in zip(gradients(torch.cat(parts, 1), x, weight, bias), gradients(whole, x, weight, bias), strict=True):
        torch.testing.assert_close(a, b)


@over_backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("taps", "size"), [(1, 0), (2, 1), (4, 3), (4, 4), (4, 7), (8, 7)])
def test_steps_equal_a_sequence(backend: str, dtype: torch.dtype, taps: int, size: int) -> None:
    """Bit by bit, from a state of W - 1 inputs or more, which is always the last of them."""
    x, weight, bias, state = drawn((3, 9, CHANNELS), (CHANNELS, taps), (CHANNELS,), (3, CHANNELS, size), dtype=dtype)
    inputs = torch.cat([state, x.transpose(1, 2)], 2)
    whole = fk.short_conv1d(x, weight, bias, "silu", initial_state=state[..., size - (taps - 1) :], backend=backend)
    address = state.data_ptr()
    for t in range(9):
        y = fk.short_conv1d_step(x[:, t], state, weight, bias, "silu", backend=backend)
        assert same(backend, y, whole[:, t])
        assert torch.equal(state, inputs[..., t + 1 : t + 1 + size])
    assert state.data_ptr() == address


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b != "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_step_is_as_exact_as_the_reference(backend: str, dtype: torch.dtype) -> None:
    x, weight, bias, state = drawn((5, 1050), (1050, 4), (1050,), (5, 1050, 4), dtype=dtype)
    results = []
    for kind, name in ((dtype, backend), (dtype, "reference"), (torch.float64, "reference")):
        given = [t.to(kind, copy=True) for t in (x, state, weight, bias)]
        results.append((fk.short_conv1d_step(*given, activation="silu", backend=name), given[1]))
    (actual, state_), (reference, expected), (oracle, _) = results
    compare("y", actual, reference, oracle, 1.0)
    assert torch.equal(state_, expected)


@over_backends
@pytest.mark.parametrize(
    "layout",
    [torch.clone, lambda s: s.transpose(1, 2).contiguous().transpose(1, 2), lambda s: s.repeat(1, 1, 2)[..., ::2]],
    ids=["contiguous", "time first", "strided"],
)
def test_a_state_of_any_strides_is_updated(backend: str, layout: Callable[[Tensor], Tensor]) -> None:
    x, weight, plain = drawn((2, CHANNELS), (CHANNELS, 4), (2, CHANNELS, 4))
    state = layout(plain)
    state.copy_(plain)
    expected = fk.short_conv1d_step(x, plain, weight, backend=backend)
    assert torch.equal(fk.short_conv1d_step(x, state, weight, backend=backend), expected)
    assert torch.equal(state, plain)


@over_backends
def test_a_step_in_a_graph(backend: str) -> None:
    """The compiler sees that the state is written, and that y depends on it."""
    x, weight, state = drawn((2, CHANNELS), (CHANNELS, 4), (2, CHANNELS, 3))

    def two_steps(x: Tensor, state: Tensor) -> Tensor:
        first = fk.short_conv1d_step(x, state, weight, activation="silu", backend=backend)
        return first + fk.short_conv1d_step(x * 2, state, weight, activation="silu", backend=backend)

    expected_state = state.clone()
    expected = two_steps(x, expected_state)
    actual = torch.compile(two_steps, fullgraph=True, backend="aot_eager")(x, state)
    assert torch.equal(actual, expected)
    assert torch.equal(state, expected_state)


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b != "reference"])
def test_opcheck_of_a_step(backend: str) -> None:
    x, weight, bias, state = drawn((2, CHANNELS), (CHANNELS, 4), (CHANNELS,), (2, CHANNELS, 3))
    name = "triton_short_conv1d_step" if backend == "triton" else "short_conv1d_step"
    operator = getattr(torch.ops.foundry_kernels, name).default
    torch.library.opcheck(operator, (x, state, weight, bias, "silu"))
    torch.library.opcheck(operator, (x, state, weight, None, "none"))


@over_backends
def test_a_step_has_no_gradient(backend: str) -> None:
    x, weight, state = drawn((2, CHANNELS), (CHANNELS, 4), (2, CHANNELS, 3))
    y = fk.short_conv1d_step(x, state, weight.requires_grad_(), backend=backend)
    with pytest.raises(RuntimeError, match="short_conv1d_step has no gradient"):
        y.sum().backward()


@over_backends
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_equal_to_functions_of_transformers(backend: str, activation: str | None, with_bias: bool) -> None:
    """What Qwen3-Next calls without the causal_conv1d package: a prompt, then a token from the cache."""
    source = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    prompt = getattr(source, "causal_conv1d_fn", None)
    update = getattr(source, "causal_conv1d_update", None) or getattr(source, "torch_causal_conv1d_update", None)
    if prompt is None or update is None:
        pytest.skip("this release of transformers calls F.conv1d itself")
    x, weight, bias, token = drawn((2, 11, CHANNELS), (CHANNELS, 4), (CHANNELS,), (2, CHANNELS))
    shift = bias if with_bias else None
    ours, state = fk.short_conv1d(x, weight, shift, activation, return_final_state=True, backend=backend)
    theirs = prompt(x.transpose(1, 2), weight, shift, activation=activation)
    torch.testing.assert_close(ours, theirs.transpose(1, 2))
    cache = x.transpose(1, 2)[..., -4:].contiguous()  # W inputs
    assert torch.equal(state, cache[..., 1:])
    mine = cache.clone()
    expected = update(token.unsqueeze(-1), cache, weight, shift, activation)
    for own in (mine, state):
        y = fk.short_conv1d_step(token, own, weight, shift, activation, backend=backend)
        torch.testing.assert_close(y, expected.squeeze(-1))
    assert torch.equal(mine, cache)


X, WEIGHT, BIAS = torch.ones(2, 5, 6), torch.ones(6, 4), torch.ones(6)
ERRORS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"x": [1.0]}, TypeError, "x must be a torch.Tensor; got list"),
    ({"x": X[0]}, ValueError, r"x must be \[B, T, C\]; got shape \(5, 6\)"),
    ({"x": X.int()}, TypeError, "x must be float32, bfloat16, float16 or float64; got torch.int32"),
    ({"weight": WEIGHT[:5]}, ValueError, r"weight must be \[C, W\] with x's 6 channels and W in 1 .. 8; got shape \(5"),
    ({"weight": torch.ones(6, 9)}, ValueError, r"W in 1 .. 8; got shape \(6, 9\)"),
    ({"weight": torch.ones(6, 1, 4)}, ValueError, r"weight must be \[C, W\]; got shape \(6, 1, 4\)"),
    ({"weight": WEIGHT.double()}, TypeError, "weight may be float64 only where x is; got x of torch.float32"),
    ({"weight": WEIGHT.to("meta")}, ValueError, "weight must be on x's device cpu; got meta"),
    ({"bias": BIAS[:3]}, ValueError, r"bias must have shape \(6,\) \(x's channels\); got \(3,\)"),
    ({"activation": "relu"}, ValueError, "activation must be None, 'silu' or 'swish'; got 'relu'"),
    ({"activation": 1}, TypeError, "activation must be None or a str; got int"),
    ({"cu_seqlens": bounds(5)}, ValueError, r"x must be \[1, T, C\] with cu_seqlens, .*; got \(2, 5, 6\)"),
    (
        {"x": X[:1], "cu_seqlens": bounds(2, 2)},
        ValueError,
        r"cu_seqlens must start at 0, .* end at T = 5; got \[0, 2, 4",
    ),
    ({"x": X[:1], "cu_seqlens": bounds(7, -2)}, ValueError, r"never decrease .* got \[0, 7, 5\]"),
    ({"x": X[:1], "cu_seqlens": bounds(5).float()}, TypeError, "cu_seqlens must be int32 or int64; got torch.float32"),
    ({"x": X[:1], "cu_seqlens": bounds(5)[:0]}, ValueError, r"cu_seqlens must be \[N \+ 1\], starting with 0"),
    ({"initial_state": torch.ones(2, 6, 4)}, ValueError, r"initial_state must have shape \(2, 6, 3\).*got \(2, 6, 4\)"),
    ({"initial_state": torch.ones(2, 6, 3).half()}, ValueError, "initial_state must have x's dtype torch.float32"),
    ({"return_final_state": 1}, TypeError, "return_final_state must be a bool; got int"),
    ({"backend": "cuda"}, ValueError, "backend must be one of auto, reference, triton, native; got 'cuda'"),
]


@pytest.mark.parametrize(
    ("wrong", "kind", "message"), ERRORS, ids=[", ".join(e[0]) + f"-{i}" for i, e in enumerate(ERRORS)]
)
def test_wrong_arguments(wrong: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        fk.short_conv1d(**{"x": X, "weight": WEIGHT, "bias": BIAS} | wrong)


@pytest.mark.parametrize(
    ("wrong", "kind", "message"),
    [
        ({"x": X}, ValueError, r"x must be \[B, C\]; got shape \(2, 5, 6\)"),
        (
            {"state": torch.ones(2, 6, 2)},
            ValueError,
            r"state must be \[\*\(2, 6\), S\], S at least 3; got shape \(2, 6, 2",
        ),
        ({"state": torch.ones(1, 6, 3)}, ValueError, r"got shape \(1, 6, 3\)"),
        ({"state": torch.ones(2, 6, 3).half()}, ValueError, "state must have x's dtype"),
        ({"weight": WEIGHT[:5]}, ValueError, "weight must be"),
    ],
)
def test_wrong_arguments_of_a_step(wrong: dict[str, Any], kind: type[Exception], message: str) -> None:
    state = torch.ones(2, 6, 3)
    with pytest.raises(kind, match=message):
        fk.short_conv1d_step(**{"x": X[:, 0], "state": state, "weight": WEIGHT} | wrong)
    assert torch.equal(state, torch.ones(2, 6, 3))


@pytest.mark.skipif("native" not in BACKENDS, reason="calls the extension's operator")
def test_the_operator_checks_documents_itself() -> None:
    """A graph of torch.compile calls it without the public function's checks."""
    operator = torch.ops.foundry_kernels.short_conv1d_fwd.default
    for wrong in (bounds(7), bounds(9, -4), bounds(2, 2)):
        with pytest.raises(ValueError, match="cu_seqlens must start at 0"):
            operator(X[:1], WEIGHT, None, "none", wrong, None, False)


@pytest.mark.skipif("triton" not in BACKENDS, reason="calls Triton's operator")
def test_invalid_documents_on_a_gpu_read_nothing_else() -> None:
    """There the public function cannot check them. In the interpreter, a read outside of a tensor would crash."""
    x, weight, state = drawn((1, 5, CHANNELS), (CHANNELS, 4), (2, CHANNELS, 3))
    operator = torch.ops.foundry_kernels.triton_short_conv1d_fwd.default
    for wrong in (torch.tensor([0, 10**9, 5]), torch.tensor([3, -(10**9), 10**9]), torch.tensor([5, 2, 0])):
        y, final = operator(x, weight, None, "silu", wrong, state, True)
        assert y.shape == x.shape
        assert final.shape == state.shape


def test_the_step_is_an_operation_with_the_same_backends() -> None:
    assert [impl.backend for impl in SHORT_CONV1D_STEP.impls] == [i.backend for i in fk.OPS["short_conv1d"].impls]
