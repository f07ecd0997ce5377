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


@pytest.mark.parametrize("name", fla.__all__)
def test_functions_are_the_recurrence(name: str) -> None:
    x = drawn()
    given, g, beta, delta = CALLS[name]
    options: dict[str, Any] = {"initial_state": x["state"], "output_final_state": True}
    out, state = getattr(fla, name)(x["q"], x["k"], x["v"], **{n: x[of] for n, of in given.items()}, **options)
    expected = recurrence(x, g and x[g], beta and x[beta], delta)
    torch.testing.assert_close((out, state), expected)
    assert getattr(fla, name)(x["q"], x["k"], x["v"], **{n: x[of] for n, of in given.items()})[1] is None


def test_gates_in_the_kernel() -> None:
    x = drawn()
    flags: dict[str, Any] = {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True}
    options: dict[str, Any] = {"initial_state": x["state"], "A_log": x["A_log"], "dt_bias": x["dt_bias"]}
    out, _ = fla.chunk_kda(x["q"], x["k"], x["v"], x["gk"], x["beta"], **flags, **options)
    g = -x["A_log"].exp()[:, None] * F.softplus(x["gk"] + x["dt_bias"].view(H, K))
    torch.testing.assert_close(out, recurrence(x, g, 2 * x["beta"].sigmoid(), True)[0])


def test_a_decay_for_each_head() -> None:
    x = drawn()
    gamma = x["g"][0, 0]
    out, _ = fla.chunk_simple_gla(x["q"], x["k"], x["v"], g_gamma=gamma, initial_state=x["state"])
    torch.testing.assert_close(out, recurrence(x, gamma.expand(B, T, H), None, False)[0])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: fla.fused_recurrent_gla(x["q"], x["k"], x["v"], x["gk"], reverse=True), "reverse is not supported"),
        (lambda x: fla.fused_recurrent_gla(x["q"], x["k"], x["v"], gv=x["gk"]), "gv is not supported; got a tensor"),
        (
            lambda x: fla.chunk_kda(x["q"], x["k"], x["v"], x["gk"], x["beta"], use_gate_in_kernel=True),
            "A_log must be given with use_gate_in_kernel",
        ),
        (
            lambda x: fla.fused_recurrent_gated_delta_rule(x["q"], x["k"], x["v"], x["g"], x["gk"]),
            "g must be None with gk",
        ),
        (lambda x: fla.chunk_simple_gla(x["q"], x["k"], x["v"], x["g"], x["g"][0, 0]), "g must be None with g_gamma"),
    ],
)
def test_what_is_refused(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(drawn())
