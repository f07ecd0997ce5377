"""Models of transformers read into ours: the same logits, loss, gradients and continuations; refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_hf import SIZES, draw, gradients_are_equal, near, randomise
from torch import nn

from foundry_kernels.integrations.convert.from_hf import READINGS
from foundry_kernels.integrations.convert.hf_encoder_config_maps import ENCODERS
from foundry_kernels.integrations.convert.reading import SILENT, Asked
from foundry_kernels.models import Transformer

transformers = pytest.importorskip("transformers")

WIDE = {**SIZES, "intermediate_size": 48}
GROUPED = {**WIDE, "num_key_value_heads": 2}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
DEEPSEEK = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "n_shared_experts": 2}
DEEPSEEK |= {"first_k_dense_replace": 1}
LLAMA_3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA_3 |= {"rope_theta": 5e3, "factor": 4.0, "original_max_position_embeddings": 16}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 16}

DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 6}
DELTA |= {"head_dim": 16, "linear_conv_kernel_dim": 3, "layer_types": ["linear_attention", "full_attention"]}

MAMBA = {"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 6, "mamba_d_conv": 3}
GRANITE = {"embedding_multiplier": 1.7, "logits_scaling": 1.3, "residual_multiplier": 0.4, "attention_multiplier": 0.6}
GRANITE_4 = {**GROUPED, **MAMBA, **GRANITE, "shared_intermediate_size": 24}
FALCON_H1 = {**GROUPED, **MAMBA, "mamba_d_ssm": 48, "mlp_multipliers": [0.7, 1.4], "key_multiplier": 0.6}
FALCON_H1 |= {"attention_out_multiplier": 1.2, "attention_in_multiplier": 1.3, "ssm_in_multiplier": 0.8}
FALCON_H1 |= {"ssm_multipliers": [0.9, 1.1, 1.2, 0.7, 1.3], "ssm_out_multiplier": 0.6, "embedding_multiplier": 1.7}
FALCON_H1 |= {"lm_head_multiplier": 0.4}
MIXERS = {"n_groups": 2, "conv_kernel": 3, "use_bias": True}
NEMOTRON = {**GROUPED, **MIXERS, "mamba_num_heads": 8, "mamba_head_dim": 6, "ssm_state_size": 7, "head_dim": 6}
LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 6, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
KIMI = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "n_shared_experts": 2}
KIMI |= {"linear_head_dim": 6, "linear_num_heads": 3, "linear_conv_kernel_dim": 3}
YARN_ALL = {**YARN, "mscale": 0.7, "mscale_all_dim": 0.5, "beta_fast": 8, "beta_slow": 1}

#: Model type and options of its configuration.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", SIZES),
    "gpt2 untied": ("gpt2", {**SIZES, "n_inner": 40, "activation_function": "relu", "tie_word_embeddings": False}),
    "gpt": ("openai-gpt", SIZES),
    "llama": ("llama", GROUPED),
    "llama 3": ("llama", {**GROUPED, "rope_parameters": LLAMA_3, "tie_word_embeddings": True}),
    "llama biased": ("llama", {**GROUPED, "rope_parameters": YARN, "attention_bias": True, "mlp_bias": True}),
    "llama relu": ("llama", {**GROUPED, "hidden_act": "relu"}),
    "mistral": ("mistral", {**GROUPED, "sliding_window": 3, "head_dim": 6, "hidden_act": "sigmoid"}),
    "qwen2": ("qwen2", GROUPED),
    "qwen3": ("qwen3", {**GROUPED, "head_dim": 16}),
    "mixtral": ("mixtral", {**GROUPED, "num_local_experts": 4}),
    "qwen2-moe": ("qwen2_moe", {**GROUPED, **EXPERTS, "shared_expert_intermediate_size": 24}),
    "qwen3-moe": ("qwen3_moe", {**GROUPED, **EXPERTS, "head_dim": 16, "norm_topk_prob": True}),
    "qwen3-moe mixed": ("qwen3_moe", {**GROUPED, **EXPERTS, "mlp_only_layers": [1]}),
    "qwen2-moe mixed": (
        "qwen2_moe",
        {**GROUPED, **EXPERTS, "shared_expert_intermediate_size": 24, "num_hidden_layers": 3, "decoder_sparse_step": 2},
    ),
    "qwen3-next": (
        "qwen3_next",
        {**GROUPED, **EXPERTS, **DELTA, "shared_expert_intermediate_size": 24, "mlp_only_layers": [1]},
    ),
    "qwen3.5": ("qwen3_5_text", {**GROUPED, **DELTA, "num_hidden_layers": 4, "layer_types": None}),
    "qwen3.5 full": ("qwen3_5_text", {**GROUPED, **DELTA, "layer_types": ["full_attention"] * 2}),
    "bamba": ("bamba", {**GROUPED, **MAMBA, "attn_layer_indices": [1], "mamba_proj_bias": True}),
    "falcon-h1": ("falcon_h1", {**FALCON_H1, "num_hidden_layers": 2}),
    "falcon-h1 norm": (
        "falcon_h1",
        {**FALCON_H1, "mamba_rms_norm": True, "mamba_norm_before_gate": True, "num_hidden_layers": 2},
    ),
    "mamba2": ("mamba2", {**SIZES, **MIXERS, "num_heads": 8, "head_dim": 8, "state_size": 6}),
    "granite": ("granite", {**GROUPED, **GRANITE}),
    "granite 4": (
        "granitemoehybrid",
        {**GRANITE_4, "num_local_experts": 4, "layer_types": ["mamba", "attention"], "position_embedding_type": "rope"},
    ),
    "granite 4 dense": (
        "granitemoehybrid",
        {**GRANITE_4, "num_local_experts": 0, "layer_types": ["attention", "mamba"]},
    ),
    "nemotron 3": (
        "nemotron_h",
        {
            **NEMOTRON,
            **DEEPSEEK,
            "layers_block_type": ["mamba", "moe", "attention", "mlp"],
            "moe_shared_expert_intermediate_size": 12,
            "n_group": 4,
            "topk_group": 2,
        },
    ),
    "nemotron-h": (
        "nemotron_h",
        {**NEMOTRON, "layers_block_type": ["mamba", "mlp", "mamba", "attention", "mlp"], "time_step_min": 0.3},
    ),
    "olmoe": ("olmoe", {**GROUPED, "num_experts": 5, "num_experts_per_tok": 3}),
    "gemma": ("gemma", {**GROUPED, "head_dim": 6}),
    "dots1": (
        "dots1",
        {**GROUPED, **DEEPSEEK, "n_group": 4, "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 1.5},
    ),
    "glm4-moe": ("glm4_moe", {**GROUPED, **DEEPSEEK, "attention_bias": True, "use_qk_norm": True, "head_dim": 8}),
    "deepseek-v3": (
        "deepseek_v3",
        {**WIDE, **LATENT, **DEEPSEEK, "q_lora_rank": 7, "n_group": 4, "topk_group": 2, "rope_parameters": YARN_ALL},
    ),
    "deepseek-v3 small": (
        "deepseek_v3",
        {**WIDE, **LATENT, **DEEPSEEK, "q_lora_rank": None, "n_group": 1, "topk_group": 1}
        | {"rope_interleave": False, "attention_bias": True},
    ),
    "kimi-linear": ("kimi_linear", {**WIDE, **LATENT, **KIMI, "num_hidden_layers": 6, "norm_topk_prob": True}),
    "kimi-linear full": (
        "kimi_linear",
        {**WIDE, **LATENT, **KIMI, "layer_types": ["full_attention"] * 2, "mlp_layer_types": ["sparse", "dense"]}
        | {"q_lora_rank": 7, "n_group": 4, "topk_group": 2},
    ),
    "falcon-rw": (
        "falcon",
        {**SIZES, "alibi": True, "multi_query": False, "parallel_attn": False, "bias": True, "num_attention_heads": 8},
    ),
    "bloom": ("bloom", {**SIZES, "hidden_size": 48, "num_attention_heads": 6}),
    "falcon 7b": ("falcon", SIZES),
    "falcon 40b": ("falcon", {**SIZES, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon 11b": (  # grouped, one norm
        "falcon",
        {**SIZES, "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "falcon sequential": ("falcon", {**SIZES, "multi_query": False, "parallel_attn": False, "bias": True}),
    "gpt-neox": ("gpt_neox", WIDE),
    "gpt-neox sequential": ("gpt_neox", {**WIDE, "use_parallel_residual": False}),
    "opt": ("opt", {**SIZES, "ffn_dim": 48}),
    "opt post": ("opt", {**SIZES, "ffn_dim": 48, "do_layer_norm_before": False, "activation_function": "silu"}),
    "phi": ("phi", GROUPED),
    "stablelm": ("stablelm", {**GROUPED, "use_qkv_bias": True}),
    "stablelm parallel": ("stablelm", {**GROUPED, "use_parallel_residual": True}),
    "starcoder2": ("starcoder2", {**GROUPED, "sliding_window": 4}),
}
#: What a model has, in the field of ours, where a mistake could go unseen in logits of a small model.
FIELDS = {
    "gpt2": {"positions": "learned", "activation": "gelu_tanh", "attention_dropout": 0.1, "residual_dropout": 0.1},
    "gpt": {"norm_placement": "post"},
    "bloom": {"positions": "alibi", "embedding_norm": True},
    "falcon 7b": {"kv_heads": 1, "parallel_residual": True, "shared_attention_norm": True},
    "falcon 40b": {"kv_heads": 2, "parallel_residual": True, "shared_attention_norm": False},
    "mistral": {"sliding_window": 3, "kv_heads": 2, "head_width": 6},
    "gpt-neox": {"rope_dim": 2, "parallel_residual": True},
    "qwen3": {"qk_norm": True, "norm_round_before_weight": True},
    "mixtral": {"n_experts": 4, "top_k": 2, "load_balancing_coef": 0.0},
    "qwen2-moe": {"shared_expert_dim": 24, "shared_expert_gate": True, "router_renormalize": False, "ffn_width": 20},
    "qwen3-moe mixed": {"dense_layers": (1,), "dense_hidden_dim": 48, "ffn_width": 20},
    "qwen2-moe mixed": {"dense_layers": (0, 2)},
    "qwen3-next": {"linear_layers": (0,), "attention_gate": True, "rope_dim": 4, "dense_layers": (1,)},
    "qwen3.5": {"linear_layers": (0, 1, 2), "linear_heads": (4, 2, 8, 6), "linear_conv_size": 3},
    "qwen3.5 full": {"layer_types": None, "qk_norm_weight_offset": 1.0, "attention_gate": True},
    "bamba": {"linear_layers": (0,), "linear_heads": (8, 2, 6, 8), "linear_conv_size": 3, "rope_dim": 4},
    "mamba2": {"linear_layers": (0, 1), "mlp_layers": (), "linear_bias": True, "linear_conv_bias": True},
    "granite": {"embedding_scale": 1.7, "residual_scale": 0.4, "attention_scale": 0.6, "logit_scale": 1 / 1.3},
    "granite 4": {"positions": "rope", "n_experts": 4, "shared_expert_dim": 24, "ffn_width": 48},
    "granite 4 dense": {"positions": "none", "linear_layers": (1,), "ffn_width": 24, "n_experts": None},
    "nemotron-h": {"linear_layers": (0, 2), "full_layers": (3,), "mlp_layers": (1, 4), "activation": "relu2"},
    "nemotron 3": {
        "n_experts": 8,
        "dense_layers": (3,),
        "dense_hidden_dim": 48,
        "shared_expert_dim": 12,
        "router_groups": 4,
        "top_k": 3,
        "ffn_width": 20,
    },
    "olmoe": {"qk_norm_over": "projection", "router_renormalize": False},
    "gemma": {"norm_weight_offset": 1.0, "embedding_scale": 32**0.5, "activation": "geglu_tanh"},
    "dots1": {"router_groups": 4, "router_top_groups": 2, "dense_layers": (0,), "shared_expert_dim": 40},
    "glm4-moe": {"router_groups": None, "selection_bias": True, "rope_dim": 4, "attention_out_has_bias": False},
    "deepseek-v3": {"head_width": 10, "rope_dim": 4, "v_head_dim": 5, "q_lora_rank": 7, "rope_interleaved": True},
    "deepseek-v3 small": {"q_lora_rank": None, "attention_scale": None, "dense_layers": (0,)},
    "kimi-linear": {
        "norm_round_before_weight": True,
        "linear_layers": (0, 1, 2, 3, 5),
        "linear_heads": (3, 3, 6, 6),
        "positions": "none",
    },
    "kimi-linear full": {"linear_layers": (), "dense_layers": (1,)},
    "falcon-rw": {"positions": "alibi", "alibi_scaled": True, "kv_heads": 8},
    "qwen3-moe": {"router_renormalize": True, "qk_norm": True, "shared_expert_dim": None},
}


def configure(name: str, **changes: Any) -> Any:
    kind, options = MODELS[name]
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    return transformers.CONFIG_MAPPING[kind](**{**options, **changes})


def build(name: str, **changes: Any) -> Any:
    config = configure(name, **changes)
    attention = "sdpa" if name == "falcon-rw" else "eager"  # its eager attention adds ALiBi twice in some releases
    model = randomise(transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention))
    for key, buffer in model.named_buffers():
        if key.endswith("e_score_correction_bias"):  # else 0
            buffer.copy_(torch.linspace(-0.3, 0.3, len(buffer)).roll(3))
    return model


@pytest.mark.parametrize("name", MODELS)
def test_logits_loss_gradients_and_continuations_are_equal(name):
    theirs = build(name)
    ours, tokens = Transformer.from_hf(theirs), draw()
    assert {field: getattr(ours.config, field) for field in FIELDS.get(name, ())} == FIELDS.get(name, {})
    skipped = 2 * 32 if name.startswith("opt") else 0  # rows before those of position 0
    assert ours.config.n_parameters == sum(p.numel() for p in theirs.parameters()) - skipped

    expected = theirs(tokens, labels=tokens)
    targets = torch.cat([tokens[:, 1:], tokens.new_full((2, 1), -100)], 1)
    logits, loss = ours(tokens, targets, return_logits=True)
    near(logits, expected.logits)
    near(loss, expected.loss)

    expected.loss.backward()
    loss.backward()
    gradients_are_equal(ours, theirs, Transformer.from_hf)

    continued = tokens[:, :5]
    with torch.no_grad():
        for _ in range(8):
            continued = torch.cat([continued, theirs(continued).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(torch.stack(ours.generate(tokens[:, :5], 8)), continued)


def test_every_family_is_tried():
    assert {type(build(name)).__name__ for name in MODELS} == READINGS.keys() - ENCODERS.keys()


def test_dtype_and_mode_are_kept_and_weights_are_copies():
    theirs = build("llama").to(torch.bfloat16).train()
    ours = Transformer.from_hf(theirs, "reference", max_seq_len=16)
    assert {p.dtype for p in ours.parameters()} == {torch.bfloat16}
    assert ours.training
    assert ours.layers[0].attention.rope.cos.shape == (16, 4)
    assert set(ours.backends.values()) == {"reference"}
    error = (ours(draw()).float() - theirs(draw()).logits.float()).abs().max()
    assert error <= 0.05 * theirs(draw()).logits.abs().max()
    before = ours(draw())
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.zero_()
    assert torch.equal(ours(draw()), before)


@pytest.mark.parametrize(("name", "kept"), [("kimi-linear", {"dt_bias", "weight"}), ("deepseek-v3", {"weight"})])
def test_weights_that_stay_float32(name, kept):
    """transformers loads some of a checkpoint's weights as float32, whatever the dtype of the others."""
    theirs = build(name, moe_intermediate_size=16).to(torch.bfloat16)
    for key, parameter in theirs.named_parameters():
        if any(part in key for part in theirs._keep_in_fp32_modules_strict):
            parameter.data = parameter.data.float() * 1.003
    ours = Transformer.from_hf(theirs)
    wide = [key for key, parameter in ours.named_parameters() if parameter.dtype == torch.float32]
    assert {key.rpartition("router.")[2].rpartition("attention.")[2] for key in wide} == kept
    assert ours(draw()).dtype == torch.bfloat16
    assert all(len(row) == 8 for row in ours.generate(draw()[:, :5], 3))
    exact = Transformer.from_hf(theirs.float()).state_dict()
    assert all(torch.equal(weight, exact[key]) for key, weight in ours.float().state_dict().items())
    theirs.to(torch.bfloat16)
    theirs.lm_head.float()
    with pytest.raises(ValueError, match="weights of one dtype on one device"):
        Transformer.from_hf(theirs)


def test_learned_positions_may_be_fewer_and_dropouts_others():
    theirs = build("gpt2")
    ours = Transformer.from_hf(theirs, max_seq_len=12, attention_dropout=0.0)
    assert ours.pos_embeddings.weight.shape == (12, 32)
    assert (ours.config.attention_dropout, ours.config.residual_dropout) == (0.0, 0.1)
    near(ours(draw()), theirs(draw()).logits)
    with pytest.raises(ValueError, match="max_seq_len is beyond the 32 rows of the table of positions; got 33"):
        Transformer.from_hf(theirs, max_seq_len=33)


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "gpt2",
            {"scale_attn_by_inverse_layer_idx": True},
            "scale_attn_by_inverse_layer_idx must be False: .* got True",
        ),
        ("gpt2", {"activation_function": "tanh"}, "activation_function must be one of gelu, .*; got 'tanh'"),
        (
            "bloom",
            {"apply_residual_connection_post_layernorm": True},
            "apply_residual_connection_post_layernorm must be",
        ),
        ("olmoe", {"clip_qkv": 1.0}, "clip_qkv must be None: Transformer does not have this option; got 1.0"),
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention must be None: .* got True"),
        ("dots1", {"topk_group": 1}, "router_top_groups must hold top_k=3 experts; 1 hold 2"),
        ("falcon 7b", {"hidden_dropout": 0.1}, "hidden_dropout must be 0.0: Transformer does not have this option"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "llama3, .*'dynamic'",
        ),
        ("llama", {"rope_parameters": {**LLAMA_3, "power": 2.0}}, "rope_parameters must not hold power"),
        (
            "qwen2",
            {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 4},
            "layer_types must be one for all layers, .*; got full_attention, sliding_attention",
        ),
        ("phi", {"qk_layernorm": True}, "qk_layernorm must be False"),
        ("opt", {"word_embed_proj_dim": 16}, "word_embed_proj_dim must be 32: .* got 16"),
        ("bamba", {"z_loss_coefficient": 0.1}, "z_loss_coefficient must be 0.0: .* got 0.1"),
        ("nemotron 3", {"moe_latent_size": 8}, "moe_latent_size must be None: .* got 8"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise must be 0.0: .* got 0.1"),
        ("kimi-linear", {"num_key_value_heads": 2}, "num_key_value_heads must be 4: .* got 2"),
        ("qwen3-moe", {"mlp_only_layers": [0, 1]}, "dense_layers must leave a layer for the experts; got all 2"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_options_that_we_do_not_have_are_refused(name, changes, message):
    with pytest.raises(ValueError, match=message):
        Transformer.from_hf(build(name, **changes))


def test_foreign_checkpoints_are_refused_by_key_and_shape():
    with pytest.raises(TypeError, match=r"model must be one of GPT2LMHeadModel, .* of transformers; got Linear"):
        Transformer.from_hf(nn.Linear(2, 2))

    model = build("llama")
    model.model.layers[1].self_attn.q_proj.bias = nn.Parameter(torch.zeros(32))
    with pytest.raises(ValueError, match=r"does not ask for: layers\.1\.attention\.wq\.bias"):
        Transformer.from_hf(model)
    model = build("llama")
    model.model.layers[0].self_attn.gate = nn.Parameter(torch.zeros(32))
    with pytest.raises(ValueError, match=r"no place for here: model\.layers\.0\.self_attn\.gate"):
        Transformer.from_hf(model)
    model = build("llama")
    del model.model.layers[0].mlp.up_proj
    with pytest.raises(ValueError, match=r"LlamaForCausalLM lacks the weights of layers\.0\.feed_forward\.w3\.weight"):
        Transformer.from_hf(model)
    model = build("llama")
    model.model.norm.weight = nn.Parameter(torch.zeros(16))
    with pytest.raises(ValueError, match=r"norm\.weight must have shape \(32,\), by its configuration; got \(16,\)"):
        Transformer.from_hf(model)
    model = build("bloom")
    model.transformer.h[0].self_attention.query_key_value = nn.Linear(48, 96)
    with pytest.raises(ValueError, match=r"6 query and 2 x 6 key and value heads of 8, 144 rows; got 96"):
        Transformer.from_hf(model)
    model = build("llama")
    model.model.norm.to(torch.bfloat16)
    with pytest.raises(
        ValueError, match=r"weights of one dtype on one device; got torch\.bfloat16 on cpu, torch\.float32"
    ):
        Transformer.from_hf(model)


def test_options_that_are_new_are_refused():
    """What the class of a configuration has, and nothing here reads, must be as it is by default."""
    kind = transformers.LlamaConfig

    class Newer(kind):
        def __init__(self, made_up=1.0, **options):
            super().__init__(**options)
            self.made_up = made_up

    for given, refused in (({}, False), ({"made_up": 1.0}, False), ({"made_up": 2.0}, True)):
        model = transformers.LlamaForCausalLM(Newer(**MODELS["llama"][1], **given))
        if refused:
            with pytest.raises(
                ValueError, match=r"made_up must be 1\.0: Transformer does not know this option; got 2\.0"
            ):
                Transformer.from_hf(model)
        else:
            Transformer.from_hf(model)
    model = build("llama")
    model.config.quantization_config = {"bits": 4}
    with pytest.raises(ValueError, match="quantization_config must be None"):
        Transformer.from_hf(model)
    model = build("qwen2")
    model.config.layer_types = ["chunked_attention"] * 2
    with pytest.raises(ValueError, match=r"layer_types must be one for all layers, .*; got chunked_attention"):
        Transformer.from_hf(model)


def test_a_class_of_the_same_name_elsewhere_is_refused():
    own = type("LlamaForCausalLM", (transformers.LlamaForCausalLM,), {"__module__": "somewhere.else"})
    with pytest.raises(TypeError, match=r"of transformers; got LlamaForCausalLM of somewhere\.else"):
        Transformer.from_hf(own(transformers.LlamaConfig(**MODELS["llama"][1])))


@pytest.mark.parametrize("name", MODELS)
def test_every_option_is_declared(name):
    """Read, or said to be silent: a new one of another version of transformers fails here."""
    config = configure(name)
    reading = READINGS[transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__]
    asked = Asked(config)
    reading.fields(asked)
    read = {config.attribute_map.get(option, option) for option in asked.names}
    of_others = {"is_decoder", "is_encoder_decoder", "add_cross_attention", "cross_attention_hidden_size"}
    undeclared = type(config)().to_dict().keys() - read - SILENT - reading.silent - of_others
    assert not undeclared
