"""A choice of a model that a path does not know is refused: in decoding, sharding and QK-clip."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from foundry_kernels import RopeScaling
from foundry_kernels.diagnostics import QKClip
from foundry_kernels.models import ModelConfig, Transformer
from foundry_kernels.models.config import CHOICES
from foundry_kernels.models.validate import EXPERT_FIELDS
from foundry_kernels.nn._layers import is_plain

EXPERTS: dict[str, Any] = {"n_experts": 4}
LINEAR: dict[str, Any] = {"layer_types": ("linear_attention", "full_attention")}
LATENT: dict[str, Any] = {"kv_lora_rank": 6, "rope_dim": 2}
MAMBA = {**LINEAR, "linear_kind": "mamba2"}
#: For each field of ModelConfig another value than that of `SMALL`, with what it needs.
SMALL: dict[str, Any] = {"dim": 16, "n_layers": 2, "n_heads": 4, "vocab_size": 16, "max_seq_len": 16}
OTHER: dict[str, dict[str, Any]] = {
    "dim": {"dim": 32},
    "n_layers": {"n_layers": 1},
    "n_heads": {"n_heads": 2},
    "n_kv_heads": {"n_kv_heads": 2},
    "vocab_size": {"vocab_size": 24},
    "max_seq_len": {"max_seq_len": 24},
    "multiple_of": {"multiple_of": 32},
    "ffn_dim_multiplier": {"ffn_dim_multiplier": 1.5},
    "hidden_dim": {"hidden_dim": 24},
    "head_dim": {"head_dim": 8},
    "norm_eps": {"norm_eps": 0.1},
    "norm_round_before_weight": {"norm_round_before_weight": True},
    "rope_base": {"rope_base": 10.0},
    "rope_scaling": {"rope_scaling": RopeScaling("linear", 2.0)},
    "rope_interleaved": {"rope_interleaved": True},
    "tie_embeddings": {"tie_embeddings": True},
    "init_std": {"init_std": 0.1},
    "positions": {"positions": "alibi"},
    "rope_dim": {"rope_dim": 2},
    "norm": {"norm": "layer_norm"},
    "norm_bias": {"norm": "layer_norm", "norm_bias": False},
    "norm_placement": {"norm_placement": "post"},
    "embedding_norm": {"embedding_norm": True},
    "activation": {"activation": "gelu"},
    "ffn_rule": {"ffn_rule": "4d"},
    "attention_bias": {"attention_bias": True},
    "attention_out_bias": {"attention_out_bias": True},
    "mlp_bias": {"mlp_bias": True},
    "output_bias": {"output_bias": True},
    "parallel_residual": {"parallel_residual": True},
    "shared_attention_norm": {"parallel_residual": True, "shared_attention_norm": True},
    "sliding_window": {"sliding_window": 3},
    "qk_norm": {"qk_norm": True},
    "embedding_dropout": {"embedding_dropout": 0.1},
    "residual_dropout": {"residual_dropout": 0.1},
    "attention_dropout": {"attention_dropout": 0.1},
    "activation_dropout": {"activation_dropout": 0.1},
    "output_dropout": {"output_dropout": 0.1},
    "causal": {"causal": False},
    "context_dim": {"context_dim": 8},
    "head": {"head": False},
    "logit_scale": {"logit_scale": 2.0},
    "attention_scale": {"attention_scale": 1.0},
    "alibi_scaled": {"positions": "alibi", "alibi_scaled": True},
    "relative_buckets": {"positions": "relative", "relative_buckets": 4},
    "relative_max_distance": {"positions": "relative", "relative_buckets": 4, "relative_max_distance": 4},
    "norm_weight_offset": {"norm_weight_offset": 1.0},
    "final_norm": {"final_norm": False},
    "embedding_scale": {"embedding_scale": 4.0},
    "token_types": {"token_types": 2},
    "qk_norm_over": {"qk_norm": True, "qk_norm_over": "projection"},
    "n_experts": EXPERTS,
    "dense_layers": {**EXPERTS, "dense_layers": (0,)},
    "dense_hidden_dim": {**EXPERTS, "dense_layers": (0,), "dense_hidden_dim": 8},
    "router_groups": {**EXPERTS, "router_groups": 2, "router_top_groups": 1},
    "router_top_groups": {**EXPERTS, "router_groups": 2, "router_top_groups": 1},
    "top_k": {**EXPERTS, "top_k": 3},
    "router_scoring": {**EXPERTS, "router_scoring": "sigmoid"},
    "router_renormalize": {**EXPERTS, "router_renormalize": False},
    "router_scale": {**EXPERTS, "router_scale": 2.0},
    "router_bias": {**EXPERTS, "router_bias": True},
    "selection_bias": {**EXPERTS, "selection_bias": True},
    "weight_expert_inputs": {**EXPERTS, "weight_expert_inputs": True},
    "shared_expert_dim": {**EXPERTS, "shared_expert_dim": 8},
    "shared_expert_gate": {**EXPERTS, "shared_expert_dim": 8, "shared_expert_gate": True},
    "load_balancing_coef": {**EXPERTS, "load_balancing_coef": 0.1},
    "router_z_coef": {**EXPERTS, "router_z_coef": 0.1},
    "init": {"init": "xavier"},
    "qk_norm_weight_offset": {"qk_norm": True, "qk_norm_weight_offset": 1.0},
    "attention_gate": {"attention_gate": True},
    "kv_lora_rank": LATENT,
    "q_lora_rank": {**LATENT, "q_lora_rank": 8},
    "v_head_dim": {**LATENT, "v_head_dim": 3},
    "layer_types": LINEAR,
    "one_branch": {"one_branch": True},
    "residual_scale": {"residual_scale": 0.5},
    "linear_v_heads": {**LINEAR, "linear_v_heads": 2},
    "linear_k_heads": {**LINEAR, "linear_k_heads": 2},
    "linear_k_dim": {**LINEAR, "linear_k_dim": 8},
    "linear_v_dim": {**LINEAR, "linear_v_dim": 8},
    "linear_conv_size": {**LINEAR, "linear_conv_size": 2},
    "linear_kind": MAMBA,
    "linear_bias": {**MAMBA, "linear_bias": True},
    "linear_conv_bias": {**MAMBA, "linear_conv_bias": False},
    "linear_dt_limit": {**MAMBA, "linear_dt_limit": (0.5, 0.6)},
    "linear_norm_groups": {**MAMBA, "linear_norm_groups": 2},
    "linear_rmsnorm": {**MAMBA, "linear_rmsnorm": False},
    "linear_norm_before_gate": {**MAMBA, "linear_norm_before_gate": True},
    "linear_in_scales": {**MAMBA, "linear_in_scales": (2.0, 1.0, 1.0, 1.0, 0.5)},
    "branch_scales": {"branch_scales": (0.5, 1.0, 2.0)},
    "gate_alpha": {"gate_alpha": 2.0},
}
FIELDS = [field.name for field in dataclasses.fields(ModelConfig)]
#: Fields that matter in training alone, or whose effect float32 does not show.
UNSEEN = {"multiple_of", "norm_round_before_weight", "embedding_dropout", "residual_dropout", "attention_dropout"}
UNSEEN |= {
    "init",
    "init_std",
    "max_seq_len",
    "load_balancing_coef",
    "router_z_coef",
    "activation_dropout",
    "output_dropout",
}
UNSEEN |= {"norm_weight_offset", "qk_norm_weight_offset"}  # weights begin as much lower
#: What is not decoded token by token, and what is said then.
NOT_DECODED = {"causal": "a cache needs causal=True", "context_dim": "context must be given"}
#: Fields that need each other.
PAIRED = {"router_groups", "router_top_groups"}

LATENT_FIELDS = {name for name, fields in OTHER.items() if "kv_lora_rank" in fields}
LINEAR_FIELDS = {name for name, fields in OTHER.items() if "layer_types" in fields}
#: The choices in `OTHER` that tensor parallelism and QK-clip refuse.
NOT_SHARDED = {"tie_embeddings", "positions", "embedding_dropout", "residual_dropout", "attention_dropout"}
NOT_SHARDED |= {"n_experts", *EXPERT_FIELDS}
ENCODERS = {"context_dim", "head", "relative_buckets", "relative_max_distance", "token_types"}
NOT_SHARDED |= {*ENCODERS, "activation_dropout", "output_dropout", "causal", "logit_scale", "attention_scale"}
NOT_SHARDED |= {"alibi_scaled", "norm_weight_offset", "final_norm", "embedding_scale", "qk_norm_over"}
NOT_SHARDED |= {
    *LINEAR_FIELDS,
    *LATENT_FIELDS,
    "one_branch",
    "residual_scale",
    "branch_scales",
    "gate_alpha",
    "qk_norm_weight_offset",
    "attention_gate",
}
NOT_CLIPPED = {
    *LINEAR_FIELDS,
    *LATENT_FIELDS,
    "one_branch",
    "qk_norm_weight_offset",
    "attention_gate",
    *ENCODERS,
    "qk_norm",
    "qk_norm_over",
    "alibi_scaled",
}


@dataclass(frozen=True)
class MadeUp(ModelConfig):
    """A choice more than models have."""

    made_up: bool = False


class Mesh:
    """What the plan looks at before it refuses."""

    ndim = 1

    def size(self) -> int:
        return 2


def model_of(fields: dict[str, Any]) -> Transformer:
    """Makes a model with weights that hide nothing: no bias is 0, no norm 1."""
    torch.manual_seed(0)
    model = Transformer(ModelConfig(**{**SMALL, **fields}))
    with torch.no_grad():
        for tensor in (*model.parameters(), *(b for n, b in model.named_buffers() if n.endswith("selection_bias"))):
            tensor.add_(0.3 * torch.randn(tensor.shape))
    return model.eval()


def test_every_field_has_another_value() -> None:
    assert list(OTHER) == FIELDS
    for name, fields in OTHER.items():
        assert getattr(ModelConfig(**{**SMALL, **fields}), name) != getattr(ModelConfig(**SMALL), name)


@torch.no_grad()
@pytest.mark.parametrize("name", FIELDS)
def test_decoding_knows_every_choice(name: str) -> None:
    """Token by token, on paths of their own, as all tokens at once."""
    model = model_of(OTHER[name])
    tokens = torch.randint(16, (2, 9), generator=torch.Generator().manual_seed(1))
    if name in NOT_DECODED:
        with pytest.raises(ValueError, match=NOT_DECODED[name]):
            model(tokens[:, :1], cache=model.make_cache(2))
        return
    whole, cache = model(tokens), model.make_cache(2)
    steps = torch.cat([model(token, cache=cache) for token in tokens.split(1, 1)], 1)
    torch.testing.assert_close(steps, whole, rtol=1e-4, atol=1e-4)
    if name not in UNSEEN:
        changes = {k: v for k, v in OTHER[name].items() if k != name and not {k, name} <= PAIRED}
        without = model_of(changes)(tokens)
        assert without.shape != whole.shape or (without - whole).abs().max() > 1e-3, "a choice that shows nowhere"


def refused(check: Callable[[Transformer], Any], model: Transformer) -> bool:
    try:
        check(model)
    except ValueError as error:
        return " is not sharded by this plan" in str(error) or " is not supported by QKClip" in str(error)
    return False


def divide(model: Transformer) -> Any:
    from foundry_kernels.distributed import tensor_parallel_plan

    return tensor_parallel_plan(model, Mesh())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("check", "unserved", "values"),
    [(divide, NOT_SHARDED, {"alibi", "sinusoidal", "relative"}), (QKClip, NOT_CLIPPED, {"relative"})],
    ids=["tensor parallelism", "QK-clip"],
)
def test_a_choice_that_is_not_declared_is_refused(
    check: Callable[[Transformer], Any], unserved: set[str], values: set[str]
) -> None:
    """A field's value, each value of a choice, a value and a field that are new."""
    assert {name for name, fields in OTHER.items() if refused(check, model_of(fields))} == unserved
    for field, known in CHOICES.items():
        if field not in (*EXPERT_FIELDS, *LINEAR_FIELDS, "qk_norm_over"):  # which need others
            found = {value for value in known if refused(check, model_of({field: value}))}
            assert found == (values if field == "positions" else set()), field
    model = model_of({})
    model.config = dataclasses.replace(model.config)
    object.__setattr__(model.config, "positions", "made up")
    assert refused(check, model)
    model.config = MadeUp(**SMALL)
    assert not refused(check, model)
    model.config = MadeUp(**SMALL, made_up=True)
    assert refused(check, model)


def test_a_parameter_that_is_not_declared_is_not_sharded() -> None:
    model = model_of({})
    model.layers[1].attention.scale = torch.nn.Parameter(torch.ones(4))
    with pytest.raises(ValueError, match=r"layers\.1\.attention\.scale is not sharded by this plan"):
        divide(model)


def test_a_model_has_no_fields_but_its_own() -> None:
    with pytest.raises(TypeError, match="config must have the fields of ModelConfig; got made_up too"):
        Transformer(MadeUp(**SMALL))


def test_hooks_of_a_layer_are_all_known() -> None:
    """A layer whose hooks nobody looks at would not be called in decoding."""
    from foundry_kernels.integrations.adapters.base import names_of

    plain = vars(torch.nn.Linear(4, 4, bias=False))
    own = {name for name in names_of(torch.nn.Module._call_impl.__code__) if isinstance(plain.get(name), dict)}
    # Which of the hooks are called differently.
    own -= {"_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs"}
    assert own >= {"_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"}
    for name in own:
        layer = torch.nn.Linear(4, 4, bias=False)
        assert is_plain(layer)
        getattr(layer, name)[0] = print
        assert not is_plain(layer), name
