"""The fields of a model: widths, published sizes, and what is refused."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest
import torch
from tiny_model import TINY, draw

import foundry_kernels as fk
from foundry_kernels.models import ModelConfig, Transformer
from foundry_kernels.models.presets import SIZES


@pytest.mark.parametrize(
    ("changes", "width"),
    [
        ({}, 48),  # int(8 * 16 / 3) = 42, up to a multiple of 8
        ({"activation": "relu"}, 64),
        ({"ffn_rule": "4d"}, 64),
        ({"activation": "gelu", "ffn_rule": "two_thirds_of_4d", "multiple_of": 5}, 45),
        ({"activation": "gelu", "ffn_dim_multiplier": 1.3}, 83),
        ({"activation": "gelu", "hidden_dim": 7}, 7),
    ],
)
def test_widths_of_the_feed_forward_part(changes, width):
    assert dataclasses.replace(TINY, **changes).ffn_width == width


COUNTS = {
    "gpt2": {"small": 124_439_808, "medium": 354_823_168, "large": 774_030_080, "xl": 1_557_611_200},
    "llama": {
        "llama-2-7b": 6_738_415_616,
        "llama-2-13b": 13_015_864_320,
        "llama-2-70b": 68_976_648_192,
        "llama-3-8b": 8_030_261_248,
        "llama-3-70b": 70_553_706_496,
        "llama-3.1-8b": 8_030_261_248,
        "llama-3.1-70b": 70_553_706_496,
        "llama-3.2-1b": 1_235_814_400,
        "llama-3.2-3b": 3_212_749_824,
    },
    "bloom": {
        "560m": 559_214_592,
        "1b1": 1_065_314_304,
        "1b7": 1_722_408_960,
        "3b": 3_002_557_440,
        "7b1": 7_069_016_064,
        "176b": 176_247_271_424,
    },
    # Of checkpoints that store the tied head too, 65024 times the width less.
    "falcon": {"7b": 6_921_720_704, "40b": 41_303_293_952, "180b": 179_522_565_120 - 65024 * 14848},
    "mixtral": {"8x7b": 46_702_792_704, "8x22b": 140_620_634_112},
}
DEFAULTS = {"gpt2": "small", "llama": "llama-2-7b", "bloom": "7b1", "falcon": "7b", "mixtral": "8x7b"}
KV_HEADS = {"mixtral": {"n_kv_heads": 2}}  # it has 8, too many for the small one of the test


@pytest.mark.parametrize("family", SIZES)
def test_presets_have_their_parameters(family):
    preset = getattr(ModelConfig, family)
    assert {size: preset(size).n_parameters for size in SIZES[family]} == COUNTS[family]
    assert preset() == preset(DEFAULTS[family])
    with torch.device("meta"):
        built = Transformer(preset())
    assert sum(p.numel() for p in built.parameters()) == COUNTS[family][DEFAULTS[family]]
    small = preset(n_layers=2, dim=64, n_heads=4, vocab_size=11, multiple_of=8, **KV_HEADS.get(family, {}))
    width = {"llama": 176, "mixtral": 224}.get(family, 256)
    assert (small.n_layers, small.head_width, small.ffn_width) == (2, 16, width)
    assert Transformer(small)(draw()).shape == (3, 7, 11)
    with pytest.raises(ValueError, match=f"size must be one of {DEFAULTS[family] if family == 'gpt2' else ''}.*'tiny'"):
        preset("tiny")


# --- contradictions ---------------------------------------------------------------------------------------------------


EXPERTS = {"n_experts": 4}
LINEAR = {"layer_types": ("linear_attention", "full_attention")}
NAN = float("nan")
CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({"n_kv_heads": 3}, "n_heads must be a multiple of n_kv_heads=3; got 4"),
    ({"dim": 18}, "dim must be a multiple of n_heads=4"),
    ({"dim": 12}, "head_dim must be even, for the rotary pairs; got 3"),
    ({"head_dim": 5}, "head_dim must be even, for the rotary pairs; got 5"),
    ({"n_layers": 0}, "n_layers must be at least 1"),
    ({"vocab_size": -1}, "vocab_size must be at least 1"),
    ({"hidden_dim": 0}, "hidden_dim must be at least 1"),
    ({"norm_eps": 0.0}, "norm_eps must be finite and > 0"),
    ({"ffn_dim_multiplier": NAN}, "ffn_dim_multiplier must be finite"),
    ({"rope_base": 1.0}, "rope_base must be finite and > 1"),
    ({"positions": "rotary"}, "positions must be one of 'rope', 'alibi', .* got 'rotary'"),
    ({"activation": "selu"}, "activation must be one of 'swiglu', .*'relu2'; got 'selu'"),
    ({"init": "he"}, "init must be one of 'normal', 'xavier', 'depth_scaled'; got 'he'"),
    ({"positions": "alibi", "rope_scaling": fk.RopeScaling("linear", 2.0)}, "rope_scaling needs positions='rope'"),
    ({"positions": "learned", "rope_base": 5e5}, "rope_base needs positions='rope'; got 500000.0 .*'learned'"),
    ({"positions": "none", "rope_dim": 2}, "rope_dim needs positions='rope'; got 2"),
    ({"positions": "alibi", "rope_interleaved": True}, "rope_interleaved needs positions='rope'; got True"),
    ({"rope_dim": 3}, "rope_dim must be even and at most head_dim=4; got 3"),
    ({"rope_dim": 6}, "rope_dim must be even and at most head_dim=4; got 6"),
    ({"norm_placement": "post", "parallel_residual": True}, "parallel_residual needs norm_placement='pre'"),
    ({"shared_attention_norm": True}, "shared_attention_norm needs parallel_residual=True"),
    ({"norm_bias": True}, "norm_bias needs norm='layer_norm'"),
    ({"norm": "layer_norm", "norm_round_before_weight": True}, "norm_round_before_weight needs norm='rms_norm'"),
    ({"tie_embeddings": True, "output_bias": True}, "output_bias needs tie_embeddings=False"),
    ({"sliding_window": 0}, "sliding_window must be at least 1; got 0"),
    ({"residual_dropout": 1.0}, r"residual_dropout must be in \[0, 1\); got 1.0"),
    ({"attention_dropout": -0.1}, r"attention_dropout must be in \[0, 1\); got -0.1"),
    ({"qk_norm_weight_offset": 1.0}, "qk_norm_weight_offset needs qk_norm=True"),
    ({"v_head_dim": 4}, "v_head_dim needs kv_lora_rank: there is no latent attention; got 4"),
    ({"q_lora_rank": 4}, "q_lora_rank needs kv_lora_rank"),
    ({"kv_lora_rank": 4}, "rope_dim must be below head_dim=4 with kv_lora_rank; got None"),
    ({"kv_lora_rank": 4, "rope_dim": 4}, "rope_dim must be below head_dim=4 with kv_lora_rank; got 4"),
    ({"kv_lora_rank": 4, "rope_dim": 2, "n_kv_heads": 2}, "n_kv_heads must be 4 with kv_lora_rank; got 2"),
    (
        {"kv_lora_rank": 4, "rope_dim": 2, "n_kv_heads": 4, "qk_norm": True},
        "qk_norm must be False with kv_lora_rank; got True",
    ),
    # experts
    ({"n_experts": 2, "top_k": 3}, "top_k must be at most n_experts=2; got 3"),
    ({"n_experts": 0}, "n_experts must be at least 1; got 0"),
    ({"top_k": 3}, "top_k needs n_experts: otherwise there is no router and no expert; got 3"),
    ({"router_z_coef": 0.1}, "router_z_coef needs n_experts"),
    (
        EXPERTS | {"dense_layers": (0,), "layer_types": ("full_attention", "mlp"), "one_branch": True},
        "dense_layers must be layers with a feed-forward block; got 0",
    ),
    (EXPERTS | {"top_k": 1}, "router_renormalize must be False with top_k=1"),
    (EXPERTS | {"shared_expert_gate": True}, "shared_expert_gate needs shared_expert_dim"),
    (EXPERTS | {"load_balancing_coef": -1.0}, "load_balancing_coef must be finite and >= 0; got -1.0"),
    (EXPERTS | {"router_scale": 0.0}, "router_scale must be finite and > 0; got 0.0"),
    (EXPERTS | {"router_scoring": "max"}, "router_scoring must be one of 'softmax', 'sigmoid'; got 'max'"),
    # linear attention
    ({"layer_types": ("linear_attention",)}, "layer_types must have one for each of n_layers=2; got 1"),
    (
        {"layer_types": ("mamba",) * 2},
        "layer_types must be of 'full_attention', 'linear_attention', 'hybrid' and 'mlp'",
    ),
    ({"layer_types": ("mlp",) * 2}, "layer_types with 'mlp' needs one_branch=True"),
    ({"one_branch": True, "norm_placement": "post"}, "one_branch needs norm_placement='pre'; got 'post'"),
    ({"one_branch": True, "layer_types": ("hybrid",) * 2}, "layer_types with 'hybrid' needs one_branch=False"),
    ({"gate_alpha": 2.0, "activation": "geglu"}, "gate_alpha needs activation='swiglu' and no experts"),
    (
        LINEAR | {"linear_kind": "mamba2", "linear_rmsnorm": False, "linear_norm_before_gate": True},
        "linear_norm_before_gate needs linear_rmsnorm=True",
    ),
    ({"residual_scale": 0.0}, "residual_scale must be finite and > 0; got 0"),
    (LINEAR | {"linear_bias": True}, "linear_bias needs linear_kind='mamba2'; got True"),
    (LINEAR | {"linear_kind": "mamba2", "linear_norm_groups": 3}, "linear_norm_groups must be a divisor of 4 heads"),
    (LINEAR | {"linear_kind": "mamba2", "linear_dt_limit": (2.0, 1.0)}, "linear_dt_limit must rise"),
    ({"linear_k_dim": 8}, "linear_k_dim needs a layer of linear attention"),
    ({"linear_conv_size": 3}, "linear_conv_size needs a layer of linear attention"),
    (LINEAR | {"causal": False}, "needs causal=True"),
    (LINEAR | {"norm_placement": "post"}, "needs norm_placement='pre'"),
    (LINEAR | {"parallel_residual": True}, "needs parallel_residual=False"),
    (LINEAR | {"context_dim": 8}, "needs context_dim=None"),
    (LINEAR | {"linear_k_heads": 3}, "linear_v_heads must be a multiple"),
    (LINEAR | {"linear_v_dim": 600}, "linear_v_dim must be at most 512; got 600"),
    (LINEAR | {"linear_conv_size": 9}, "linear_conv_size must be at most 8; got 9"),
]


@pytest.mark.parametrize(("changes", "message"), CONTRADICTIONS, ids=["-".join(c) for c, _ in CONTRADICTIONS])
def test_contradictions_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TINY, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_heads": 4.0}, "n_heads must be an int; got float"),
        ({"qk_norm": 1}, "qk_norm must be a bool; got int"),
        ({"sliding_window": 4.0}, "sliding_window must be an int; got float"),
        ({"branch_scales": (1.0,)}, "branch_scales must be 3 numbers"),
        ({"layer_types": "linear_attention"}, "layer_types must be a tuple of strings"),
        ({"attention_gate": 1}, "attention_gate must be a bool"),
    ],
)
def test_types_of_fields(changes, message):
    with pytest.raises(TypeError, match=message):
        dataclasses.replace(TINY, **changes)
    assert dataclasses.replace(TINY, positions="none", head_dim=5).head_width == 5  # odd without pairs
    with pytest.raises(TypeError, match="config must be a ModelConfig; got dict"):
        Transformer({"dim": 16})
    with pytest.raises(ValueError, match="backend must be one of"):
        Transformer(TINY, "fast")


def test_a_window_of_minus_one_is_no_bound():
    assert dataclasses.replace(TINY, sliding_window=-1) == TINY
    assert fk.nn.Attention(8, 2, sliding_window=-1).sliding_window is None


def _default(function, name):
    return inspect.signature(function).parameters[name].default


def test_functions_modules_and_models_have_the_same_defaults():
    """Those of PyTorch: an RMSNorm's eps is the machine epsilon, a LayerNorm's 1e-5; rotary pairs are halves."""
    functions = (fk.rms_norm, fk.add_rms_norm, fk.qk_norm_rope, fk.nn.RMSNorm, torch.nn.RMSNorm)
    assert {_default(function, "eps") for function in (*functions, torch.nn.functional.rms_norm)} == {None}
    assert _default(fk.nn.Attention, "norm_eps") is None
    assert _default(ModelConfig, "norm_eps") is None
    layer_norms = (fk.layer_norm, fk.add_layer_norm, fk.nn.LayerNorm, torch.nn.LayerNorm)
    assert {_default(function, "eps") for function in layer_norms} == {1e-5}
    pairs = (fk.rope, fk.qk_norm_rope, fk.nn.RotaryEmbedding)
    assert {_default(function, "interleaved") for function in pairs} == {False}
    assert _default(ModelConfig, "rope_interleaved") is False

    shape = {"dim": 16, "n_layers": 1, "n_heads": 2, "vocab_size": 11}
    x, weight = torch.randn(3, 16) * 1e-3, torch.ones(16)
    norm = Transformer(ModelConfig(**shape)).norm
    torch.testing.assert_close(norm(x), torch.nn.functional.rms_norm(x, (16,), weight))
    assert torch.equal(norm(x), fk.rms_norm(x, weight))
    layer = Transformer(ModelConfig(**shape, norm="layer_norm")).norm
    assert torch.equal(layer(x), fk.layer_norm(x, weight, torch.zeros(16)))
    normed = Transformer(ModelConfig(**shape, qk_norm=True)).layers[0].attention
    q = torch.randn(1, 2, 3, 8)
    rotated = fk.qk_norm_rope(q, q, torch.ones(8), torch.ones(8), *fk.rope_table(8, 3))
    for mine, expected in zip(normed._norm_and_rotate(q, q, None), rotated, strict=True):
        assert torch.equal(mine, expected)


def test_published_models_give_their_own():
    for config in (ModelConfig.llama(), ModelConfig.mixtral()):
        assert (config.norm_eps, config.rope_interleaved) == (1e-5, True)
    for config in (ModelConfig.gpt2(), ModelConfig.bloom(), ModelConfig.falcon()):
        assert (config.norm_eps, config.norm, config.rope_interleaved) == (None, "layer_norm", False)


def test_a_published_model_with_other_positions():
    assert not ModelConfig.llama(positions="alibi").rope_interleaved
    with pytest.raises(ValueError, match="rope_interleaved needs positions='rope'; got True"):
        ModelConfig.llama(positions="alibi", rope_interleaved=True)
