"""The attention of families like Llama, whose projections, norms, rotation and attention function are replaced."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor, nn

from foundry_kernels.integrations.adapters.base import Adapter, Norm, layers_of, nothing, split_names
from foundry_kernels.integrations.adapters.lora_layers import each_of
from foundry_kernels.integrations.modules import taken_by
from foundry_kernels.nn._head import count_hooks
from foundry_kernels.nn._linear_layers import Layers
from foundry_kernels.ops.rope import qk_norm_rope, rope

#: The arguments of transformers' attention functions that "foundry" supports.
ATTENTION_ARGUMENTS = split_names(
    "module query key value attention_mask scaling dropout is_causal softcap s_aux sliding_window position_bias kwargs"
)


@dataclass(frozen=True)
class Attention(Adapter):
    """Projections, norms of queries and keys, rotation, cache, and the attention function of the model's config.

    norms: "" for none, "heads" before the rotation and over a head, "projection" over all heads at once.
    packed: one `qkv_proj`. interleaved: pairs (2i, 2i + 1). half_tables: cos and sin have no second half, which would
    be equal. optional_rope: `use_rope` is whether the layer rotates; optional_tables: whether it gets cos and sin.
    gated: `q_proj` makes a gate for the result of each head too, behind its query. passes: the attention function's
    arguments besides mask, scaling and dropout. uses: names that only this row's forward uses.
    """

    norms: str = ""
    packed: bool = False
    interleaved: bool = False
    half_tables: bool = False
    optional_rope: bool = False
    optional_tables: bool = False
    gated: bool = False
    passes: Callable[[Any], dict[str, Any]] = nothing
    uses: tuple[str, ...] = field(default=())
    #: Whether the whole forward is replaced.
    whole: ClassVar[bool] = False

    names = split_names(
        "shape head_dim q_proj k_proj v_proj o_proj view transpose apply_rotary_pos_emb update layer_idx "
        "ALL_ATTENTION_FUNCTIONS get_interface config _attn_implementation eager_attention_forward training "
        "attention_dropout scaling reshape contiguous"
    )
    #: The cache has two names, depending on the release.
    arguments = split_names("self hidden_states position_embeddings attention_mask past_key_values cache kwargs")

    def known(self) -> frozenset[str]:
        norms = ("q_norm", "k_norm") if self.norms else ()
        packed = ("qkv_proj", "num_attention_heads", "num_key_value_heads") if self.packed else ()
        gate = ("torch", "chunk", "sigmoid") if self.gated else ()
        return self.names | {*self.uses, *norms, *packed, *gate} | ({"use_rope"} if self.optional_rope else set())

    def why_not(self, module: nn.Module) -> str | None:
        eager = getattr(sys.modules[self.home(module)], "eager_attention_forward", None)
        if eager and (unknown := sorted({*taken_by(eager)} - ATTENTION_ARGUMENTS)):
            return f"its attention function takes {', '.join(unknown)}, which this package does not know"
        if getattr(module.config, "output_attentions", False):
            return (
                "its config has output_attentions=True, which transformers has for 'eager' alone; as an argument of a "
                "call it is supported"
            )
        return None

    def why_not_attend(self, module: nn.Module) -> str | None:
        """Returns the reason why the attention function is not replaced although the rest is supported, or None.

        "eager" is an explicit choice (for weights, or for dropout) if transformers would have used "sdpa" by default.
        Otherwise an explicit choice cannot be detected.
        """
        config: Any = module.config
        if config._attn_implementation != "eager" or not self.may_be_sdpa(module):
            return None
        return (
            "flash_attention left, its config has attn_implementation='eager'; name flash_attention in ops to have it"
        )

    def may_be_sdpa(self, module: nn.Module) -> bool:
        """Returns whether transformers lets the models of this module's family have an attention with "sdpa" in its
        name."""
        home = sys.modules[self.home(module)]
        own = (c for n, c in vars(home).items() if n.endswith("PreTrainedModel") and c.__module__ == home.__name__)
        return all(getattr(model, "_supports_sdpa", False) for model in own)

    def home(self, module: nn.Module) -> str:
        """Returns the name of the Python module that this module's forward is from."""
        return next(c for c in type(module).__mro__ if self.method in vars(c)).__module__

    def ops(self, module: nn.Module) -> tuple[str, ...]:
        if self.optional_rope and not module.use_rope:
            return ("flash_attention",)
        return ("qk_norm_rope" if self.norms == "heads" else "rope", "flash_attention")

    def runs_dense_masks(self, module: nn.Module) -> str:
        """Returns what ``dense_masks="sdpa"`` means for this module."""
        passed = self.passes(module)  # SDPA has neither a soft cap nor sinks
        own = passed.get("softcap") is not None or passed.get("s_aux") is not None
        return "SDPA" if self.may_be_sdpa(module) and not own else "the model's own eager attention"

    def members(self, original: Any) -> dict[str, Any]:
        named = "cache" in taken_by(original.forward)
        return {"forward": _attention_forward, "_foundry_cache": named}


def _attention_forward(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    attention_mask: Any = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    row: Attention = self._foundry_row
    home = self._foundry_home
    tokens = hidden_states.shape[:-1]
    layers = layers_of(self, hidden_states)
    q, k, v = _project(self, row, layers, hidden_states)
    if row.norms == "projection":
        q, k = self.q_norm(q), self.k_norm(k)
    heads = (*tokens, -1, self.head_dim)
    gate = None
    if row.gated:
        q, gate = q.view(*tokens, -1, 2 * self.head_dim).chunk(2, dim=-1)
    q, k, v = q if row.gated else q.view(heads), k.view(heads), v.view(heads)
    rotates = not row.optional_rope or self.use_rope
    rotates = rotates and not (row.optional_tables and position_embeddings is None)
    fused = rotates and "qk_norm_rope" in self._foundry.backends and _fusable(self.q_norm, self.k_norm)
    if row.norms == "heads" and not fused:
        q, k = self.q_norm(q), self.k_norm(k)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if rotates:
        assert position_embeddings is not None
        q, k = _rotate(self, row, q, k, *position_embeddings, fused)
    past, told = past_key_values, {}
    if self._foundry_cache:  # since transformers 5.24; an argument `cache` of before is for the attention function
        past, told = kwargs.pop("cache", past), {"kwargs": kwargs}
    if past is not None:
        k, v = past.update(k, v, self.layer_idx, **told)
    attend = home.ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, home.eager_attention_forward)
    dropout = self.attention_dropout if self.training else 0.0
    options = {"dropout": dropout, "scaling": self.scaling, **row.passes(self), **kwargs}
    out, weights = attend(self, q, k, v, attention_mask, **options)
    out = out.reshape(*tokens, -1)
    if gate is not None:
        out = out * gate.reshape(*tokens, -1).sigmoid()
    return layers.linear(out, self.o_proj), weights


def _project(self: Any, row: Attention, layers: Layers, x: Tensor) -> tuple[Tensor, ...]:
    if not row.packed:
        return each_of(layers, x, self.q_proj, self.k_proj, self.v_proj)
    shared = self.num_key_value_heads * self.head_dim
    qkv = layers.linear(x, self.qkv_proj)
    q, k, v = qkv.split((qkv.shape[-1] - 2 * shared, shared, shared), dim=-1)
    return q, k, v


def _rotate(
    self: Any, row: Attention, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, fused: bool
) -> tuple[Tensor, Tensor]:
    backends = self._foundry.backends
    backend = backends.get("qk_norm_rope" if fused else "rope")
    if backend is None:
        return self._foundry_home.apply_rotary_pos_emb(q, k, cos, sin)
    if not row.half_tables:
        half = cos.shape[-1] // 2
        cos, sin = cos[..., :half], sin[..., :half]
    if not fused:
        return rope(q, k, cos, sin, interleaved=row.interleaved, backend=backend)
    norm: Norm = self.q_norm._foundry_row
    return qk_norm_rope(
        q,
        k,
        getattr(self.q_norm, norm.weight),
        getattr(self.k_norm, norm.weight),
        cos,
        sin,
        eps=norm.eps_of(self.q_norm),
        weight_offset=norm.weight_offset,
        round_before_weight=norm.round_before_weight,
        interleaved=row.interleaved,
        backend=backend,
    )


def _fusable(q_norm: Any, k_norm: Any) -> bool:
    """Returns whether both are plain calls of equal norms: without hooks, without their own forward (with which
    transformers' `tp_plan` sums the weights' gradients), and without wrappers."""
    for norm in (q_norm, k_norm):
        if getattr(type(norm), "_foundry_class", None) is not type(norm):
            return False
        if "forward" in vars(norm) or count_hooks(norm):
            return False
    row = q_norm._foundry_row
    if type(q_norm) is not type(k_norm) or not isinstance(row, Norm) or row.op != "rms_norm" or not row.weight:
        return False
    return not row.one_dtype and row.eps_of(q_norm) == row.eps_of(k_norm)
