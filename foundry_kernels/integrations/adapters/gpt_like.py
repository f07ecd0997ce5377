"""Adapters of GPT-like families: a LayerNorm, biases, an MLP without a gate, and dropout.

Their norms are `torch.nn.LayerNorm`, which has its own adapter. The model applies dropout to residuals and embeddings;
the kernel applies it to attention weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from foundry_kernels.integrations.adapters.activations import activation
from foundry_kernels.integrations.adapters.base import (
    Adapter,
    Attention,
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
class GPT2Attention(GptLikeAttention):
    """GPT-2's attention has no positions, so its forward stays and only the attention function is replaced."""

    names = split_names(
        "isinstance EncoderDecoderCache is_updated get layer_idx cross_attention_cache self_attention_cache hasattr "
        "ValueError q_attn layers keys values c_attn split split_size shape head_dim view transpose update config "
        "_attn_implementation ALL_ATTENTION_FUNCTIONS get_interface eager_attention_forward reorder_and_upcast_attn "
        "_upcast_and_reordered_attn attn_dropout p training scaling reshape contiguous c_proj resid_dropout"
    )
    arguments = frozenset()  # its own forward stays

    def ops(self, module: nn.Module) -> tuple[str, ...]:
        return ("flash_attention",)

    def members(self, original: type) -> dict[str, Any]:
        return {}


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


#: The approximations of GELU activations that gated MLPs do not use.
MORE_GELUS = {
    ("transformers.activations", "NewGELUActivation"): "tanh",
    ("transformers.models.bloom.modeling_bloom", "BloomGelu"): "tanh",
}


def gelu_of(act: object) -> str | None:
    """Returns the approximation of an activation module if it is GELU, otherwise None."""
    found = activation(act)
    if found is not None and found[0] == "geglu":
        return found[1]
    return MORE_GELUS.get((type(act).__module__, type(act).__qualname__))


@dataclass(frozen=True)
class PlainMLP(Adapter):
    """``outer(down(inner(act(up(x)))))``: the bias of the first matmul is fused into the activation.

    up, down: the names of the layers; without `down` the activation is the last. act: the name of the activation.
    kernel, inner, outer, casts, takes: as for `MLP`.
    """

    up: str = ""
    down: str = ""
    act: str = "act"
    kernel: tuple[str, str] | None = None
    inner: str = ""
    outer: str = ""
    casts: bool = False
    takes: str = "hidden_states"

    def activation(self, module: nn.Module) -> tuple[str, str] | None:
        """Returns the operation of the activation, and the approximation of GELU; None where it has none."""
        if self.kernel is not None:
            return self.kernel
        gelu = gelu_of(getattr(module, self.act, None))
        return None if gelu is None else ("bias_gelu", gelu)

    def ops(self, module: nn.Module) -> tuple[str, ...]:
        found = self.activation(module)
        return () if found is None else (found[0],)

    def why_not(self, module: nn.Module) -> str | None:
        act = getattr(module, self.act, None)
        return None if self.activation(module) else f"its activation is {type(act).__name__}, which is not GELU"

    def members(self, original: type) -> dict[str, Any]:
        return {"forward": taking(_plain_mlp if self.down else activated, self.takes)}


def _plain_mlp(self: Any, hidden_states: Tensor) -> Tensor:
    x = activated(self, hidden_states)
    return second(self, layers_of(self, x), x)


def activated(self: Any, x: Tensor) -> Tensor:
    """``act(up(x))``."""
    row: PlainMLP = self._foundry_row
    found = row.activation(self)
    assert found is not None  # otherwise the module is not patched
    op, approximate = found
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
