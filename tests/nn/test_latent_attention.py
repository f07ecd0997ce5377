"""`LatentAttention`: its formula, transformers' own layer, packed sequences, masks, and the widths that a cache has."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from foundry_kernels import rope, rope_table
from foundry_kernels.models import KVCache, ModelConfig
from foundry_kernels.nn import Attention, LatentAttention, RotaryEmbedding

H, R, N, V, C = 3, 4, 6, 5, 8  # heads, rotated and other dimensions, width of a value, latent width
SIZES: dict[str, Any] = {"kv_lora_rank": C, "qk_rope_head_dim": R, "qk_nope_head_dim": N, "v_head_dim": V}


def make(dtype: torch.dtype = torch.float32, **changes: Any) -> LatentAttention:
    options = {"rope": RotaryEmbedding(R, 16, interleaved=True), "q_lora_rank": 7, "bias": True, **SIZES, **changes}
    layer = LatentAttention(20, H, **options, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(drawn * 0.4 + (0.5 if parameter.dim() == 1 else 0.0))
    return layer


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def formula(layer: LatentAttention, x: Tensor, seen: Tensor) -> Tensor:
    """As the docstring has it; the keys that a query sees by `seen`."""

    def normed(c: Tensor, norm: Any) -> Tensor:
        return c * torch.rsqrt(c.square().mean(-1, keepdim=True) + 1e-6) * norm.weight

    q = layer.q_proj(x) if layer.q_lora_rank is None else layer.q_b_proj(normed(layer.q_a_proj(x), layer.q_a_layernorm))
    c, shared = layer.kv_a_proj_with_mqa(x).split([C, R], -1)
    k, v = layer.kv_b_proj(normed(c, layer.kv_a_layernorm)).unflatten(-1, (H, -1)).transpose(1, 2).split([N, V], -1)
    q, turned = q.unflatten(-1, (H, -1)).transpose(1, 2).split([N, R], -1)
    shared = shared.unsqueeze(1)
    if layer.rope is not None:
        table = [t.to(x.dtype) for t in rope_table(R, x.shape[1])]
        turned, shared = rope(turned, shared, *table, interleaved=True, backend="reference")
    scores = q @ k.mT + turned @ shared.mT
    weights = (scores * (N + R) ** -0.5).masked_fill(~seen, -torch.inf).softmax(-1)
    return layer.o_proj((weights @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("changes", [{}, {"rope": None, "q_lora_rank": None, "bias": False}], ids=["all", "least"])
@pytest.mark.parametrize("limit", ["causal", "window", "lengths", "mask"])
def test_the_formula_and_its_gradients(changes: dict[str, Any], limit: str) -> None:
    layer = make(torch.float64, **changes, sliding_window=3 if limit == "window" else None)
    x, at = draw(2, 9, 20, dtype=torch.float64).requires_grad_(), torch.arange(9)
    seen, given = (at <= at[:, None]).expand(2, 1, 9, 9), {}
    if limit == "window":
        seen = seen & (at > at[:, None] - 3)
    elif limit == "lengths":
        given["lengths"] = torch.tensor([9, 4])
        seen = seen & (at < given["lengths"][:, None, None, None])
    elif limit == "mask":
        given["attn_mask"] = (draw(2, H, 9, 9) > -0.5) | torch.eye(9, dtype=torch.bool)
        seen = seen & given["attn_mask"]
    y, expected = layer(x, **given), formula(layer, x, seen)
    torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-6)  # the table of the rotation is float32
    dy, inputs = draw(2, 9, 20, dtype=torch.float64, seed=2), (x, *layer.parameters())
    for found, wanted in zip(
        torch.autograd.grad(y, inputs, dy), torch.autograd.grad(expected, inputs, dy), strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "autocast"), [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True)]
)
def test_deepseeks_own_layer_and_its_state_dict(dtype: torch.dtype, autocast: bool) -> None:
    pytest.importorskip("transformers.models.deepseek_v3")
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
    from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config

    heads = {"num_attention_heads": H, "num_key_value_heads": H}
    config = DeepseekV3Config(hidden_size=20, q_lora_rank=7, attention_bias=True, **SIZES, **heads)
    config._attn_implementation = "sdpa"
    theirs = deepseek.DeepseekV3Attention(config, 0).to(dtype)
    ours = make(dtype, norm_round_before_weight=True)
    theirs.load_state_dict(ours.state_dict())
    x = draw(2, 11, 20, dtype=dtype)
    table = deepseek.DeepseekV3RotaryEmbedding(config)(x, torch.arange(11)[None])
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected, found = theirs(x, table, None)[0], ours(x)
    assert found.dtype == expected.dtype
    error = 2e-5 if found.dtype == torch.float32 else 0.03
    assert (found - expected).abs().max() <= error * expected.abs().max()


def test_packed_sequences_are_read_one_by_one() -> None:
    layer, bounds = make(), [0, 3, 3, 4, 13]
    x = draw(1, 13, 20).requires_grad_()
    y = layer(x, cu_seqlens=torch.tensor(bounds), max_seqlen=9)
    expected = torch.cat([layer(x[:, start:end]) for start, end in itertools.pairwise(bounds)], 1)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    dy, inputs = draw(1, 13, 20, seed=2), (x, *layer.parameters())
    for found, wanted in zip(
        torch.autograd.grad(y, inputs, dy), torch.autograd.grad(expected, inputs, dy), strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_cache_of_other_widths_is_refused() -> None:
    config = ModelConfig(20, 1, H, head_dim=N + R, rope_dim=R, kv_lora_rank=C, v_head_dim=V)
    layer, x = make().eval(), draw(2, 1, 20)
    y, lse = layer(x, cache=KVCache(config, 2, 4).layer(0), return_lse=True)
    assert (y.shape, lse.shape) == ((2, 1, 20), (2, H, 1))
    same = ModelConfig(20, 1, H, head_dim=N + R)
    with pytest.raises(ValueError, match=r"v must fit \[2, 3, at most 4, 10\]; got \(2, 3, 1, 5\)"):
        layer(x, cache=KVCache(same, 2, 4).layer(0))
    plain = Attention(20, H, head_dim=N + R, rope=RotaryEmbedding(R))
    with pytest.raises(ValueError, match="must fit"):
        plain(x, cache=KVCache(config, 2, 4).layer(0))
    assert "kv_lora_rank=8, q_lora_rank=7, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5" in repr(layer)
