"""Adapters of GPT-like families: a LayerNorm, biases, an MLP without a gate, and dropout.

Their norms are `torch.nn.LayerNorm`, which has its own adapter. The model applies dropout to residuals and embeddings;
the kernel applies it to attention weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from foundry_kernels.integrations.adapters.attention import Attention
from foundry_kernels.integrations.adapters.base import (
    Adapter,
    Norm,
    _norm_forward,
    layers_of,
    second,
    split_names,
    taking,
)
from foundry_kernels.nn._layers import is_observed
from foundry_kernels.nn._linear_layers import Layers
from foundry_kernels.ops.bias_gelu import bias_gelu, bias_relu, bias_silu
from foundry_kernels.ops.rope import rope


@dataclass(frozen=True)
class GptLikeAttention(Attention):
    """An attention whose forward uses `names`, without the common names of Llama-like attention."""

    def known(self) -> frozenset[str]:
        return self.names


@dataclass(frozen=True)
class NeoXAttention(GptLikeAttention):
    """One projection for q, k and v, head by head; the first of a head's dimensions are rotated."""

    names = split_names(
        "shape head_size query_key_value view transpose chunk apply_rotary_pos_emb update layer_idx "
        "ALL_ATTENTION_FUNCTIONS get_interface config _attn_implementation eager_attention_forward scaling training "
        "attention_dropout reshape contiguous dense"
    )
    arguments = split_names("self hidden_states attention_mask layer_past position_embeddings kwargs")

    def members(self, original: type) -> dict[str, Any]:
        return {"forward": _neox_attention}


def _neox_attention(
    self: Any,
    hidden_states: Tensor,
    attention_mask: Any,
    layer_past: Any = None,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    home, backend = self._foundry_home, self._foundry.backends.get("rope")
    tokens = hidden_states.shape[:-1]
    layers = layers_of(self, hidden_states)
    qkv = layers.linear(hidden_states, self.query_key_value)
    q, k, v = qkv.view(*tokens, -1, 3 * self.head_size).transpose(1, 2).chunk(3, dim=-1)
    assert position_embeddings is not None
    cos, sin = position_embeddings
    if backend is None:
        q, k = home.apply_rotary_pos_emb(q, k, cos, sin)
    else:
        half = cos.shape[-1] // 2
        q, k = rope(q, k, cos[..., :half], sin[..., :half], backend=backend)
    if layer_past is not None:
        k, v = layer_past.update(k, v, self.layer_idx)
    attend = home.ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, home.eager_attention_forward)
    dropout = self.attention_dropout if self.training else 0.0
    out, weights = attend(self, q, k, v, attention_mask, scaling=self.scaling, dropout=dropout, **kwargs)
    return layers.linear(out.reshape(*tokens, -1), self.dense), weights


@dataclass(frozen=True)
class NemotronNorm(Norm):
    """Nemotron's LayerNorm, whose weight is stored less 1. Under autocast on a GPU the class's own forward runs, which
    casts what it gets."""

    names = split_names(
        "device type _cast_if_autocast_enabled normalized_shape weight bias eps maybe_autocast F layer_norm"
    )
    arguments = split_names("self input")

    def members(self, original: type) -> dict[str, Any]:
        return {"forward": _nemotron_norm}


def _nemotron_norm(self: Any, input: Tensor) -> Tensor:
    if torch.is_autocast_enabled():
        out: Tensor = self._foundry_original.forward(self, input)
        return out
    return _norm_forward(self, input)


@dataclass(frozen=True)
class PlainMLP(Adapter):
    """``outer(down(inner(act(up(x)))))``: the bias of the first matmul is fused into the activation.

    up, down: the names of the layers; without `down` the activation is the last.
    kernel, inner, outer, casts, takes: as for `MLP`.
    """

    up: str = ""
    down: str = ""
    kernel: tuple[str, str] | None = None
    inner: str = ""
    outer: str = ""
    casts: bool = False
    takes: str = "hidden_states"

    def ops(self, module: nn.Module) -> tuple[str, ...]:
        return (self.kernel[0],) if self.kernel else ()

    def members(self, original: type) -> dict[str, Any]:
        return {"forward": taking(_plain_mlp if self.down else activated, self.takes)}


def _plain_mlp(self: Any, hidden_states: Tensor) -> Tensor:
    x = activated(self, hidden_states)
    return second(self, layers_of(self, x), x)


def activated(self: Any, x: Tensor) -> Tensor:
    """``act(up(x))``."""
    row: PlainMLP = self._foundry_row
    assert row.kernel is not None
    op, approximate = row.kernel
    product, bias = _product(layers_of(self, x), getattr(self, row.up), x)
    backend = self._foundry.backends[op]
    if op == "bias_gelu":
        return bias_gelu(product, bias, approximate=approximate, backend=backend)
    return bias_silu(product, bias, backend=backend) if op == "bias_silu" else bias_relu(product, bias, backend=backend)


def _product(layers: Layers, layer: Any, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """The matmul of a layer, and its bias, which is not added yet. The bias is None if the layer was called, because it
    has another class (LoRA's, a quantised one) or hooks."""
    kind = type(layer)
    name = kind.__module__, kind.__qualname__
    if not is_observed(layer):
        if kind is nn.Linear or name == ("transformers.models.falcon.modeling_falcon", "FalconLinear"):
            return layers.product(x, layer.weight), layer.bias
        if name == ("transformers.pytorch_utils", "Conv1D"):
            return layers.product(x, layer.weight.t()), layer.bias
    return layer(x), None
