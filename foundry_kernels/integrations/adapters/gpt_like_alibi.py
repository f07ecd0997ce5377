"""Adapters of BLOOM and Falcon, whose attention does not call an attention function of transformers.

Their forward is replaced as a whole; with ``dense_masks="sdpa"`` it is the model's own for dense masks.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from foundry_kernels.integrations.adapters.base import split_names
from foundry_kernels.integrations.adapters.gpt_like import GptLikeAttention, PlainMLP, activated
from foundry_kernels.integrations.attention.plan import AttentionPlan
from foundry_kernels.ops.rope import rope


@dataclass(frozen=True)
class WholeAttention(GptLikeAttention):
    """Projections, rotation, cache and attention in one forward."""

    whole: ClassVar[bool] = True
    arguments = split_names(
        "self hidden_states residual alibi attention_mask position_ids layer_past use_cache output_attentions "
        "position_embeddings kwargs"
    )

    def runs_dense_masks(self, module: nn.Module) -> str:
        return "the model's own eager attention"

    def members(self, original: type) -> dict[str, Any]:
        found = importlib.import_module("foundry_kernels.integrations.attention.functions")
        return {"_foundry_attend": staticmethod(found.attention)}


def _additive(self: Any, x: Tensor, mask: Tensor | None, layer_past: Any) -> Tensor:
    """Converts a mask of "foundry" to one that the model's own attention adds."""
    batch, queries = x.shape[:2]
    keys = queries + (0 if layer_past is None else layer_past.get_seq_length(self.layer_idx))
    seen = AttentionPlan.of(mask).as_dense(batch, queries, keys, x.device)
    if seen.is_floating_point():
        return seen
    return torch.zeros_like(seen, dtype=x.dtype).masked_fill(~seen, torch.finfo(x.dtype).min)


@dataclass(frozen=True)
class BloomAttention(WholeAttention):
    """ALiBi, and the residual added after the last matmul."""

    names = split_names(
        "shape query_key_value _reshape update layer_idx reshape num_heads head_dim transpose baddbmm beta "
        "inv_norm_factor view F softmax torch float32 to dtype attention_dropout bmm _merge_heads pretraining_tp "
        "slow_but_exact hidden_size zeros_like range linear int dense weight dropout_add hidden_dropout training"
    )

    def why_not(self, module: nn.Module) -> str | None:
        return _why_not_sliced(module)

    def why_not_attend(self, module: nn.Module) -> str | None:
        return None  # it only has "eager" attention

    def ops(self, module: nn.Module) -> tuple[str, ...]:
        return ("flash_attention",)

    def members(self, original: type) -> dict[str, Any]:
        return super().members(original) | {"forward": _bloom_attention}


def _why_not_sliced(module: Any) -> str | None:
    if module.pretraining_tp > 1 and module.slow_but_exact:
        return "its config has slow_but_exact=True, by which products are summed in slices"
    return None


def _bloom_attention(
    self: Any,
    hidden_states: Tensor,
    residual: Tensor,
    alibi: Tensor,
    attention_mask: Tensor | None,
    layer_past: Any = None,
    use_cache: bool = False,
    output_attentions: bool = False,
    **kwargs: Any,
) -> Any:
    if AttentionPlan.of(attention_mask).is_dense and self._foundry.dense_masks != "kernels":
        mask = _additive(self, hidden_states, attention_mask, layer_past)
        original = self._foundry_original.forward
        return original(self, hidden_states, residual, alibi, mask, layer_past, use_cache, output_attentions, **kwargs)
    q, k, v = self._reshape(self.query_key_value(hidden_states))
    if layer_past is not None:
        k, v = layer_past.update(k, v, self.layer_idx)
    dropout = self.attention_dropout.p if self.training else 0.0
    options = {"scaling": self.inv_norm_factor, "dropout": dropout, "output_attentions": output_attentions}
    if AttentionPlan.of(attention_mask).is_dense:  # padding may be between tokens, and its ALiBi does not count it
        options["position_bias"] = alibi.view(q.shape[0], self.num_heads, 1, -1) * self.beta
    else:
        options["alibi_slopes"] = _slopes(self, q.device)
    out, weights = self._foundry_attend(self, q, k, v, attention_mask, is_causal=True, **options)
    out = self.dense(out.reshape(*hidden_states.shape[:2], -1))
    return self._foundry_home.dropout_add(out, residual, self.hidden_dropout, self.training), weights


@dataclass(frozen=True)
class BloomMLP(PlainMLP):
    """The residual is added after the second matmul."""

    names = split_names(
        "gelu_impl dense_h_to_4h pretraining_tp slow_but_exact torch zeros_like dense_4h_to_h weight shape range F "
        "linear int dropout_add hidden_dropout training"
    )
    arguments = split_names("self hidden_states residual")

    def known(self) -> frozenset[str]:
        return self.names

    def why_not(self, module: nn.Module) -> str | None:
        act = type(module.gelu_impl).__name__
        other = None if act == "BloomGelu" else f"its activation is {act}, which is not GELU"
        return _why_not_sliced(module) or other

    def members(self, original: type) -> dict[str, Any]:
        return {"forward": _bloom_mlp}


def _bloom_mlp(self: Any, hidden_states: Tensor, residual: Tensor) -> Tensor:
    out = self.dense_4h_to_h(activated(self, hidden_states))
    added: Tensor = self._foundry_home.dropout_add(out, residual, self.hidden_dropout, self.training)
    return added


def _has_alibi(module: Any) -> bool:
    return bool(module.config.alibi)


@dataclass(frozen=True)
class FalconAttention(WholeAttention):
    """Rotation or ALiBi. Without a cache, shared heads of keys and values are not repeated."""

    names = split_names(
        "query_key_value new_decoder_architecture num_heads num_kv_heads _split_heads shape transpose reshape "
        "head_dim apply_rotary_pos_emb update layer_idx config _attn_implementation is_causal torch nn functional "
        "scaled_dot_product_attention math sqrt F softmax dtype view permute dense attention_dropout p training "
        "float16 bfloat16 to float32 inv_norm_factor flatten _merge_heads"
    )

    def ops(self, module: nn.Module) -> tuple[str, ...]:
        return ("flash_attention",) if _has_alibi(module) else ("rope", "flash_attention")

    def members(self, original: type) -> dict[str, Any]:
        return super().members(original) | {"forward": _falcon_attention}


def _falcon_attention(
    self: Any,
    hidden_states: Tensor,
    alibi: Tensor | None,
    attention_mask: Tensor | None,
    position_ids: Tensor | None = None,
    layer_past: Any = None,
    use_cache: bool = False,
    output_attentions: bool = False,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **kwargs: Any,
) -> Any:
    ours = str(self.config._attn_implementation).startswith("foundry")
    dense = ours and AttentionPlan.of(attention_mask).is_dense
    if not ours or (dense and self._foundry.dense_masks != "kernels"):
        mask = _additive(self, hidden_states, attention_mask, layer_past) if ours else attention_mask
        more = layer_past, use_cache, output_attentions, position_embeddings
        return self._foundry_original.forward(self, hidden_states, alibi, mask, position_ids, *more, **kwargs)
    q, k, v = (x.transpose(1, 2) for x in _falcon_heads(self, hidden_states, layer_past is not None))
    if alibi is None:
        assert position_embeddings is not None
        half = position_embeddings[0].shape[-1] // 2
        cos, sin = (table[..., :half] for table in position_embeddings)
        backend = self._foundry.backends.get("rope", "auto")
        q, k = rope(q, k, cos, sin, backend=backend)
    if layer_past is not None:
        k, v = layer_past.update(k, v, self.layer_idx)
    # A dense mask already includes it.
    slopes = None if alibi is None or dense else _falcon_slopes(self, q.device)
    # With rotations, its own attention has no dropout.
    dropout = 0.0 if alibi is None or not self.training else self.attention_dropout.p
    options = {"scaling": self.inv_norm_factor, "dropout": dropout, "output_attentions": output_attentions}
    out, weights = self._foundry_attend(self, q, k, v, attention_mask, is_causal=True, alibi_slopes=slopes, **options)
    return self.dense(out.reshape(*hidden_states.shape[:2], -1)), weights


def _falcon_heads(self: Any, x: Tensor, repeated: bool) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v [B, T, heads, D]; `repeated`: repeat shared heads, as in the cache of the model's own forward."""
    qkv = self.query_key_value(x)
    if repeated or not self.new_decoder_architecture:
        q, k, v = self._split_heads(qkv)
        return q, k, v
    qkv = qkv.view(*x.shape[:2], self.num_kv_heads, -1, self.head_dim)
    return qkv[:, :, :, :-2].flatten(2, 3), qkv[:, :, :, -2], qkv[:, :, :, -1]


def _falcon_slopes(self: Any, device: torch.device) -> Tensor:
    """ALiBi is scaled like the scores, and its slopes are rounded to bfloat16."""
    return _slopes(self, device) * self.inv_norm_factor


def _slopes(self: Any, device: torch.device) -> Tensor:
    """Returns the model's own slopes: the difference of its bias between neighbouring keys."""
    ones = torch.ones(1, 2, device=device, dtype=torch.long)
    bias: Tensor = self._foundry_home.build_alibi_tensor(ones, self.num_heads, torch.float32)
    return bias[:, 0, 1]
