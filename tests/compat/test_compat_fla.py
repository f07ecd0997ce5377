"""flash-linear-attention's signatures, against the recurrence in their layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from foundry_kernels.compat import fla

B, T, H, K, V = 2, 9, 2, 8, 6


def drawn() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return {
        "q": normal(B, T, H, K), "k": F.normalize(normal(B, T, H, K), dim=-1), "v": normal(B, T, H, V),
        "g": -normal(B, T, H).abs(), "gk": -normal(B, T, H, K).abs(), "beta": normal(B, T, H).sigmoid(),
        "state": normal(B, H, K, V), "A_log": normal(H), "dt_bias": normal(H * K),
    }  # fmt: skip


def recurrence(x: dict[str, Tensor], g: Tensor | None, beta: Tensor | None, delta: bool) -> tuple[Tensor, Tensor]:
    state, outs = x["state"], []
    for t in range(T):
        q, k, v = (x[n][:, t] for n in "qkv")
        if g is not None:
            state = state * (g[:, t, :, None, None] if g.dim() == 3 else g[:, t, :, :, None]).exp()
        value = v - torch.einsum("bhk,bhkv->bhv", k, state) if delta else v
        value = value if beta is None else value * beta[:, t, :, None]
        state = state + k[..., None] * value[..., None, :]
        outs.append(torch.einsum("bhk,bhkv->bhv", q, state) * K**-0.5)
    return torch.stack(outs, 1), state


#: Name, arguments after v by name, and the decay, step size and rule that they mean.
CALLS: dict[str, tuple[dict[str, str], str | None, str | None, bool]] = {
    "chunk_gated_delta_rule": ({"g": "g", "beta": "beta"}, "g", "beta", True),
    "fused_recurrent_gated_delta_rule": ({"gk": "gk", "beta": "beta"}, "gk", "beta", True),
    "chunk_delta_rule": ({"beta": "beta"}, None, "beta", True),
    "fused_recurrent_delta_rule": ({"beta": "beta"}, None, "beta", True),
    "chunk_kda": ({"g": "gk", "beta": "beta"}, "gk", "beta", True),
    "fused_recurrent_kda": ({"g": "gk", "beta": "beta"}, "gk", "beta", True),
    "chunk_gla": ({"g": "gk"}, "gk", None, False),
    "fused_recurrent_gla": ({"gk": "gk"}, "gk", None, False),
    "chunk_simple_gla": ({"g": "g"}, "g", None, False),
    "fused_recurrent_simple_gla": ({"g": "g"}, "g", None, False),
}


@pytest.mark.parametrize("name", CALLS)
def test_functions_are_the_recurrence(name: str) -> None:
    x = drawn()
    given, g, beta, delta = CALLS[name]
    options: dict[str, Any] = {"initial_state": x["state"], "output_final_state": True}
    function, tensors = getattr(fla, name), {n: x[of] for n, of in given.items()}
    out, state = function(x["q"], x["k"], x["v"], **tensors, **options)
    expected = recurrence(x, g and x[g], beta and x[beta], delta)
    torch.testing.assert_close((out, state), expected)
    assert function(x["q"], x["k"], x["v"], **tensors)[1] is None
    options["initial_state"] = x["state"].mT.float()
    out, state = function(x["q"], x["k"], x["v"], **tensors, **options, state_v_first=True)
    torch.testing.assert_close((out, state.mT), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("rounding", [None, torch.bfloat16])
@pytest.mark.parametrize("bound", [None, -5.0])
@pytest.mark.parametrize("name", ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule", "chunk_kda"])
def test_gates_in_the_kernel(name: str, bound: float | None, rounding: torch.dtype | None) -> None:
    x = drawn()
    raw = x["gk" if name == "chunk_kda" else "g"]
    A_log = x["A_log"].view(-1, *[1] * (raw.dim() - 3))
    bias = x["dt_bias"].view(H, K) if name == "chunk_kda" else x["dt_bias"][:H]
    flags: dict[str, Any] = {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True}
    options: dict[str, Any] = {"initial_state": x["state"], "A_log": x["A_log"].view(1, 1, H, 1), "lower_bound": bound}
    given = [x["q"], x["k"], x["v"], raw]
    if rounding is not None:
        given = [each.to(rounding) for each in given]
        raw = given[-1].double()
        x |= {each: of.double() for each, of in zip("qkv", given, strict=False)}
    tensors = {"beta": x["beta"].to(given[0].dtype), "dt_bias": bias.flatten().float(), "A_log": x["A_log"].float()}
    found, _ = getattr(fla, name)(*given[:3], g=given[3], **{**options, **(tensors if rounding else {}), **flags},
        **({} if rounding else {"beta": x["beta"], "dt_bias": bias.flatten()}))  # fmt: skip
    g = -A_log.exp() * F.softplus(raw + bias) if bound is None else bound * (A_log.exp() * (raw + bias)).sigmoid()
    expected = recurrence(x, g, 2 * tensors["beta"].double().sigmoid(), True)[0]
    tolerance = 2e-2 if rounding else 1e-9
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)


def test_a_bounded_gate_without_a_log_has_gradients() -> None:
    x = drawn()
    raw = x["gk"].requires_grad_()
    call: dict[str, Any] = {"use_gate_in_kernel": True, "lower_bound": -2.0}
    fla.chunk_kda(x["q"], x["k"], x["v"], raw, x["beta"], **call)[0].sum().backward()
    other = raw.detach().requires_grad_()
    fla.chunk_kda(x["q"], x["k"], x["v"], -2.0 * other.sigmoid(), x["beta"])[0].sum().backward()
    torch.testing.assert_close(raw.grad, other.grad)


def test_two_decays_are_added() -> None:
    x = drawn()
    found, _ = fla.fused_recurrent_gdn(x["q"], x["k"], x["v"], x["g"], x["gk"], None, x["beta"])
    both = x["g"][..., None] + x["gk"]
    x["state"] = torch.zeros_like(x["state"])
    torch.testing.assert_close(found, recurrence(x, both, x["beta"], True)[0])


def test_a_decay_for_each_head() -> None:
    x = drawn()
    gamma = x["g"][0, 0]
    out, _ = fla.chunk_simple_gla(x["q"], x["k"], x["v"], g_gamma=gamma, initial_state=x["state"])
    torch.testing.assert_close(out, recurrence(x, gamma.expand(B, T, H), None, False)[0])


#: By what is refused: the function, and arguments that are not as `CALLS` has them.
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "reverse is not supported": ("fused_recurrent_gla", {"reverse": True}),
    "gv is not supported; got a tensor": ("fused_recurrent_gated_delta_rule", {"gv": torch.zeros(B, T, H, V)}),
    "cp_context is not supported": ("chunk_gated_delta_rule", {"cp_context": object()}),
    "return_intermediate_states is not supported": ("chunk_kda", {"return_intermediate_states": True}),
    "head_first is not an argument": ("chunk_simple_gla", {"head_first": True}),
    "A_log must be given with use_gate_in_kernel": ("chunk_kda", {"use_gate_in_kernel": True}),
    "A_log must have 2 numbers": ("chunk_kda", {"use_gate_in_kernel": True, "A_log": torch.zeros(3)}),
    "dt_bias must have 16 numbers": (
        "chunk_kda", {"use_gate_in_kernel": True, "A_log": torch.zeros(2), "dt_bias": torch.zeros(2)},
    ),
    "lower_bound must be a number below 0": ("chunk_kda", {"use_gate_in_kernel": True, "lower_bound": 1.0}),
    "g must be a torch.Tensor": ("chunk_delta_rule", {"use_gate_in_kernel": True, "A_log": torch.zeros(2)}),
    "allow_neg_eigval must be False without": ("chunk_kda", {"allow_neg_eigval": True}),
    "beta must be given with use_beta": ("fused_recurrent_gdn", {"use_beta_sigmoid_in_kernel": True}),
    "use_qk_l2norm_in_kernel must be a bool": ("chunk_gla", {"use_qk_l2norm_in_kernel": torch.ones(1)}),
    "output_final_state must be a bool": ("chunk_gla", {"output_final_state": 1}),
    "gk must be None with use_gate": ("fused_recurrent_gdn", {"use_gate_in_kernel": True, "gk": torch.zeros(1)}),
    "g must be None with g_gamma": ("chunk_simple_gla", {"g_gamma": torch.zeros(H)}),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_refused(message: str) -> None:
    x = drawn()
    name, given = REFUSED[message]
    usual = {n: x[of] for n, of in CALLS[name][0].items()} if name in CALLS else {}
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        getattr(fla, name)(x["q"], x["k"], x["v"], **{**usual, **given})


W = 4


def convolved(x: Tensor, before: Tensor, layer: fla.ShortConvolution) -> tuple[Tensor, Tensor]:
    """The convolution of ``[B, T, C]`` behind ``[B, C, W]``, and the last W inputs."""
    whole = torch.cat([before, x.transpose(1, 2)], -1)
    y = F.conv1d(whole, layer.weight, layer.bias, groups=x.shape[2])[..., 1:]
    return F.silu(y).transpose(1, 2), whole[..., -W:]


@pytest.mark.parametrize("lengths", [(9,), (5, 1, 3), (0, 2, 7), (1, 1)])
@pytest.mark.parametrize("started", [False, True])
def test_short_convolution(lengths: tuple[int, ...], started: bool) -> None:
    """Rows of one length, and documents, with the states of fla, which hold W inputs."""
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(0)
    layer = fla.ShortConvolution(6, W, bias=True, dtype=torch.float64)
    n, total = len(lengths), sum(lengths)
    x = torch.randn(n if n == 1 else 1, total, 6, generator=generator, dtype=torch.float64)
    before = torch.randn(n, 6, W, generator=generator, dtype=torch.float64) * started
    cu = None if n == 1 else torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    given = before if started else None
    parts = [convolved(part, before[i : i + 1], layer) for i, part in enumerate(x.split(lengths, 1))]
    expected = torch.cat([y for y, _ in parts], 1), torch.cat([state for _, state in parts])
    torch.testing.assert_close(
        layer(x, x, cache=given, output_final_state=True, cu_seqlens=cu), (expected[0] + x, expected[1])
    )
    found, nothing = layer(x, cache=given, cu_seqlens=cu)
    torch.testing.assert_close(found, expected[0])
    assert nothing is None
    if started and set(lengths) == {1}:  # a step, in place
        with torch.no_grad():
            found, cache = layer(x, x, cache=before, output_final_state=True, cu_seqlens=cu)
        assert cache is before
        torch.testing.assert_close((found, cache), (expected[0] + x, expected[1]))


def test_short_convolution_of_padded_rows_and_one_token() -> None:
    layer = fla.ShortConvolution(6, W, dtype=torch.float64)
    x, mask = torch.randn(2, 3, 6, dtype=torch.float64), torch.tensor([[0, 1, 1], [1, 1, 1]])
    zeros = torch.zeros(2, 6, W, dtype=torch.float64)
    expected, state = convolved(x * mask[..., None], zeros, layer)
    torch.testing.assert_close(layer(x, mask=mask, output_final_state=True), (expected, state))
    cache = state.detach().clone()
    with torch.no_grad():
        found = layer(x[:, :1], cache=cache, output_final_state=True)
    torch.testing.assert_close(found, convolved(x[:, :1], state, layer))
    assert found[1] is cache
    with pytest.raises(ValueError, match="mask must be None with cu_seqlens"):
        layer(x[:1], mask=mask[:1], cu_seqlens=torch.tensor([0, 3]))


@pytest.mark.parametrize("activation", ["swish", "silu", "sigmoid"])
def test_gated_norm(activation: str) -> None:
    layer = fla.FusedRMSNormGated(6, activation=activation, dtype=torch.float64)
    torch.nn.init.normal_(layer.weight)  # type: ignore[arg-type]  # it has one
    x, g = torch.randn(2, 3, 6, dtype=torch.float64), torch.randn(2, 3, 6, dtype=torch.float64)
    act = torch.sigmoid if activation == "sigmoid" else F.silu
    torch.testing.assert_close(layer(x, g), F.rms_norm(x, (6,), layer.weight, 1e-5) * act(g))
    with pytest.raises(ValueError, match="residual is not supported; got a tensor"):
        layer(x, g, residual=x)
    assert list(fla.FusedRMSNormGated(6, elementwise_affine=False).parameters()) == []
