"""The weights that are made from the log-sum-exp: those of the call, with each option, and their gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import foundry_kernels as fk
from foundry_kernels.ops.flash_attention.case_makers import PartlyBiased
from foundry_kernels.ops.flash_attention.weights import attention_weights

BACKENDS = ("reference", *(("native",) if "native" in fk.OPS["flash_attention"].backends("cpu") else ()))

B, H, HK, T, S, D = 2, 4, 2, 9, 70, 8


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


SEEN = draw(B, 1, T, S, seed=7) > 0.0
SEEN[1, 0, 4] = False
LOWEST = PartlyBiased(torch.finfo(torch.float32).min)(torch.Generator(), (T, S)).float()
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window, cap": {"causal": True, "window": (5, 0), "softcap": 3.0, "scale": 0.5},
    "top left": {"causal": True, "align": "top_left"},
    "alibi, sinks": {"alibi_slopes": torch.tensor([0.1, 0.2, 0.3, 0.4]), "sinks": draw(H, seed=5)},
    "bool": {"attn_mask": SEEN},
    "tiles": {"attn_mask": fk.AttentionMask(SEEN)},
    "bias": {"attn_mask": draw(H, T, S, seed=8)},
    "lowest": {"attn_mask": LOWEST},
    "lowest, sinks": {"attn_mask": LOWEST, "sinks": LOWEST[0, :H]},
    "dropout": {"dropout_p": 0.4, "dropout_seed": 11},
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", OPTIONS)
def test_they_are_those_of_the_call(name: str, backend: str) -> None:
    options = OPTIONS[name]
    q, k, v = draw(B, H, T, D), draw(B, HK, S, D, seed=1), draw(B, HK, S, D, seed=2)
    out, lse = fk.flash_attention(q, k, v, **options, return_lse=True, backend=backend)
    weights = attention_weights(q, k, lse, **options)
    assert weights.shape == (B, H, T, S)
    torch.testing.assert_close(weights @ v.repeat_interleave(H // HK, 1), out, rtol=1e-4, atol=1e-5)
    if name == "bool":
        assert not weights[1, :, 4].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_their_gradients(backend: str) -> None:
    inputs = [x.requires_grad_() for x in (draw(B, H, T, D), draw(B, H, S, D, seed=1), draw(T, S, seed=2))]
    q, k, bias = inputs
    _, lse = fk.flash_attention(q, k, k, attn_mask=bias, return_lse=True, backend=backend)
    of = draw(B, H, T, S, seed=3)
    grads = torch.autograd.grad((attention_weights(q, k, lse, attn_mask=bias) * of).sum(), inputs)
    plain = torch.softmax(q @ k.transpose(-1, -2) * D**-0.5 + bias, -1)
    for actual, expected in zip(grads, torch.autograd.grad((plain * of).sum(), inputs), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_dropout_without_a_seed_is_refused() -> None:
    q = draw(B, H, T, D)
    with pytest.raises(ValueError, match="dropout_seed must be that of the call"):
        attention_weights(q, q, draw(B, H, T), dropout_p=0.5)
