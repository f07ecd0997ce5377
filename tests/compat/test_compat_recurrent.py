"""The functions of causal-conv1d and mamba_ssm, beside transformers' and PyTorch's form of them."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import foundry_kernels as fk
from foundry_kernels import compat

B, T, G, H, P, N, W = 2, 13, 2, 4, 8, 16, 4
#: Documents of each row.
INDEX = torch.tensor([[0] * 5 + [1] * 8, [3] * 1 + [2] * 6 + [7] * 6])
LENGTHS = ((5, 8), (1, 6, 6))


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def scan_inputs() -> dict[str, Tensor]:
    given = {"x": normal(B, T, H, P), "dt": normal(B, T, H) - 2.0, "A": -normal(H).exp()}
    given |= {"B": normal(B, T, G, N), "C": normal(B, T, G, N, seed=1), "D": normal(H), "dt_bias": normal(H, seed=2)}
    return given


def step_inputs() -> dict[str, Tensor]:
    given = {n: x[:, 0] if x.dim() > 2 else x for n, x in scan_inputs().items()}
    given |= {"dt": given["dt"][..., None].expand(-1, -1, P), "A": given["A"][:, None, None].expand(-1, P, N)}
    return given | {"D": given["D"][:, None].expand(-1, P), "dt_bias": given["dt_bias"][:, None].expand(-1, P)}


def mamba2() -> Any:
    model = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    if not hasattr(model, "mamba2_chunk_scan"):
        pytest.skip("this release has no such functions")
    return model


@pytest.mark.parametrize("gated", [False, True])
def test_the_scan_is_that_of_transformers(gated: bool) -> None:
    scan, given, states = mamba2().mamba2_chunk_scan, scan_inputs(), normal(B, H, P, N)
    options: dict[str, Any] = {"dt_softplus": True, "dt_limit": (0.01, 0.5), "return_final_states": True}
    z = normal(B, T, H, P, seed=3) if gated else None
    x, *others = given.values()
    expected, last = scan(x, *others[:4], 8, *others[4:], initial_states=states, **options)
    found, final = compat.mamba_chunk_scan_combined(**given, chunk_size=8, z=z, initial_states=states, **options)
    torch.testing.assert_close(found, expected if z is None else expected * F.silu(z))
    torch.testing.assert_close(final, last)


def test_documents_by_their_index() -> None:
    given, states = scan_inputs(), normal(B, H, P, N)
    options: dict[str, Any] = {"dt_softplus": True, "return_final_states": True}
    found, final = compat.mamba_chunk_scan_combined(
        **given, chunk_size=8, seq_idx=INDEX, initial_states=states, **options
    )
    for row, lengths in enumerate(LENGTHS):
        state: Tensor | None = states[row : row + 1]
        begin = 0
        for length in lengths:
            part = {n: x[row : row + 1, begin : begin + length] if x.dim() > 2 else x for n, x in given.items()}
            y, last = fk.ssd(**part, initial_states=state, **options)
            torch.testing.assert_close(found[row : row + 1, begin : begin + length], y)
            state, begin = None, begin + length
        torch.testing.assert_close(final[row : row + 1], last)


@pytest.mark.parametrize("gated", [False, True])
def test_a_step_is_that_of_transformers(gated: bool) -> None:
    given = step_inputs()
    z = normal(B, H, P, seed=3) if gated else None
    states = [normal(B, H, P, N), normal(B, H, P, N)]
    update = mamba2().mamba2_selective_state_update
    x, *others = given.values()
    expected = update(states[0], x, *others[:-1], z=z, dt_bias=others[-1], dt_softplus=True)
    found = compat.selective_state_update(states[1], **given, z=z, dt_softplus=True)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*states)
    with pytest.raises(ValueError, match=r"^A must be one number for each head"):
        compat.selective_state_update(states[1], **given | {"A": given["A"].contiguous()}, dt_softplus=True)


def convolved(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.silu(F.conv1d(x, weight[:, None], bias, padding=W - 1, groups=x.shape[1])[..., : x.shape[2]])


def test_convolutions() -> None:
    x, weight, bias = normal(B, H, T), normal(H, W), normal(H)
    expected = convolved(x, weight, bias)
    found, state = compat.causal_conv1d_fn(x[..., :7], weight, bias, return_final_states=True, activation="silu")
    torch.testing.assert_close(found, expected[..., :7])
    rest = compat.causal_conv1d_fn(x[..., 7:], weight, bias, initial_states=state, activation="silu")
    torch.testing.assert_close(rest, expected[..., 7:])
    several = compat.causal_conv1d_update(x[..., 7:9], state, weight, bias, "silu")
    torch.testing.assert_close(several, expected[..., 7:9])
    torch.testing.assert_close(compat.causal_conv1d_update(x[..., 9], state, weight, bias, "silu"), expected[..., 9])
    packed = compat.causal_conv1d_fn(x, weight, bias, INDEX, activation="silu")
    for row, lengths in enumerate(LENGTHS):
        parts = [convolved(part, weight, bias) for part in x[row : row + 1].split(lengths, 2)]
        torch.testing.assert_close(packed[row : row + 1], torch.cat(parts, 2))


def test_documents_of_a_convolution_behind_states_and_padding() -> None:
    """A row's first document goes on from its state; tokens with a negative index give 0 and nothing to others."""
    x, weight, bias, states = normal(B, H, T), normal(H, W), normal(H), normal(B, H, W - 1)
    index = INDEX.clone()
    index[1, 7:] = -1
    found = compat.causal_conv1d_fn(x, weight, bias, index, states, activation="silu")
    assert (found[1, :, 7:] == 0).all()
    for row, lengths in enumerate(((5, 8), (1, 6))):
        begin = 0
        for length in lengths:
            part, state = x[row : row + 1, :, begin : begin + length], None if begin else states[row : row + 1]
            expected = compat.causal_conv1d_fn(part, weight, bias, initial_states=state, activation="silu")
            torch.testing.assert_close(found[row : row + 1, :, begin : begin + length], expected)
            begin += length


@pytest.mark.parametrize("tokens", [1, 2])
def test_rows_of_states_of_a_convolution(tokens: int) -> None:
    x, weight, pool = normal(B, H, tokens), normal(H, W), normal(5, H, W)
    rows = torch.tensor([3, 0], dtype=torch.int32)
    own, before = pool[rows.long()], pool.clone()
    expected = compat.causal_conv1d_update(x, own, weight)
    torch.testing.assert_close(compat.causal_conv1d_update(x, pool, weight, conv_state_indices=rows), expected)
    torch.testing.assert_close(pool[rows.long()], own)
    assert torch.equal(pool[[1, 2, 4]], before[[1, 2, 4]])
    padding, kept = torch.full((B,), -1), pool.clone()
    assert not compat.causal_conv1d_update(x, pool, weight, conv_state_indices=padding).any()
    assert torch.equal(pool, kept)


def test_states_of_packed_documents() -> None:
    """cu_seqlens alone has no effect, as in mamba_ssm; with return_varlen_states it ends documents."""
    given, ends = {n: x[:1] if x.dim() > 2 else x for n, x in scan_inputs().items()}, torch.tensor([0, 5, 5, T])
    states = normal(1, H, P, N).to(torch.bfloat16)
    options: dict[str, Any] = {"chunk_size": 8, "cu_seqlens": ends, "dt_softplus": True, "initial_states": states}
    torch.testing.assert_close(
        compat.mamba_chunk_scan_combined(**given, **options),
        fk.ssd(**given, dt_softplus=True, initial_states=states.float()),
    )
    y, final, each = compat.mamba_chunk_scan_combined(
        **given, **options, return_final_states=True, return_varlen_states=True
    )
    before = torch.cat([states.float(), torch.zeros(2, H, P, N)])
    expected = fk.ssd(**given, dt_softplus=True, cu_seqlens=ends, initial_states=before, return_final_states=True)
    torch.testing.assert_close((y, each), expected)
    assert torch.equal(final, each[-1:])
    assert len(compat.mamba_chunk_scan_combined(**given, **options, return_varlen_states=True)) == 2
    with pytest.raises(ValueError, match="cu_seqlens must be given with return_varlen_states"):
        compat.mamba_chunk_scan_combined(**given, chunk_size=8, return_varlen_states=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_states_and_padding(dtype: torch.dtype) -> None:
    """States of 16 bits are rounded behind the step, whose result has the state before rounding."""
    given = step_inputs()
    pool = normal(4, H, P, N).to(dtype)
    before = pool.clone()
    states = pool[[2, 1]].float()
    expected = compat.selective_state_update(states, **given, dt_softplus=True)
    rows = torch.tensor([2, -1], dtype=torch.int32)
    found = compat.selective_state_update(pool, **given, dt_softplus=True, state_batch_indices=rows)
    torch.testing.assert_close(found[0], expected[0])
    assert (found[1] == 0).all()
    torch.testing.assert_close(pool[2], states[0].to(dtype))
    assert torch.equal(pool[[0, 1, 3]], before[[0, 1, 3]])
    own = before[[2, 1]]
    torch.testing.assert_close(compat.selective_state_update(own, **given, dt_softplus=True), expected)
    torch.testing.assert_close(own, states.to(dtype))


def gated_norm(x: Tensor, weight: Tensor, z: Tensor | None, size: int, before: bool) -> Tensor:
    gate = 1.0 if z is None else F.silu(z)
    x = x if before else x * gate
    y = F.rms_norm(x.unflatten(-1, (-1, size)), (size,), None, 1e-6).flatten(-2) * weight
    return y * gate if before else y


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("size", [None, 4])
@pytest.mark.parametrize("gated", [False, True])
def test_norms(gated: bool, size: int | None, before: bool) -> None:
    x, weight, z = normal(3, 8), normal(8), normal(3, 8, seed=1) if gated else None
    expected = gated_norm(x, weight, z, size or 8, before)
    torch.testing.assert_close(compat.rmsnorm_fn(x, weight, None, z, 1e-6, size, before), expected)
    layer = compat.RMSNormGated(8, 1e-6, size, before)
    layer.load_state_dict({"weight": weight})
    torch.testing.assert_close(layer(x, z), expected)
    rounded = compat.rmsnorm_fn(x.bfloat16(), weight, None, None if z is None else z.bfloat16(), 1e-6, size, before)
    torch.testing.assert_close(rounded.float(), expected, atol=0.02, rtol=0.02)


def test_norms_refuse() -> None:
    x, weight = normal(3, 8), normal(8)
    for message, given in {
        "bias must be None": {"bias": weight},
        "group_size must divide": {"group_size": 3},
        "z must have shape|z must be": {"z": x[:2]},
    }.items():
        with pytest.raises(ValueError, match=message):
            compat.rmsnorm_fn(x, weight, **{"bias": None, **given})


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("mlp", [0, 6])
def test_the_whole_block(mlp: int, normed: bool, before: bool) -> None:
    """Its parts one after another, by PyTorch's convolution and the scan's own function."""
    inner, channels = H * P, H * P + 2 * G * N
    whole, weight, bias = normal(B, T, 2 * mlp + inner + channels + H), normal(channels, W) * 0.3, normal(channels)
    A, D, dt_bias, last = -normal(H).exp(), normal(H), normal(H, seed=2), normal(5, mlp + inner)
    norm = normal(inner) if normed else None
    options: dict[str, Any] = {"dt_limit": (0.01, 0.5), "return_final_states": True}
    found = compat.mamba_split_conv1d_scan_combined(
        whole, weight, bias, dt_bias, A, D, 8, rmsnorm_weight=norm, outproj_weight=last, headdim=P, ngroups=G,
        norm_before_gate=before, **options,
    )  # fmt: skip
    first, z, mixed, dt = whole.split([2 * mlp, inner, channels, H], -1)
    x, b, c = convolved(mixed.transpose(1, 2), weight, bias).transpose(1, 2).split([inner, G * N, G * N], -1)
    given = x.unflatten(-1, (H, P)), dt, A, b.unflatten(-1, (G, N)), c.unflatten(-1, (G, N)), D
    y, states = fk.ssd(*given, None if normed else z.unflatten(-1, (H, P)), dt_bias, dt_softplus=True, **options)
    y = y.flatten(2)
    if norm is not None:
        y = gated_norm(y, norm, z, inner // G, before)
    if mlp:
        gate, up = first.chunk(2, -1)
        y = torch.cat([F.silu(gate) * up, y], -1)
    torch.testing.assert_close(found, (F.linear(y, last), states), atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match="headdim must be given"):
        compat.mamba_split_conv1d_scan_combined(whole, weight, bias, dt_bias, A, D, 8)
    with pytest.raises(ValueError, match=r"zxbcdt must be \[B, T, 2 d"):
        compat.mamba_split_conv1d_scan_combined(whole[..., 1:], weight, bias, dt_bias, A, D, 8, headdim=P, ngroups=G)


REFUSED: dict[str, tuple[Any, dict[str, Any]]] = {
    "final_states_out": (compat.causal_conv1d_fn, {"final_states_out": torch.zeros(B, H, W - 1)}),
    "seq_idx": (compat.causal_conv1d_fn, {"seq_idx": INDEX, "return_final_states": True}),
    "cache_seqlens": (compat.causal_conv1d_update, {"cache_seqlens": torch.tensor([0, 1])}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused(name: str) -> None:
    function, refused = REFUSED[name]
    given = {**scan_inputs(), "state": normal(B, H, P, N), "weight": normal(H, W), "conv_state": normal(B, H, W - 1)}
    if "conv" in function.__name__:
        given["x"] = normal(B, H, T)
    taken = {n: x for n, x in given.items() if n in inspect.signature(function).parameters}
    with pytest.raises(ValueError, match=rf"^{name} must be None"):
        function(**taken, **refused)
