"""Checks of a configuration: contradictions between its fields, and fields that a part of this package does not
support."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from foundry_kernels.core.checks import check_int
from foundry_kernels.core.choices import MIXERS, why_no_buckets, why_no_groups
from foundry_kernels.models.fields import FULL, HYBRID, LINEAR, MLP, ModelFields
from foundry_kernels.ops.gated_delta_rule.checks import MAX_HEAD_DIM, MAX_VALUE_DIM
from foundry_kernels.ops.short_conv1d import MAX_TAPS

#: Fields that only apply with `n_experts`.
EXPERT_FIELDS = (
    "top_k", "router_scoring", "router_renormalize", "router_scale", "router_bias", "selection_bias",
    "weight_expert_inputs", "shared_expert_dim", "shared_expert_gate", "load_balancing_coef", "router_z_coef",
    "dense_layers", "dense_hidden_dim", "router_groups", "router_top_groups",
)  # fmt: skip


def layer_kinds(kinds: object, n_layers: int) -> tuple[str, ...] | None:
    """`kinds` as a tuple, or None if all are full attention."""
    if kinds is None:
        return None
    if not isinstance(kinds, Sequence) or isinstance(kinds, str) or not all(isinstance(kind, str) for kind in kinds):
        raise TypeError(f"layer_types must be a tuple of strings; got {kinds!r:.60}")
    if unknown := [kind for kind in kinds if kind not in (FULL, LINEAR, MLP, HYBRID)]:
        raise ValueError(f"layer_types must be of {FULL!r}, {LINEAR!r}, {HYBRID!r} and {MLP!r}; got {unknown[0]!r}")
    if len(kinds) != n_layers:
        raise ValueError(f"layer_types must have one for each of n_layers={n_layers}; got {len(kinds)}")
    return None if set(kinds) == {FULL} else tuple(kinds)


def refuse_choices(
    config: ModelFields, known: Mapping[str, tuple[Any, ...] | None], what: str, why: Mapping[str, str]
) -> None:
    """Raises an error if a field has neither its default nor one of the values in `known` (None: any value).

    Raises:
        ValueError: the message has ``field=value``, `what`, and the reason in `why` for the field or for
            ``field=value``.
    """
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value == field.default or (field.name in known and value in (known[field.name] or (value,))):
            continue
        reason = why.get(f"{field.name}={value}", why.get(field.name, "this choice is not supported"))
        raise ValueError(f"{field.name}={value!r} {what}: {reason}")


def contradictions(config: ModelFields) -> Iterator[str]:
    """Yields the contradictions between the fields of a configuration."""
    if config.positions == "rope":
        if config.rope_dim is None and config.head_width % 2:
            yield f"head_dim must be even, for the rotary pairs; got {config.head_width}"
        if config.rotary_width % 2 or config.rotary_width > config.head_width:
            yield f"rope_dim must be even and at most head_dim={config.head_width}; got {config.rope_dim}"
    else:
        own = () if config.kv_lora_rank is not None else ("rope_dim",)
        yield from _without("positions='rope'", config, *own, "rope_base", "rope_scaling", "rope_interleaved")
    if config.positions != "alibi":
        yield from _without("positions='alibi'", config, "alibi_scaled")
    if not config.relative:
        yield from _without("positions='relative'", config, "relative_buckets", "relative_max_distance")
    elif reason := why_no_buckets(config.relative_buckets, config.relative_max_distance, config.causal):
        yield f"relative_{reason}"
    if config.norm == "rms_norm" and config.norm_bias:
        yield "norm_bias needs norm='layer_norm': an RMSNorm has no bias; got True"
    if config.norm == "layer_norm" and config.norm_round_before_weight:
        yield "norm_round_before_weight needs norm='rms_norm'; got True with norm='layer_norm'"
    if config.norm_placement == "post" and config.parallel_residual:
        yield (
            "parallel_residual needs norm_placement='pre': attention and feed-forward read one stream, and a norm of "
            "each sum would come between them"
        )
    if config.shared_attention_norm and not config.parallel_residual:
        yield "shared_attention_norm needs parallel_residual=True: in sequence the branches read different streams"
    if config.tie_embeddings and config.output_bias:
        yield "output_bias needs tie_embeddings=False: a tied head is the embedding's matrix alone"
    if config.norm == "layer_norm" and config.norm_weight_offset:
        yield f"norm_weight_offset needs norm='rms_norm'; got {config.norm_weight_offset} with norm='layer_norm'"
    if config.qk_norm_over != "head" and not config.qk_norm:
        yield f"qk_norm_over needs qk_norm=True; got {config.qk_norm_over!r}"
    if config.context_dim is not None and config.parallel_residual:
        yield "context_dim needs parallel_residual=False: the context is attended to between the two branches"
    if not config.head:
        yield from _without("head=True", config, "tie_embeddings", "output_bias", "logit_scale")
    if config.qk_norm_weight_offset and not config.qk_norm:
        yield f"qk_norm_weight_offset needs qk_norm=True; got {config.qk_norm_weight_offset}"
    if config.gate_alpha != 1.0 and (config.activation != "swiglu" or config.n_experts is not None):
        yield "gate_alpha needs activation='swiglu' and no experts"
    if config.linear_norm_before_gate and not config.linear_rmsnorm:
        yield "linear_norm_before_gate needs linear_rmsnorm=True: there is no norm; got True"
    if config.one_branch and HYBRID in (config.layer_types or ()):
        yield f"layer_types with {HYBRID!r} needs one_branch=False: the layer has two branches"
    if config.one_branch:
        yield from _needs_plain_blocks("one_branch", config)
    elif MLP in (config.layer_types or ()):
        yield f"layer_types with {MLP!r} needs one_branch=True: other layers have a feed-forward block anyway"
    yield from _contradictions_of_latent_attention(config)
    yield from _contradictions_of_linear_attention(config)
    yield from _contradictions_of_experts(config)


def _contradictions_of_latent_attention(config: ModelFields) -> Iterator[str]:
    if config.kv_lora_rank is None:
        for name in ("q_lora_rank", "v_head_dim"):
            if getattr(config, name) is not None:
                yield f"{name} needs kv_lora_rank: there is no latent attention; got {getattr(config, name)}"
        return
    if config.rope_dim is None or config.rope_dim >= config.head_width:
        yield f"rope_dim must be below head_dim={config.head_width} with kv_lora_rank; got {config.rope_dim}"
    needs = {"n_kv_heads": (None, config.n_heads), "qk_norm": (False,), "attention_gate": (False,)}
    for name, values in {**needs, "context_dim": (None,)}.items():
        if (value := getattr(config, name)) not in values:
            yield f"{name} must be {values[-1]!r} with kv_lora_rank; got {value!r}"


def _contradictions_of_linear_attention(config: ModelFields) -> Iterator[str]:
    given = {
        field.name: value
        for field in dataclasses.fields(config)
        if field.name.startswith("linear_") and (value := getattr(config, field.name)) != field.default
    }
    if not config.linear_layers:
        for name, value in given.items():
            yield f"{name} needs a layer of linear attention in layer_types; got {value}"
        return
    for kind, options in MIXERS.items():
        for name in () if kind == config.linear_kind else options.keys() & given.keys():
            yield f"{name} needs linear_kind={kind!r}; got {given[name]} with linear_kind={config.linear_kind!r}"
    yield from _needs_plain_blocks("layer_types with linear attention", config, causal=True)
    heads = config.linear_heads
    if heads.v_heads % heads.k_heads:
        yield f"linear_v_heads must be a multiple of linear_k_heads={heads.k_heads}; got {heads.v_heads}"
    if heads.v_heads % (config.linear_norm_groups or 1):
        yield f"linear_norm_groups must be a divisor of {heads.v_heads} heads; got {config.linear_norm_groups}"
    for name, width, most in (
        ("linear_k_dim", heads.k_dim, MAX_HEAD_DIM),
        ("linear_v_dim", heads.v_dim, MAX_VALUE_DIM),
        ("linear_conv_size", config.linear_conv_size, MAX_TAPS),
    ):
        if width > most:
            yield f"{name} must be at most {most}; got {width}"


def _needs_plain_blocks(what: str, config: ModelFields, **others: Any) -> Iterator[str]:
    needs = {**others, "norm_placement": "pre", "parallel_residual": False, "context_dim": None}
    for name, value in needs.items():
        if getattr(config, name) != value:
            yield f"{what} needs {name}={value!r}; got {getattr(config, name)!r}"


def _contradictions_of_experts(config: ModelFields) -> Iterator[str]:
    if config.n_experts is None:
        for name in EXPERT_FIELDS:
            value = getattr(config, name)
            if value != config.__dataclass_fields__[name].default:
                yield f"{name} needs n_experts: otherwise there is no router and no expert; got {value}"
        return
    if config.top_k > config.n_experts:
        yield f"top_k must be at most n_experts={config.n_experts}; got {config.top_k}"
    if config.top_k == 1 and config.n_experts > 1 and config.router_renormalize:
        yield (
            "router_renormalize must be False with top_k=1: a weight divided by itself is 1, and the router "
            "would learn nothing"
        )
    if config.shared_expert_gate and config.shared_expert_dim is None:
        yield "shared_expert_gate needs shared_expert_dim: there is no shared expert; got True"
    if config.dense_hidden_dim is not None and not config.dense_layers:
        yield f"dense_hidden_dim needs dense_layers: every layer has experts; got {config.dense_hidden_dim}"
    if apart := sorted(set(config.dense_layers) - set(config.mlp_layers)):
        yield f"dense_layers must be layers with a feed-forward block; got {apart[0]}"
    if not set(config.mlp_layers) - set(config.dense_layers):
        yield f"dense_layers must leave a layer for the experts; got all {len(config.dense_layers)}"
    if reason := why_no_groups(config.n_experts, config.top_k, config.router_groups, config.router_top_groups):
        yield reason.replace("n_groups", "router_groups").replace("top_groups", "router_top_groups")


def _without(needed: str, config: ModelFields, *names: str) -> Iterator[str]:
    """Yields the fields that only apply with another choice and do not have their defaults."""
    choice = needed.partition("=")[0]
    for name in names:
        value = getattr(config, name)
        if value != config.__dataclass_fields__[name].default:
            yield f"{name} needs {needed}; got {value} with {choice}={getattr(config, choice)!r}"


def refuse_linear(config: ModelFields, what: str) -> None:
    """Raises ValueError for a model with linear attention, which `what` does not support."""
    if config.linear_layers:
        raise ValueError(f"{what} does not support linear attention; got a model with layer_types={config.layer_types}")


def check_linear_layers(config: ModelFields, of_cache: tuple[int, ...]) -> None:
    """Raises ValueError if a cache with linear attention in the layers `of_cache` is not one for the model."""
    if of_cache != config.linear_layers:
        raise ValueError(
            f"cache must be made for the model, whose linear attention is in the layers {config.linear_layers}; got "
            f"one for {of_cache}"
        )


def check_cache(config: ModelFields, batch_size: int, max_len: int) -> None:
    """Raises TypeError or ValueError if the model does not support a cache of that size."""
    if not config.causal:
        raise ValueError("a cache needs causal=True: every position of an encoder sees the last one")
    check_int("batch_size", batch_size, 1)
    check_int("max_len", max_len, 1)
    if config.positions == "learned" and max_len > config.max_seq_len:
        learned = f"max_seq_len={config.max_seq_len}, the length of the table of learned positions"
        raise ValueError(f"max_len must be at most {learned}; got {max_len}")


def check_served(config: ModelFields) -> None:
    """Raises ValueError if a :class:`Generator` does not support the model."""
    if not (config.causal and config.head):
        raise ValueError("Generator needs a model with causal=True and head=True")
    if config.context_dim is not None:
        raise ValueError(f"Generator needs a model without a context; got context_dim={config.context_dim}")
    if config.relative:
        raise ValueError("Generator needs a model without relative positions: PagedKVCache does not support them")


def follows_length(config: ModelFields) -> bool:
    """Whether rotations beyond max_seq_len depend on the length of the sequence."""
    return config.rope_scaling is not None and config.rope_scaling.rope_type == "dynamic"
