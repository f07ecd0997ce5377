"""Short convolutions beyond the parity suite: documents, states, single steps, transformers' functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from table import rows
from torch import Tensor

import foundry_kernels as fk

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
    lengths = LENGTHS[:5] if backend == "triton" else LENGTHS
    x, weight, bias, state = drawn((1, sum(lengths), CHANNELS), (CHANNELS, 4), (CHANNELS,), (len(lengths), CHANNELS, 3))
    for t in (x, weight, bias, state):
        t.requires_grad_()
    options: dict[str, Any] = {"activation": "silu", "return_final_state": True, "backend": backend}
    y, final = fk.short_conv1d(x, weight, bias, cu_seqlens=bounds(*lengths), initial_state=state, **options)
    pieces = zip(x.split(lengths, 1), state.split(1), strict=True)
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
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("taps", "size"), [(1, 0), (2, 1), (4, 3), (4, 7), (8, 7)])
def test_steps_equal_a_sequence(backend: str, dtype: torch.dtype, taps: int, size: int) -> None:
    """Bit by bit, from a state of W - 1 inputs or more, which is always the last of them."""
    x, weight, bias, state = drawn((3, 9, CHANNELS), (CHANNELS, taps), (CHANNELS,), (3, CHANNELS, size), dtype=dtype)
    inputs = torch.cat([state, x.transpose(1, 2)], 2)
    residual = drawn((3, CHANNELS, 9), dtype=dtype)[0].transpose(1, 2)
    options: dict[str, Any] = {"initial_state": state[..., size - (taps - 1) :], "residual": residual}
    whole = fk.short_conv1d(x, weight, bias, "silu", **options, backend=backend)
    address = state.data_ptr()
    for t in range(9):
        y = fk.short_conv1d_step(x[:, t], state, weight, bias, "silu", residual=residual[:, t], backend=backend)
        assert same(backend, y, whole[:, t])
        assert torch.equal(state, inputs[..., t + 1 : t + 1 + size])
    assert state.data_ptr() == address


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
def test_a_step_has_no_gradient(backend: str) -> None:
    x, weight, state = drawn((2, CHANNELS), (CHANNELS, 4), (2, CHANNELS, 3))
    y = fk.short_conv1d_step(x, state, weight.requires_grad_(), backend=backend)
    with pytest.raises(RuntimeError, match="short_conv1d_step has no gradient"):
        y.sum().backward()


@pytest.mark.parametrize("backend", ["reference", "auto"])
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


X, WEIGHT = torch.ones(2, 5, 6), torch.ones(6, 4)


@pytest.mark.skipif("native" not in BACKENDS, reason="calls the extension's operator")
def test_the_operator_checks_documents_itself() -> None:
    """A graph of torch.compile calls it without the public function's checks."""
    operator = torch.ops.foundry_kernels.short_conv1d_fwd.default
    for wrong in (bounds(7), bounds(9, -4), bounds(2, 2)):
        with pytest.raises(ValueError, match="cu_seqlens must start at 0"):
            operator(X[:1], WEIGHT, None, "none", wrong, None, None, False)


@pytest.mark.skipif("triton" not in BACKENDS, reason="calls Triton's operator")
def test_invalid_documents_on_a_gpu_read_nothing_else() -> None:
    """There the public function cannot check them. In the interpreter, a read outside of a tensor would crash."""
    x, weight, state = drawn((1, 5, CHANNELS), (CHANNELS, 4), (2, CHANNELS, 3))
    operator = torch.ops.foundry_kernels.triton_short_conv1d_fwd.default
    for wrong in (torch.tensor([0, 10**9, 5]), torch.tensor([3, -(10**9), 10**9]), torch.tensor([5, 2, 0])):
        y, final = operator(x, weight, None, "silu", wrong, state, None, True)
        assert y.shape == x.shape
        assert final.shape == state.shape
