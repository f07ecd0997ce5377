"""The shape of a model, and the choices that make it a GPT-2, a LLaMA, a BLOOM or a Falcon."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from foundry_kernels.core.checks import check_not_negative, check_positive
from foundry_kernels.models import presets
from foundry_kernels.nn.mlp import GATES
from foundry_kernels.nn.router import SCORINGS
from foundry_kernels.ops.rope import RopeScaling

#: What may be chosen, by the name of the field.
CHOICES: dict[str, tuple[str | None, ...]] = {
    "positions": ("rope", "alibi", "learned", "sinusoidal", "none"),
    "norm": ("rms_norm", "layer_norm"),
    "norm_placement": ("pre", "post"),
    "activation": (*GATES, "gelu", "gelu_tanh", "relu"),
    "ffn_rule": (None, "4d", "two_thirds_of_4d"),
    "router_scoring": SCORINGS,
}


#: Fields that mean nothing without `n_experts`.
EXPERT_FIELDS = (
    "top_k", "router_scoring", "router_renormalize", "router_scale", "router_bias", "selection_bias",
    "weight_expert_inputs", "shared_expert_dim", "shared_expert_gate", "load_balancing_coef", "router_z_coef",
)  # fmt: skip


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a :class:`Transformer`, in the names of Meta's `params.json`; the defaults are LLaMA's choices.

    Attributes:
        dim: width of the residual stream.
        n_layers: blocks.
        n_heads: query heads.
        n_kv_heads: key-value heads, a divisor of `n_heads`; None is `n_heads`, 1 is multi-query attention.
        vocab_size: tokens are 0 .. vocab_size - 1.
        max_seq_len: positions that the model takes: rows of the rotary, learned or sinusoidal table.
        multiple_of: two thirds of 4d are rounded up to a multiple of it.
        ffn_dim_multiplier: factor on the feed-forward width before it is rounded up.
        hidden_dim: the feed-forward width itself, which overrides the two above and `ffn_rule`.
        head_dim: width of a head; None is ``dim // n_heads``.
        norm_eps: epsilon of every norm.
        norm_round_before_weight: round ``x / rms`` before the weight multiplies it, as Meta's code does. It matters
            only in low precision; False is more accurate.
        rope_base: base of the rotary wavelengths (`rope_theta` in Meta's files).
        rope_scaling: None, or a :class:`foundry_kernels.RopeScaling`.
        rope_interleaved: True pairs the dimensions (2i, 2i+1), as Meta's checkpoints need; False (i, i + D/2).
        tie_embeddings: the output projection is the embedding's matrix.
        init_std: standard deviation of the initial weights.
        positions: "rope" rotates queries and keys; "alibi" lowers a score by the distance, by a slope a head
            (:func:`foundry_kernels.nn.alibi_slopes`); "learned" and "sinusoidal" add a vector to the embedding; "none".
        rope_dim: rotated dimensions of a head, even; None is all of them.
        norm: "rms_norm" or "layer_norm".
        norm_bias: whether norms have a bias; None is the default, True for "layer_norm" and False for "rms_norm".
        norm_placement: "pre", a norm before each branch and one at the end, or "post", a norm of each sum (GPT-1).
        embedding_norm: a norm of the embeddings, with the positions added (BLOOM).
        activation: gated "swiglu", "geglu" or "geglu_tanh", or "gelu", "gelu_tanh" (GPT-2) or "relu" of one product.
        ffn_rule: the feed-forward width: "4d", or "two_thirds_of_4d" rounded up to `multiple_of`, with which a gated
            block has as many parameters; None is two thirds where there is a gate, else 4d.
        attention_bias: biases of the projections to queries, keys and values.
        attention_out_bias: of the projection from attention; None is `attention_bias`.
        mlp_bias: of the feed-forward projections.
        output_bias: of the output projection.
        parallel_residual: attention and feed-forward read the same stream, and both are added to it (GPT-NeoX).
        shared_attention_norm: with `parallel_residual`, one norm for both (Falcon-7B).
        sliding_window: positions that a query sees, its own the last of them; None is all before.
        qk_norm: an RMSNorm of each head of queries and keys, before the rotation (Qwen3).
        embedding_dropout, residual_dropout: of the embeddings, and of each branch before it is added, in the pass of
            the norm that adds it.
        attention_dropout: of attention's weights, inside attention's kernels.
        n_experts: None, or how many experts take the place of the feed-forward block, each of its width, in every layer
            (:class:`foundry_kernels.nn.MoE`).
        top_k: experts of a token.
        router_scoring, router_renormalize, router_scale: how a router's logits become weights ("softmax", True, 1.0 in
            Mixtral; "sigmoid" in DeepSeek-V3); see :class:`foundry_kernels.nn.Router`.
        router_bias: of the router's logits.
        selection_bias: a bias of the router's choice alone, which
            :func:`foundry_kernels.nn.update_selection_biases` moves after each step (DeepSeek-V3).
        weight_expert_inputs: multiply experts' inputs by their weights, not their outputs (Llama 4).
        shared_expert_dim: width of an expert that every token goes through; None is none.
        shared_expert_gate: multiply its output by the logistic function of a scalar (Qwen2-MoE).
        load_balancing_coef, router_z_coef: factors of the load-balancing and the router's z-loss in the model's loss
            while it trains.

    Raises:
        TypeError, ValueError: a field is invalid, or contradicts another; the message names it.

    Press et al., "Train Short, Test Long" (ALiBi), 2021, arXiv:2108.12409. Xiong et al., "On Layer Normalization in the
    Transformer Architecture" (pre and post), 2020, arXiv:2002.04745. Henry et al., "Query-Key Normalization", 2020,
    arXiv:2010.04245.
    """

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int | None = None
    vocab_size: int = 32000
    max_seq_len: int = 2048
    multiple_of: int = 8
    ffn_dim_multiplier: float | None = None
    hidden_dim: int | None = None
    head_dim: int | None = None
    norm_eps: float = 1e-5
    norm_round_before_weight: bool = False
    rope_base: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rope_interleaved: bool = True
    tie_embeddings: bool = False
    init_std: float = 0.02
    positions: str = "rope"
    rope_dim: int | None = None
    norm: str = "rms_norm"
    norm_bias: bool | None = None
    norm_placement: str = "pre"
    embedding_norm: bool = False
    activation: str = "swiglu"
    ffn_rule: str | None = None
    attention_bias: bool = False
    attention_out_bias: bool | None = None
    mlp_bias: bool = False
    output_bias: bool = False
    parallel_residual: bool = False
    shared_attention_norm: bool = False
    sliding_window: int | None = None
    qk_norm: bool = False
    embedding_dropout: float = 0.0
    residual_dropout: float = 0.0
    attention_dropout: float = 0.0
    n_experts: int | None = None
    top_k: int = 2
    router_scoring: str = "softmax"
    router_renormalize: bool = True
    router_scale: float = 1.0
    router_bias: bool = False
    selection_bias: bool = False
    weight_expert_inputs: bool = False
    shared_expert_dim: int | None = None
    shared_expert_gate: bool = False
    load_balancing_coef: float = 0.0
    router_z_coef: float = 0.0

    def __post_init__(self) -> None:
        for name in ("dim", "n_layers", "n_heads", "vocab_size", "max_seq_len", "multiple_of", "top_k"):
            _check_size(name, getattr(self, name))
        for name in (
            "n_kv_heads",
            "hidden_dim",
            "head_dim",
            "rope_dim",
            "sliding_window",
            "n_experts",
            "shared_expert_dim",
        ):
            if getattr(self, name) is not None:
                _check_size(name, getattr(self, name))
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
        for name in ("embedding_dropout", "residual_dropout", "attention_dropout"):
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
        for reason in _contradictions(self):
            raise ValueError(reason)

    @classmethod
    def gpt2(cls, size: str = "small", **changes: Any) -> ModelConfig:
        """GPT-2: learned positions, LayerNorm, GELU (tanh), biases, a tied head, a width of 4d.

        Dropout is 0, as it is best in a single pass over the data; GPT-2 itself was trained with 0.1 in all three.

        Args:
            size: "small" (124,439,808 parameters), "medium", "large" or "xl".
            changes: fields that differ, such as ``n_layers=2, dim=64, n_heads=4``.
        """
        return cls(**presets.fields("gpt2", size, changes))

    @classmethod
    def llama(cls, size: str = "llama-2-7b", **changes: Any) -> ModelConfig:
        """LLaMA in Meta's names and order of rotary pairs (a checkpoint of transformers has rope_interleaved=False).

        Args:
            size: "llama-2-7b" (6,738,415,616 parameters), "llama-2-13b", "llama-2-70b", "llama-3-8b", "llama-3-70b",
                "llama-3.1-8b", "llama-3.1-70b", "llama-3.2-1b" or "llama-3.2-3b".
            changes: fields that differ.
        """
        return cls(**presets.fields("llama", size, changes))

    @classmethod
    def bloom(cls, size: str = "7b1", **changes: Any) -> ModelConfig:
        """BLOOM: ALiBi, LayerNorm and one of the embeddings, GELU (tanh), biases, a tied head.

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
        """Mixtral: LLaMA with 8 experts, of which a token goes through 2; in Meta's order of rotary pairs.

        Args:
            size: "8x7b" (46,702,792,704 parameters) or "8x22b" (140,620,634,112).
            changes: fields that differ.
        """
        return cls(**presets.fields("mixtral", size, changes))

    # Those below are derived and not filled in, so that `dataclasses.replace` derives them anew.

    @property
    def kv_heads(self) -> int:
        """Key-value heads."""
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    @property
    def head_width(self) -> int:
        """Width of a head."""
        return self.dim // self.n_heads if self.head_dim is None else self.head_dim

    @property
    def rotary_width(self) -> int:
        """Rotated dimensions of a head."""
        return self.head_width if self.rope_dim is None else self.rope_dim

    @property
    def gated(self) -> bool:
        """Whether the feed-forward part has a gate, and so three matrices."""
        return self.activation in GATES

    @property
    def balances(self) -> bool:
        """Whether a loss of the routers is part of the model's loss in training."""
        return self.load_balancing_coef > 0.0 or self.router_z_coef > 0.0

    @property
    def norms_have_bias(self) -> bool:
        return self.norm == "layer_norm" if self.norm_bias is None else self.norm_bias

    @property
    def attention_out_has_bias(self) -> bool:
        return self.attention_bias if self.attention_out_bias is None else self.attention_out_bias

    @property
    def ffn_width(self) -> int:
        """Feed-forward width: `hidden_dim`, or by `ffn_rule`.

        "two_thirds_of_4d": ``int(2 * 4 dim / 3)``, times `ffn_dim_multiplier`, up to a multiple of `multiple_of`. "4d":
        ``4 dim``, times `ffn_dim_multiplier`.
        """
        if self.hidden_dim is not None:
            return self.hidden_dim
        whole = self.ffn_rule == "4d" or (self.ffn_rule is None and not self.gated)
        width = 4 * self.dim if whole else int(2 * 4 * self.dim / 3)
        if self.ffn_dim_multiplier is not None:
            width = int(self.ffn_dim_multiplier * width)
        return width if whole else -(-width // self.multiple_of) * self.multiple_of

    @property
    def n_parameters(self) -> int:
        """Parameters of the model, those of a tied head once."""
        dim, width, norm = self.dim, self.ffn_width, self.dim * (2 if self.norms_have_bias else 1)
        q, kv = self.n_heads * self.head_width, self.kv_heads * self.head_width
        attention = 2 * dim * q + 2 * dim * kv
        attention += (q + 2 * kv) * self.attention_bias + dim * self.attention_out_has_bias
        attention += 2 * self.head_width * self.qk_norm
        matrices = 3 if self.gated else 2
        biased = ((matrices - 1) * width + dim) * self.mlp_bias
        feed_forward = matrices * dim * width + biased
        if self.n_experts is not None:
            shared = self.shared_expert_dim or 0
            feed_forward *= self.n_experts
            feed_forward += self.n_experts * (dim + self.router_bias) + dim * self.shared_expert_gate
            feed_forward += matrices * dim * shared + ((matrices - 1) * shared + dim) * (self.mlp_bias and shared > 0)
        layer = attention + feed_forward + norm * (1 if self.shared_attention_norm else 2)
        embeddings = self.vocab_size * dim * (1 if self.tie_embeddings else 2) + self.vocab_size * self.output_bias
        embeddings += self.max_seq_len * dim * (self.positions == "learned") + norm * self.embedding_norm
        return embeddings + self.n_layers * layer + norm * (self.norm_placement == "pre")


def refuse_choices(
    config: ModelConfig, known: Mapping[str, tuple[Any, ...] | None], what: str, why: Mapping[str, str]
) -> None:
    """Refuses what is not known: a field that has neither its default nor one of the values in `known` (None: any).

    Raises:
        ValueError: ``field=value`` and `what`, with the reason that `why` has of the field or of ``field=value``.
    """
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value == field.default or (field.name in known and value in (known[field.name] or (value,))):
            continue
        reason = why.get(f"{field.name}={value}", why.get(field.name, "it is not among the choices that it knows"))
        raise ValueError(f"{field.name}={value!r} {what}: {reason}")


def _contradictions(config: ModelConfig) -> Iterator[str]:
    """Yields what no model can be, and why."""
    if config.positions == "rope":
        if config.rope_dim is None and config.head_width % 2:
            yield f"head_dim must be even, for the rotary pairs; got {config.head_width}"
        if config.rotary_width % 2 or config.rotary_width > config.head_width:
            yield f"rope_dim must be even and at most head_dim={config.head_width}; got {config.rope_dim}"
    else:
        for name in ("rope_dim", "rope_base", "rope_scaling", "rope_interleaved"):
            value, default = getattr(config, name), ModelConfig.__dataclass_fields__[name].default
            if value != default:
                yield f"{name} needs positions='rope'; got {value} with positions={config.positions!r}"
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
    yield from _contradictions_of_experts(config)


def _contradictions_of_experts(config: ModelConfig) -> Iterator[str]:
    if config.n_experts is None:
        for name in EXPERT_FIELDS:
            value = getattr(config, name)
            if value != ModelConfig.__dataclass_fields__[name].default:
                yield f"{name} needs n_experts: there is no router and no expert without; got {value}"
        return
    if config.top_k > config.n_experts:
        yield f"top_k must be at most n_experts={config.n_experts}; got {config.top_k}"
    if not config.gated:
        yield f"n_experts needs a gated activation, one of {', '.join(GATES)}; got activation={config.activation!r}"
    if config.top_k == 1 and config.n_experts > 1 and config.router_renormalize:
        yield (
            "router_renormalize must be False with top_k=1: a weight divided by itself is 1, and the router "
            "would learn nothing"
        )
    if config.shared_expert_gate and config.shared_expert_dim is None:
        yield "shared_expert_gate needs shared_expert_dim: there is no shared expert; got True"


def _check_size(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int; got {type(value).__name__}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1; got {value}")
