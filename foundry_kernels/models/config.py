"""The configuration of a model: its shape and architecture (GPT-2, LLaMA, BLOOM, Falcon, ...)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from foundry_kernels.core.checks import check_int, check_not_negative, check_number, check_positive
from foundry_kernels.core.choices import ACTIVATIONS, GATES, INITS, MIXERS, SCORINGS, check_scales
from foundry_kernels.models import count, presets
from foundry_kernels.models.fields import ModelFields
from foundry_kernels.models.validate import contradictions, layer_kinds
from foundry_kernels.ops.ssd.checks import check_limits

#: Valid choices, by the name of the field.
CHOICES: dict[str, tuple[str | None, ...]] = {
    "positions": ("rope", "alibi", "learned", "sinusoidal", "relative", "none"),
    "norm": ("rms_norm", "layer_norm"),
    "norm_placement": ("pre", "post"),
    "activation": (*GATES, *ACTIVATIONS),
    "ffn_rule": (None, "4d", "two_thirds_of_4d"),
    "router_scoring": SCORINGS,
    "qk_norm_over": ("head", "projection"),
    "init": INITS,
    "linear_kind": tuple(MIXERS),
}


@dataclass(frozen=True)
class ModelConfig(ModelFields):
    """The shape of a :class:`Transformer`, with the names in Meta's `params.json`. The defaults are LLaMA's
    architecture.

    Attributes:
        dim: width of the residual stream.
        n_layers: blocks.
        n_heads: query heads.
        n_kv_heads: key-value heads, a divisor of `n_heads`; None is `n_heads`, 1 is multi-query attention.
        vocab_size: tokens are 0 .. vocab_size - 1.
        max_seq_len: number of positions: the size of a learned table, which is fixed, and the initial size of a rotary
            or sinusoidal table, which grows.
        multiple_of: with "two_thirds_of_4d", the feed-forward width is rounded up to a multiple of this.
        ffn_dim_multiplier: factor on the feed-forward width before it is rounded up.
        hidden_dim: the feed-forward width itself, which overrides the two above and `ffn_rule`.
        head_dim: width of a head; None is ``dim // n_heads``.
        norm_eps: epsilon of every norm; None is the norm's own default: for "rms_norm" the machine epsilon of the
            arithmetic, for "layer_norm" 1e-5. The presets below set it.
        norm_round_before_weight: round ``x / rms`` before the weight multiplies it, as Meta's code does. It matters
            only in low precision; False is more accurate.
        rope_base: base of the rotary wavelengths (`rope_theta` in Meta's files).
        rope_scaling: None, or a :class:`foundry_kernels.RopeScaling`.
        rope_interleaved: False pairs the dimensions (i, i + D/2), as transformers does; True (2i, 2i+1), as Meta's
            checkpoints need (:meth:`llama` and :meth:`mixtral` set it).
        tie_embeddings: the output projection is the embedding's matrix.
        init: standard deviation of the normal distribution that initializes projections: "normal" is `init_std`;
            "xavier" is ``sqrt(2 / (fan_in + fan_out))``; "depth_scaled" is `init_std`, divided by ``sqrt(2 n_layers)``
            for projections that write to the residual stream (GPT-2); see
            :func:`foundry_kernels.models.init.init_weights`.
        init_std: standard deviation of the initial weights; embeddings always use it.
        positions: "rope" rotates queries and keys; "alibi" subtracts the distance times a slope per head from a score
            (:func:`foundry_kernels.nn.alibi_slopes`); "learned" and "sinusoidal" add a vector to the embedding;
            "relative" adds a learned number per head and distance to a score (T5,
            :class:`foundry_kernels.nn.RelativeBias`); "none".
        alibi_scaled: multiply ALiBi's slopes by the scale of the scores, after rounding them to bfloat16 (Falcon).
        relative_buckets, relative_max_distance: for "relative" positions: the number of buckets, and the distance from
            which the last bucket is used.
        rope_dim: rotated dimensions of a head, even; None is all of them. With `kv_lora_rank` those of which all heads
            share the key, and which "rope" rotates.
        norm: "rms_norm" or "layer_norm".
        norm_bias: whether norms have a bias; None is the default, True for "layer_norm" and False for "rms_norm".
        norm_weight_offset: added to the weights of RMSNorms, which start at ``1 - norm_weight_offset`` (Gemma: 1.0).
        norm_placement: "pre" (a norm before each branch) or "post" (a norm of each sum, as in GPT-1).
        final_norm: a norm after the last block; None is the default, True for "pre" and False for "post".
        embedding_norm: a norm of the embeddings after positions are added (BLOOM).
        embedding_scale: factor on the embeddings, rounded to their dtype, before positions are added.
        token_types: size of the table of token type embeddings (BERT's segments); 0 means no such table.
        activation: gated "swiglu", "geglu", "geglu_tanh", "glu" (the logistic function) or "reglu", or "gelu",
            "gelu_tanh" (GPT-2), "silu", "relu" or "relu2" (its square) without a gate.
        ffn_rule: the feed-forward width: "4d", or "two_thirds_of_4d" rounded up to `multiple_of`, which gives a gated
            block the same number of parameters. None is two thirds with a gate, else 4d.
        attention_bias: biases of the projections to queries, keys and values.
        attention_out_bias: bias of the output projection of attention; None is `attention_bias`.
        mlp_bias: biases of the feed-forward projections.
        output_bias: bias of the output projection.
        parallel_residual: attention and feed-forward read the same stream, and both are added to it (GPT-NeoX).
        shared_attention_norm: with `parallel_residual`, one norm for both (Falcon-7B).
        sliding_window: number of positions that a query sees, including its own; None or -1 is no limit.
        causal: whether a position sees no later ones. False makes an encoder, without a cache or generation.
        context_dim: width of a context (another sequence), to which each block attends between self-attention and the
            feed-forward part (the decoder of an :class:`EncoderDecoder`); None is no context.
        head: whether there is an output projection. Without, a model returns the last hidden states.
        logit_scale: factor on the logits (T5: ``dim ** -0.5``).
        attention_scale: factor on the scores; None is ``head_dim ** -0.5``.
        qk_norm: an RMSNorm of queries and keys, before the rotation (Qwen3).
        qk_norm_over: "head" for each head separately, or "projection" for all heads together (OLMoE).
        qk_norm_weight_offset: added to the weights of these norms, as `norm_weight_offset`.
        attention_gate: multiply the heads' results by ``sigmoid(wg x)`` (Qwen3-Next).
        kv_lora_rank: width of the latent vector from which keys and values of all heads are made
            (:class:`foundry_kernels.nn.LatentAttention`, DeepSeek-V3); None is attention without one. It needs
            `rope_dim`; `head_dim` is the whole width of a query.
        q_lora_rank: width of the latent vector of queries; None makes them of the stream.
        v_head_dim: with `kv_lora_rank`, the width of a head's value; None is `head_dim`.
        layer_types: for each layer "full_attention", "linear_attention", "hybrid" (the sum of both), or with
            `one_branch` also "mlp"; None is full attention in all. Linear attention has no positions and no dropout.
        one_branch: a layer has one branch after one norm: attention, linear attention, or in an "mlp" layer the
            feed-forward block (Mamba-2, Nemotron-H).
        residual_scale: factor on each branch before it is added to the residual stream (Granite).
        linear_kind: "gated_delta_net" (:class:`foundry_kernels.nn.GatedDeltaNet`), "kimi_delta"
            (:class:`foundry_kernels.nn.KimiDeltaAttention`) or "mamba2" (:class:`foundry_kernels.nn.Mamba2`).
        linear_v_heads, linear_k_heads, linear_k_dim, linear_v_dim, linear_conv_size: its heads of values and of keys,
            their widths, and the taps of its convolution. None is `n_heads`, the heads of values, ``dim // n_heads`` or
            `head_dim`, and the width of keys. For "mamba2" they are the heads, the groups, the width of the state, the
            width of a head and the taps.
        linear_bias, linear_conv_bias, linear_dt_limit, linear_norm_groups: for "mamba2", the biases of the projections,
            a bias of the convolution, the least and the largest step size (None is no limit), and the groups of heads
            that are normalized separately (None is the groups of heads).
        linear_rmsnorm, linear_norm_before_gate, linear_in_scales: the options `rmsnorm`, `norm_before_gate` and
            `in_scales` of "mamba2".
        branch_scales: factors on the results of attention, of linear attention, and of the feed-forward block or
            experts (Falcon-H1).
        gate_alpha: "swiglu" multiplies with ``g * sigmoid(gate_alpha * g)``.
        embedding_dropout, residual_dropout: dropout of the embeddings, and of each branch before it is added (fused
            with the norm that adds it).
        attention_dropout: dropout of attention weights, inside the kernels.
        activation_dropout: dropout of the activated product in the feed-forward block or an expert (fused with the
            activation).
        output_dropout: dropout of the output projection's input (T5).
        n_experts: None, or the number of experts that replace the feed-forward block, each with its width
            (:class:`foundry_kernels.nn.MoE`).
        dense_layers: indices of layers with a feed-forward block instead of experts.
        dense_hidden_dim: the width of that block; None is an expert's.
        top_k: experts for each token.
        router_scoring, router_renormalize, router_scale: how a router's logits become weights ("softmax", True, 1.0 in
            Mixtral; "sigmoid" in DeepSeek-V3); see :class:`foundry_kernels.nn.Router`.
        router_bias: whether the router's logits have a bias.
        selection_bias: a bias that only affects the router's choice, which
            :func:`foundry_kernels.nn.update_selection_biases` updates after each step (DeepSeek-V3).
        router_groups, router_top_groups: a token chooses among the experts of its `router_top_groups` best groups out
            of `router_groups` (DeepSeek-V3); None means no groups.
        weight_expert_inputs: multiply experts' inputs by their weights, not their outputs (Llama 4).
        shared_expert_dim: width of an expert that every token goes through; None means no such expert.
        shared_expert_gate: multiply its output by the logistic function of a scalar (Qwen2-MoE).
        load_balancing_coef, router_z_coef: factors of the load-balancing loss and the router's z-loss in the model's
            training loss.

    Raises:
        TypeError, ValueError: a field is invalid or contradicts another one; the message names it.

    Press et al., "Train Short, Test Long" (ALiBi), 2021, arXiv:2108.12409. Xiong et al., "On Layer Normalization in the
    Transformer Architecture" (pre and post), 2020, arXiv:2002.04745. Henry et al., "Query-Key Normalization", 2020,
    arXiv:2010.04245.
    """

    def __post_init__(self) -> None:
        if self.sliding_window == -1:
            object.__setattr__(self, "sliding_window", None)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if str(field.type).startswith("int") and value is not None and field.name != "token_types":
                _check_size(field.name, value)
        check_int("token_types", self.token_types, 0)
        object.__setattr__(self, "dense_layers", _layer_numbers(self.dense_layers, self.n_layers))
        object.__setattr__(self, "layer_types", layer_kinds(self.layer_types, self.n_layers))
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if (
                str(field.type).startswith("float")
                and not isinstance(value, int | float)
                and value is not field.default
            ):
                raise TypeError(f"{field.name} must be a number; got {type(value).__name__}")
        for name, low in (
            ("ffn_dim_multiplier", 0.0),
            ("norm_eps", 0.0),
            ("rope_base", 1.0),
            ("init_std", 0.0),
            ("router_scale", 0.0),
            ("logit_scale", 0.0),
            ("residual_scale", 0.0),
            ("gate_alpha", 0.0),
            ("attention_scale", 0.0),
            ("embedding_scale", 0.0),
        ):
            value = getattr(self, name)
            if value is not None and not low < value < math.inf:
                raise ValueError(f"{name} must be finite and > {low:g}; got {value}")
            if value is not None:
                check_positive(name, value)
        for name, values in CHOICES.items():
            if getattr(self, name) not in values:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, values))}; got {getattr(self, name)!r}")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if str(field.type).startswith("bool") and not isinstance(value, bool) and value is not field.default:
                raise TypeError(f"{field.name} must be a bool; got {type(value).__name__}")
        for name, length in (("linear_in_scales", 5), ("branch_scales", 3)):
            object.__setattr__(self, name, check_scales(name, getattr(self, name), length))
        # JSON has no infinity.
        limits = check_limits("linear_dt_limit", self.linear_dt_limit)
        object.__setattr__(self, "linear_dt_limit", tuple(None if math.isinf(limit) else limit for limit in limits))
        check_number("norm_weight_offset", self.norm_weight_offset)
        check_number("qk_norm_weight_offset", self.qk_norm_weight_offset)
        for name in (
            "embedding_dropout",
            "residual_dropout",
            "attention_dropout",
            "activation_dropout",
            "output_dropout",
        ):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name} must be in [0, 1); got {getattr(self, name)}")
        for name in ("load_balancing_coef", "router_z_coef"):
            check_not_negative(name, getattr(self, name))
        if self.n_heads % self.kv_heads:
            raise ValueError(f"n_heads must be a multiple of n_kv_heads={self.kv_heads}; got {self.n_heads}")
        if self.head_dim is None and self.dim % self.n_heads:
            raise ValueError(
                f"dim must be a multiple of n_heads={self.n_heads} unless head_dim is given; got {self.dim}"
            )
        for reason in contradictions(self):
            raise ValueError(reason)

    @classmethod
    def gpt2(cls, size: str = "small", **changes: Any) -> ModelConfig:
        """GPT-2: learned positions, LayerNorm, GELU (tanh), biases, a tied head, a width of 4d.

        Dropout is 0, which is best in a single pass over the data; GPT-2 itself was trained with 0.1 in all three
        places.

        Args:
            size: "small" (124,439,808 parameters), "medium", "large" or "xl".
            changes: fields that differ, such as ``n_layers=2, dim=64, n_heads=4``.
        """
        return cls(**presets.fields("gpt2", size, changes))

    @classmethod
    def llama(cls, size: str = "llama-2-7b", **changes: Any) -> ModelConfig:
        """LLaMA with Meta's order of rotary pairs (transformers' checkpoints need rope_interleaved=False).

        Args:
            size: "llama-2-7b" (6,738,415,616 parameters), "llama-2-13b", "llama-2-70b", "llama-3-8b", "llama-3-70b",
                "llama-3.1-8b", "llama-3.1-70b", "llama-3.2-1b" or "llama-3.2-3b".
            changes: fields that differ.
        """
        return cls(**presets.fields("llama", size, changes))

    @classmethod
    def bloom(cls, size: str = "7b1", **changes: Any) -> ModelConfig:
        """BLOOM: ALiBi, LayerNorm (also of the embeddings), GELU (tanh), biases, a tied head.

        Args:
            size: "560m", "1b1", "1b7", "3b", "7b1" (7,069,016,064 parameters) or "176b".
            changes: fields that differ.
        """
        return cls(**presets.fields("bloom", size, changes))

    @classmethod
    def falcon(cls, size: str = "7b", **changes: Any) -> ModelConfig:
        """Falcon: parallel blocks, LayerNorm, rotary positions, GELU, no biases, a tied head, few key-value heads.

        Args:
            size: "7b" (6,921,720,704 parameters; multi-query, one norm a block), "40b" or "180b" (grouped-query, two).
            changes: fields that differ.
        """
        return cls(**presets.fields("falcon", size, changes))

    @classmethod
    def mixtral(cls, size: str = "8x7b", **changes: Any) -> ModelConfig:
        """Mixtral: LLaMA with 8 experts, 2 for each token, and with Meta's order of rotary pairs.

        Args:
            size: "8x7b" (46,702,792,704 parameters) or "8x22b" (140,620,634,112).
            changes: fields that differ.
        """
        return cls(**presets.fields("mixtral", size, changes))

    @property
    def n_parameters(self) -> int:
        """The number of parameters; a tied head counts once."""
        return count.parameters_by_part(self).total

    # Costs of the model, which are functions of its configuration.
    parameters_by_part = count.parameters_by_part
    cache_bytes = count.cache_bytes
    flops_per_token = count.flops_per_token
    training_bytes = count.training_bytes


def _check_size(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int; got {type(value).__name__}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1; got {value}")


def _layer_numbers(layers: object, n_layers: int) -> tuple[int, ...]:
    """`layers` as a sorted tuple without duplicates."""
    if not isinstance(layers, Sequence) or not all(type(layer) is int for layer in layers):
        raise TypeError(f"dense_layers must be a tuple of ints; got {layers!r:.60}")
    if outside := [layer for layer in layers if not 0 <= layer < n_layers]:
        raise ValueError(f"dense_layers must be layers 0 .. {n_layers - 1}; got {outside[0]}")
    return tuple(sorted(set(layers)))
