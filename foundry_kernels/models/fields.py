"""The fields of a configuration, and what follows from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from foundry_kernels.core.choices import GATES
from foundry_kernels.ops.rope import RopeScaling

#: The kinds of layers, by their names in transformers.
FULL, LINEAR, MLP, HYBRID = "full_attention", "linear_attention", "mlp", "hybrid"


class LinearHeads(NamedTuple):
    """The sizes of linear attention: heads and widths."""

    v_heads: int
    k_heads: int
    k_dim: int
    v_dim: int

    @property
    def values(self) -> int:
        return self.v_heads * self.v_dim

    @property
    def channels(self) -> int:
        """The channels of the convolution: queries, keys and values."""
        return 2 * self.k_heads * self.k_dim + self.values


@dataclass(frozen=True)
class ModelFields:
    """The fields of a :class:`ModelConfig`, which describes and checks them, and properties that follow from them."""

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
    norm_eps: float | None = None
    norm_round_before_weight: bool = False
    rope_base: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rope_interleaved: bool = False
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
    activation_dropout: float = 0.0
    output_dropout: float = 0.0
    causal: bool = True
    context_dim: int | None = None
    head: bool = True
    logit_scale: float = 1.0
    attention_scale: float | None = None
    alibi_scaled: bool = False
    relative_buckets: int = 32
    relative_max_distance: int = 128
    norm_weight_offset: float = 0.0
    final_norm: bool | None = None
    embedding_scale: float = 1.0
    token_types: int = 0
    qk_norm_over: str = "head"
    n_experts: int | None = None
    dense_layers: tuple[int, ...] = ()
    dense_hidden_dim: int | None = None
    router_groups: int | None = None
    router_top_groups: int | None = None
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
    init: str = "normal"
    qk_norm_weight_offset: float = 0.0
    attention_gate: bool = False
    kv_lora_rank: int | None = None
    q_lora_rank: int | None = None
    v_head_dim: int | None = None
    layer_types: tuple[str, ...] | None = None
    one_branch: bool = False
    residual_scale: float = 1.0
    linear_v_heads: int | None = None
    linear_k_heads: int | None = None
    linear_k_dim: int | None = None
    linear_v_dim: int | None = None
    linear_conv_size: int = 4
    linear_kind: str = "gated_delta_net"
    linear_bias: bool = False
    linear_conv_bias: bool = True
    linear_dt_limit: tuple[float | None, float | None] = (0.0, None)
    linear_norm_groups: int | None = None
    linear_rmsnorm: bool = True
    linear_norm_before_gate: bool = False
    linear_in_scales: tuple[float, ...] = (1.0,) * 5
    branch_scales: tuple[float, ...] = (1.0,) * 3
    gate_alpha: float = 1.0

    # The properties below are derived and not stored, so that `dataclasses.replace` recomputes them.

    @property
    def kv_heads(self) -> int:
        """Key-value heads."""
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    @property
    def head_width(self) -> int:
        """Width of a head."""
        return self.dim // self.n_heads if self.head_dim is None else self.head_dim

    @property
    def value_width(self) -> int:
        """Width of a head's value."""
        return self.head_width if self.v_head_dim is None else self.v_head_dim

    @property
    def cached_heads(self) -> tuple[int, int, int]:
        """The heads of keys in a cache, and the widths of a key and of a value."""
        return self.kv_heads, self.head_width, self.value_width

    @property
    def rotary_width(self) -> int:
        """Rotated dimensions of a head."""
        return self.head_width if self.rope_dim is None else self.rope_dim

    @property
    def gated(self) -> bool:
        """Whether the feed-forward block has a gate, and therefore three matrices."""
        return self.activation in GATES

    @property
    def full_layers(self) -> tuple[int, ...]:
        """The layers with attention that keeps keys and values."""
        return self._layers(FULL, HYBRID)

    @property
    def linear_layers(self) -> tuple[int, ...]:
        """The layers with linear attention."""
        return self._layers(LINEAR, HYBRID)

    @property
    def mlp_layers(self) -> tuple[int, ...]:
        """The layers with a feed-forward block or experts."""
        return self._layers(MLP) if self.one_branch else tuple(range(self.n_layers))

    def _layers(self, *kinds: str) -> tuple[int, ...]:
        every = self.layer_types or (FULL,) * self.n_layers
        return tuple(layer for layer, kind in enumerate(every) if kind in kinds)

    @property
    def linear_heads(self) -> LinearHeads:
        """The sizes of linear attention."""
        v_heads, k_dim = self.linear_v_heads or self.n_heads, self.linear_k_dim or self.head_width
        return LinearHeads(v_heads, self.linear_k_heads or v_heads, k_dim, self.linear_v_dim or k_dim)

    @property
    def relative(self) -> bool:
        return self.positions == "relative"

    @property
    def ends_with_norm(self) -> bool:
        """Whether there is a norm after the last block."""
        return self.norm_placement == "pre" if self.final_norm is None else self.final_norm

    @property
    def balances(self) -> bool:
        """Whether the model's training loss includes a loss of the routers."""
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
