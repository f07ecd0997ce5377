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
    given = {n: x[:, 0] if x.dim() > 2 else x for n, x in scan_inputs().items()}
    given |= {"dt": given["dt"][..., None].expand(-1, -1, P), "A": given["A"][:, None, None].expand(-1, P, N)}
    given |= {"D": given["D"][:, None].expand(-1, P), "dt_bias": given["dt_bias"][:, None].expand(-1, P)}
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


REFUSED: dict[str, tuple[Any, dict[str, Any]]] = {
    "final_states_out": (compat.causal_conv1d_fn, {"final_states_out": torch.zeros(B, H, W - 1)}),
    "seq_idx": (compat.causal_conv1d_fn, {"seq_idx": INDEX, "return_final_states": True}),
    "cache_seqlens": (compat.causal_conv1d_update, {"cache_seqlens": torch.tensor([0, 1])}),
    "cu_seqlens": (compat.mamba_chunk_scan_combined, {"cu_seqlens": torch.tensor([0, T]), "chunk_size": 8}),
    "state_batch_indices": (compat.selective_state_update, {"state_batch_indices": torch.tensor([0, 1])}),
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
