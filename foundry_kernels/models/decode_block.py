"""A whole block in one call, where few rows continue a cache on the CPU.

In decoding a block's products read its weights as fast as memory gives them, and what lies between them takes as long
as a quarter of that: calls of modules and operators, and threads that are woken a dozen times. The operator
`decode_block` runs the same kernels, with the same bits, in one parallel region. Nothing is kept between calls.

It is for what a block usually is, which is listed here (`decode`): all else is called part by part, as it is wherever
someone may want to see a part: a hook, a subclass, a mode of torch, an implementation that a test has replaced.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foundry_kernels.core import invariance
from foundry_kernels.core.registry import OPS
from foundry_kernels.nn import Attention, GatedMLP, RMSNorm, RotaryEmbedding, SwiGLU
from foundry_kernels.nn._decode import DTYPES, MISSING, PLAIN, KeyValueMemory, decodes
from foundry_kernels.nn._layers import is_observed, is_plain

if TYPE_CHECKING:
    from foundry_kernels.models.blocks import TransformerBlock

if MISSING is None:
    from foundry_kernels.ops.decode_linear.native import decode_block, decode_block_direct

_FEED_FORWARDS = (GatedMLP, SwiGLU)
#: By the name of a gated activation, what the operator calls it.
_ACTIVATIONS = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "glu": "sigmoid", "reglu": "relu"}
_NATIVE = ("auto", "native")
#: What the operator does beside its products; a gate's operation is looked up by its name.
_PARTS = tuple(OPS[name] for name in ("rms_norm", "add_rms_norm", "rope", "flash_attention"))


def decode(block: TransformerBlock, branch: Tensor | None, stream: Tensor, cache: Any) -> tuple[Tensor, Tensor] | None:
    """Returns the block's branch and stream, its new keys and values in `cache`; None where its parts are to be called.

    Taken are few rows on the CPU without gradients (`decodes`) with a :class:`KVCache`, outside of
    `fk.batch_invariant`, of a block of two RMSNorms with weights, causal self-attention with rotated queries and keys,
    and a gated feed-forward, all of this package's own classes, without biases, norms of queries and keys, slopes,
    dropout or hooks, on native kernels.
    """
    if MISSING is not None or invariance.on or not isinstance(cache, KeyValueMemory):
        return None
    attention, feed_forward, norms = block.attention, block.feed_forward, (block.attention_norm, block.ffn_norm)
    if type(attention) is not Attention or type(feed_forward) not in _FEED_FORWARDS:
        return None
    rope = attention.rope
    if type(rope) is not RotaryEmbedding or not _norms_alike(*norms) or not _attends_plainly(attention):
        return None
    if (block.training and _drops(block, attention, feed_forward)) or not _on_native(attention, feed_forward, *norms):
        return None
    if any(is_observed(module) for module in (attention, feed_forward, rope, *norms)):
        return None
    layers = (attention.wq, attention.wk, attention.wv, attention.wo, feed_forward.w1, feed_forward.w3, feed_forward.w2)
    if not all(map(is_plain, layers)) or not decodes(stream) or stream.shape[-1] != attention.dim:
        return None
    tracing, start = torch.compiler.is_compiling(), cache.length
    end = start + stream.shape[1]
    if end > rope.cos.shape[0] and (rope.follows_length or tracing):
        return None  # a few rows are computed for this call alone
    cos, sin = rope.reserve(end)
    k, v = cache.memory(stream, attention.n_kv_heads, attention.head_dim)
    norm, window = norms[0], attention.sliding_window
    weights, norm_weights = [layer.weight for layer in layers], [each.weight for each in norms]
    options = (
        torch.finfo(torch.float32).eps if norm.eps is None else norm.eps, norm.weight_offset, norm.round_before_weight,
        rope.interleaved, attention.n_heads, start,
        attention.head_dim**-0.5 if attention.scale is None else attention.scale,
        None if window is None else window - 1, _ACTIVATIONS[feed_forward.activation],
    )  # fmt: skip
    if not tracing:  # None again where torch, or one of the tensors, is in another state than usual
        return decode_block_direct("auto", branch, stream, *weights, *norm_weights, cos, sin, k, v, *options)
    if not _fit(branch, stream, weights, norm_weights, attention, norm.round_before_weight):
        return None
    return decode_block(branch, stream, weights, norm_weights, cos, sin, k, v, *options)


def _norms_alike(first: Any, second: Any) -> bool:
    """Whether both are RMSNorms of vectors with weights, of the same options."""
    return (
        type(first) is RMSNorm
        and type(second) is RMSNorm
        and first.elementwise_affine
        and second.elementwise_affine
        and len(first.normalized_shape) == 1
        and first.normalized_shape == second.normalized_shape
        and first.eps == second.eps
        and first.weight_offset == second.weight_offset
        and first.round_before_weight == second.round_before_weight
    )


def _attends_plainly(attention: Attention) -> bool:
    """Whether it is causal attention of x to itself, of rotated queries and keys and nothing besides."""
    return (
        attention.causal
        and attention.attend is None
        and attention.alibi is None
        and attention.q_norm is None
        and attention.k_norm is None
        and attention.context_dim == attention.dim
    )


def _drops(block: TransformerBlock, attention: Attention, feed_forward: GatedMLP) -> bool:
    return bool(block.dropout or attention.dropout or feed_forward.dropout)


def _on_native(attention: Attention, feed_forward: GatedMLP, *norms: RMSNorm) -> bool:
    """Whether calling the parts would run the native kernels."""
    assert attention.rope is not None
    return (
        all(part.native_on_cpu for part in _PARTS)
        and OPS[feed_forward.op].native_on_cpu
        and attention.backends["flash_attention"] in _NATIVE
        and attention.rope.backends["rope"] in _NATIVE
        and feed_forward.backends[feed_forward.op] in _NATIVE
        and all(backend in _NATIVE for norm in norms for backend in norm.backends.values())
    )


def _fit(
    branch: Tensor | None,
    stream: Tensor,
    weights: list[Tensor],
    norms: list[Tensor],
    attention: Attention,
    round_before_weight: bool,
) -> bool:
    """Whether the operator takes these tensors, which are fakes."""
    dim, hidden = stream.shape[-1], weights[4].shape[0]
    q_width, kv_width = (heads * attention.head_dim for heads in (attention.n_heads, attention.n_kv_heads))
    shapes = [(q_width, dim), *[(kv_width, dim)] * 2, (dim, q_width), *[(hidden, dim)] * 2, (dim, hidden)]
    floats = [stream.dtype] if round_before_weight else DTYPES
    return (
        all(type(t) in PLAIN and t.layout is torch.strided and t.is_cpu for t in (*weights, *norms))
        and all(t.dtype == stream.dtype for t in (*weights, *([] if branch is None else [branch])))
        and all(tuple(w.shape) == shape for w, shape in zip(weights, shapes, strict=True))
        and all(tuple(w.shape) == (dim,) and w.dtype in floats for w in norms)
    )
