"""Adapters of `torch.nn`'s own transformer: attention, the layers of encoder and decoder, and the encoder.

In inference, `torch.nn.TransformerEncoderLayer` runs as one kernel of PyTorch's, which reads the parameters of its
modules without calling them. So the layer's forward is replaced too; otherwise patched attention and norms would not
run. This also fuses the dropout, the sum with the residual and the next norm, and the bias of the first matmul with
GELU.

`torch.nn.TransformerEncoder` drops padding in inference, by passing a nested tensor to its layers. Here the tokens are
packed once for all layers, under the same conditions, and padding is also 0 in the output. Masks stay bool until the
kernels, which skip keys hidden by a bool mask but must read a floating mask everywhere.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.transformer import _detect_is_causal_mask

from foundry_kernels.core.autocast import autocast_dtype
from foundry_kernels.integrations.adapters.base import Adapter, TorchNorm, layers_of, split_names
from foundry_kernels.nn import LayerNorm, MultiheadAttention, RMSNorm
from foundry_kernels.nn._layers import is_linear, is_observed
from foundry_kernels.nn._nested import Packed, nest_like, pack, pack_padded
from foundry_kernels.nn.multihead import why_not
from foundry_kernels.ops.bias_gelu import bias_gelu


@dataclass(frozen=True)
class TorchModule(Adapter):
    """A module of `torch.nn`, recognised by the arguments of its forward."""

    takes: ClassVar[frozenset[str]]

    def why_changed(self, original: type) -> str | None:
        unknown = sorted({*inspect.signature(getattr(original, self.method)).parameters} ^ {"self", *self.takes})
        if unknown:
            return f"its forward differs in {', '.join(unknown)}: another version of it than this package knows"
        return None


@dataclass(frozen=True)
class TorchAttention(TorchModule):
    """`torch.nn.MultiheadAttention`, which becomes the one of `foundry_kernels.nn`."""

    takes = split_names("query key value key_padding_mask need_weights attn_mask average_attn_weights is_causal")

    def ops(self, module: nn.Module) -> tuple[str, ...]:
        return ("flash_attention",)

    def why_not(self, module: nn.Module) -> str | None:
        attention: Any = module
        return why_not(attention.head_dim, attention.dropout)

    def bases(self, original: type) -> tuple[type, ...]:
        return (MultiheadAttention, original)

    def members(self, original: type) -> dict[str, Any]:
        return {"backends": property(lambda self: self._foundry.backends)}


@dataclass(frozen=True)
class Layer(TorchModule):
    """A layer of attention and a feed-forward part. blocks: the names of its methods for these, which a subclass may
    replace. attentions: the names of its attentions. run: its forward."""

    blocks: ClassVar[tuple[str, ...]]
    attentions: ClassVar[tuple[str, ...]]
    run: ClassVar[Callable[..., Tensor]]

    def why_not(self, module: nn.Module) -> str | None:
        base = next(c for c in type(module).__mro__ if c.__module__ == "torch.nn.modules.transformer")
        for name in self.blocks:
            if name in vars(module) or getattr(type(module), name) is not getattr(base, name):
                return f"it has a {name} of its own, which need not do what that of {base.__name__} does"
        for name in self.attentions:
            if not isinstance(attention := getattr(module, name, None), nn.MultiheadAttention):
                return f"its {name} is {type(attention).__name__}, which is no torch.nn.MultiheadAttention"
        return None

    def ops(self, module: nn.Module) -> tuple[str, ...]:
        layer: Any = module
        attentions = [getattr(layer, name) for name in self.attentions]
        found = () if any(why_not(a.head_dim, a.dropout) for a in attentions) else ("flash_attention",)
        return (*found, *_norms(module.children()), *(("bias_gelu",) if gelu_of(layer.activation) else ()))

    def members(self, original: type) -> dict[str, Any]:
        return {"forward": type(self).run}


def _norms(modules: Iterable[nn.Module]) -> list[str]:
    """The operations that norms among these modules run on."""
    of = {nn.RMSNorm: "rms_norm", nn.LayerNorm: "layer_norm"}
    return list(dict.fromkeys(op for module in modules for cls, op in of.items() if isinstance(module, cls)))


def _encoder_layer(
    self: Any,
    src: Tensor,
    src_mask: Tensor | None = None,
    src_key_padding_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    if not src.is_nested:
        attend = _attention(self.self_attn, None, src_mask, src_key_padding_mask, is_causal)
        return _run(self, src, _encoder_blocks(self, attend))
    if src_mask is not None or src_key_padding_mask is not None:
        raise ValueError("src_mask and src_key_padding_mask must be None where src is a nested tensor")
    packed = pack("src", src)
    if _packs(self) and not is_observed(self.self_attn):
        return nest_like(_packed_layer(self, packed), packed, src)

    def call(x: Tensor) -> Tensor:
        nested = nest_like(x, packed, src)
        return pack("src", self.self_attn(nested, nested, nested, need_weights=False)[0]).tokens

    return nest_like(_run(self, packed.tokens, _encoder_blocks(self, call)), packed, src)


def _decoder_layer(
    self: Any,
    tgt: Tensor,
    memory: Tensor,
    tgt_mask: Tensor | None = None,
    memory_mask: Tensor | None = None,
    tgt_key_padding_mask: Tensor | None = None,
    memory_key_padding_mask: Tensor | None = None,
    tgt_is_causal: bool = False,
    memory_is_causal: bool = False,
) -> Tensor:
    own = _attention(self.self_attn, None, tgt_mask, tgt_key_padding_mask, tgt_is_causal)
    cross = _attention(self.multihead_attn, memory, memory_mask, memory_key_padding_mask, memory_is_causal)
    blocks = (
        (own, self.norm1, self.dropout1),
        (cross, self.norm2, self.dropout2),
        (partial(_feed_forward, self), self.norm3, self.dropout3),
    )
    return _run(self, tgt, blocks)


#: (the function of x, the norm before or after it, the dropout of its result)
Block = tuple[Callable[[Tensor], Tensor], nn.Module, nn.Module]


def _encoder_blocks(layer: Any, attend: Callable[[Tensor], Tensor]) -> tuple[Block, ...]:
    return (attend, layer.norm1, layer.dropout1), (partial(_feed_forward, layer), layer.norm2, layer.dropout2)


def _attention(
    attention: nn.Module,
    memory: Tensor | None,
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    is_causal: bool,
) -> Callable[[Tensor], Tensor]:
    """Attention of x to `memory`, or to itself."""

    def attend(x: Tensor) -> Tensor:
        keys = x if memory is None else memory
        out: Tensor = attention(
            x, keys, keys, attn_mask=attn_mask, key_padding_mask=key_padding_mask, need_weights=False,
            is_causal=is_causal,
        )[0]  # fmt: skip
        return out

    return attend


def _run(layer: Any, x: Tensor, blocks: Sequence[Block]) -> Tensor:
    """Runs the blocks one after the other. Each is added to its input, with norms before or after."""
    if not layer.norm_first:
        for block, norm, dropout in blocks:
            x = _add_and_norm(x, block(x), dropout, norm)[0]
        return x
    y = blocks[0][1](x)
    for (block, _, dropout), (_, norm, _) in pairwise(blocks):
        y, x = _add_and_norm(x, block(y), dropout, norm)
    block, _, dropout = blocks[-1]
    return x + dropout(block(y))


def _add_and_norm(x: Tensor, branch: Tensor, dropout: nn.Module, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """(norm(h), h) of ``h = x + dropout(branch)``, in one pass if the norm and the dropout are plain modules."""
    fused = isinstance(norm, (LayerNorm, RMSNorm)) and not is_observed(norm)
    if not fused or branch.dtype != x.dtype:
        h = x + dropout(branch)
        return norm(h), h
    p = 0.0
    if type(dropout) is nn.Dropout and not is_observed(dropout) and dropout.p < 1.0:
        p = dropout.p if dropout.training else 0.0
    else:
        branch = dropout(branch)
    y, h = norm(branch, x, dropout_p=p)
    return y, h


def _feed_forward(layer: Any, x: Tensor) -> Tensor:
    """The feed-forward part without its last dropout, which is applied with the sum."""
    approximate, backend = gelu_of(layer.activation), layer._foundry.backends.get("bias_gelu")
    first, layers = layer.linear1, layers_of(layer, x)
    if approximate and backend and is_linear(first):
        x = bias_gelu(layers.product(x, first.weight), first.bias, approximate=approximate, backend=backend)
    else:
        x = layer.activation(layers.linear(x, first))
    return layers.linear(layer.dropout(x), layer.linear2)


def gelu_of(activation: Any) -> str | None:
    """The approximation of a layer's activation if it is plain GELU, otherwise None."""
    if activation is F.gelu:
        return "none"
    return activation.approximate if type(activation) is nn.GELU and not is_observed(activation) else None


@dataclass(frozen=True)
class EncoderLayer(Layer):
    """`torch.nn.TransformerEncoderLayer`."""

    takes = split_names("src src_mask src_key_padding_mask is_causal")
    blocks = ("_sa_block", "_ff_block")
    attentions = ("self_attn",)
    run = _encoder_layer


@dataclass(frozen=True)
class DecoderLayer(Layer):
    """`torch.nn.TransformerDecoderLayer`."""

    takes = split_names(
        "tgt memory tgt_mask memory_mask tgt_key_padding_mask memory_key_padding_mask tgt_is_causal memory_is_causal"
    )
    blocks = ("_sa_block", "_mha_block", "_ff_block")
    attentions = ("self_attn", "multihead_attn")
    run = _decoder_layer


@dataclass(frozen=True)
class Encoder(TorchModule):
    """`torch.nn.TransformerEncoder`, whose forward hands bool masks on and packs padded tokens."""

    takes = split_names("src mask src_key_padding_mask is_causal")

    def why_not(self, module: nn.Module) -> str | None:
        encoder: Any = module
        for layer in encoder.layers:
            if not isinstance(layer, nn.TransformerEncoderLayer):
                return f"its layers are {type(layer).__name__}, which are no torch.nn.TransformerEncoderLayer"
        return None

    def ops(self, module: nn.Module) -> tuple[str, ...]:
        return ("flash_attention", *_norms(module.children()))

    def members(self, original: type) -> dict[str, Any]:
        return {"forward": _encoder}


def _encoder(
    self: Any,
    src: Tensor,
    mask: Tensor | None = None,
    src_key_padding_mask: Tensor | None = None,
    is_causal: bool | None = None,
) -> Tensor:
    packed = seen = None
    if src.is_nested:
        packed = pack("src", src) if mask is None and src_key_padding_mask is None and _all_pack(self) else None
    else:
        seen = _tokens(self, src, mask, src_key_padding_mask)
        # A layer that is not patched may count on floating masks, one with hooks on nested tensors.
        if not all(_is_patched(layer) for layer in self.layers) or (seen is not None and not _all_pack(self)):
            out: Tensor = self._foundry_original.forward(self, src, mask, src_key_padding_mask, is_causal)
            return out
        packed = None if seen is None else pack_padded(src, seen.sum(1), seen)
    if packed is None:
        # Reading the mask would break the graph in two.
        if is_causal is None and torch.compiler.is_compiling():
            is_causal = False
        length = None if src.is_nested else src.shape[1 if self.layers[0].self_attn.batch_first else 0]
        causal = _detect_is_causal_mask(mask, is_causal, length)
        for layer in self.layers:
            src = layer(src, src_mask=mask, is_causal=causal, src_key_padding_mask=src_key_padding_mask)
        return _normalized(self.norm, src)
    for layer in self.layers:
        packed = packed._replace(tokens=_packed_layer(layer, packed))
    if src.is_nested:
        return _normalized(self.norm, nest_like(packed.tokens, packed, src))
    return _normalized(self.norm, src.new_zeros(src.shape).index_put((seen,), packed.tokens))


def _normalized(norm: nn.Module | None, x: Tensor) -> Tensor:
    if norm is None or not x.is_nested:
        return x if norm is None else norm(x)
    packed = pack("src", x)
    return nest_like(norm(packed.tokens), packed, x)


def _tokens(encoder: Any, src: Tensor, mask: Tensor | None, padding: Tensor | None) -> Tensor | None:
    """Which of src ``[B, T, E]`` are no padding, ``[B, T]``, where PyTorch leaves that out of its computation: in
    inference, if padding is at the end of rows alone and the encoder may use nested tensors; else None."""
    if padding is None or mask is not None or src.dim() != 3 or padding.shape != src.shape[:2]:
        return None
    if not getattr(encoder, "use_nested_tensor", False) or not torch.backends.mha.get_fastpath_enabled():
        return None
    first = encoder.layers[0]
    if first.training or torch.compiler.is_compiling() or autocast_dtype(src) is not None:
        return None
    if torch.is_grad_enabled() and (src.requires_grad or any(p.requires_grad for p in first.parameters())):
        return None
    if padding.dtype == torch.bool:
        seen = ~padding
    else:
        seen = padding == 0
        if not torch.equal(seen, padding != -torch.inf):  # it biases some keys, and hides none or others
            return None
    at_end = seen == (torch.arange(src.shape[1], device=src.device) < seen.sum(1, keepdim=True))
    return seen if at_end.all() else None


def _all_pack(encoder: Any) -> bool:
    return all(_packs(layer) and not any(is_observed(m) for m in layer.modules()) for layer in encoder.layers)


def _is_patched(layer: Any) -> bool:
    return "_foundry" in vars(layer) and isinstance(layer._foundry_row, EncoderLayer)


def _packs(layer: Any) -> bool:
    """Whether a layer is a patched one and nothing more, with attention that takes packed sequences."""
    attention = layer.self_attn
    return (
        _is_patched(layer)
        and type(layer)._foundry_class is type(layer)
        and layer._compiled_call_impl is None
        and isinstance(attention, MultiheadAttention)
        and attention.bias_k is None
        and not attention.add_zero_attn
    )


def _packed_layer(layer: Any, packed: Packed) -> Tensor:
    """The layer's result for packed tokens ``[total, E]``."""
    _, cu_seqlens, max_seqlen = packed
    attend = partial(layer.self_attn.forward_packed, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen)
    return _run(layer, packed.tokens, _encoder_blocks(layer, attend))


#: Class (module, name) -> its adapter.
TORCH: dict[tuple[str, str], Adapter] = {
    ("torch.nn.modules.normalization", "RMSNorm"): TorchNorm(),
    ("torch.nn.modules.normalization", "LayerNorm"): TorchNorm("layer_norm"),
    ("torch.nn.modules.activation", "MultiheadAttention"): TorchAttention(),
    ("torch.nn.modules.transformer", "TransformerEncoderLayer"): EncoderLayer(),
    ("torch.nn.modules.transformer", "TransformerDecoderLayer"): DecoderLayer(),
    ("torch.nn.modules.transformer", "TransformerEncoder"): Encoder(),
}
