"""Runs whole blocks in one call, for decoding few rows with a cache on the CPU.

In decoding, a block's matmuls are bound by reading its weights. The overhead between them takes a third of that time:
calls of modules and operators, and a dozen wake-ups of threads. The operator `decode_block` runs the same kernels, with
the same bits, in one parallel region. Python checks all blocks before running the first one, while the code of the
checks is in the processor's caches. Nothing is cached between calls.

It supports the usual blocks, which `decode_all` lists. Any other block runs part by part. So does a block whose parts
may be observed or replaced: by a hook, a subclass, a torch mode or an `override`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from foundry_kernels.core import invariance
from foundry_kernels.core.registry import OPS
from foundry_kernels.models.cache import KVCache
from foundry_kernels.models.paged_cache import PagedForward
from foundry_kernels.nn import Attention, GatedMLP, RMSNorm, RotaryEmbedding, SwiGLU
from foundry_kernels.nn._layers import is_observed, is_plain
from foundry_kernels.nn._linear_layers import DTYPES, MISSING, PLAIN, KeyValueMemory, decodes, most_rows, whole_tables
from foundry_kernels.nn._paged import PagedKeyValues

if MISSING is None:
    from foundry_kernels.ops.decode_linear.native import decode_block, decode_blocks_direct

#: The operator's name of each gated activation.
_ACTIVATIONS = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "glu": "sigmoid", "reglu": "relu"}
_NATIVE = ("auto", "native")
#: The operations that the operator runs besides matmuls.
_PARTS = tuple(
    OPS[name] for name in ("rms_norm", "add_rms_norm", "rope", "flash_attention", "swiglu", "geglu", "glu", "reglu")
)


def decode_all(
    blocks: Iterable[Any], kind: type[Any], stream: Tensor, cache: KVCache | PagedForward
) -> tuple[Tensor, Tensor] | None:
    """Returns branch and stream of the last of a model's `blocks` and appends keys and values to the cache; None if the
    blocks must be called.

    It supports few rows on the CPU (with a cache in pages, one token of each sequence), without gradients, autocast or
    transforms (`decodes`), outside of `fk.batch_invariant` and torch.compile (which traces block by block, without
    pages). All blocks must be of the class `kind` itself, with

    - two :class:`RMSNorm` over one dimension, with weights and the same options;
    - causal self-attention (:class:`Attention`) with a :class:`RotaryEmbedding`, without norms or slopes;
    - a :class:`GatedMLP`;
    - `nn.Linear` without biases, and no dropout in training;
    - no factors on branches, native kernels, and no hooks on any module.
    """
    found = _all_arguments(blocks, kind, stream, cache)
    if found is None:
        return None
    # None again if torch, or one of the tensors, is in an unusual state.
    pair: tuple[Tensor, Tensor] | None = decode_blocks_direct("auto", None, stream, found)
    return pair


def in_one_call(blocks: Iterable[Any], kind: type[Any], stream: Tensor, cache: KVCache) -> bool:
    """Whether `decode_all` supports these blocks."""
    return _all_arguments(blocks, kind, stream, cache) is not None


def _all_arguments(
    blocks: Iterable[Any], kind: type[Any], stream: Tensor, cache: KVCache | PagedForward
) -> list[tuple[Any, ...]] | None:
    """The operator's arguments of all blocks; None if the blocks must be called."""
    if torch.compiler.is_compiling() or not _continues(stream, paged=not isinstance(cache, KVCache)):
        return None
    found: list[tuple[Any, ...]] = []
    tables: dict[RotaryEmbedding, Any] = {}
    for index, block in enumerate(blocks):
        plain = type(block) is kind and not is_observed(block)
        arguments = _arguments(block, stream, cache.layer(index), tables) if plain else None
        if arguments is None:
            return None
        found.append(arguments)
    return found


def decode(block: nn.Module, branch: Tensor | None, stream: Tensor, cache: Any) -> tuple[Tensor, Tensor] | None:
    """Computes one block as `decode_all` does, also under torch.compile."""
    paged = isinstance(cache, PagedKeyValues)
    if not _continues(stream, paged) or (paged and torch.compiler.is_compiling()):
        return None
    found = _arguments(block, stream, cache, {})
    if found is None:
        return None
    if not torch.compiler.is_compiling():
        pair: tuple[Tensor, Tensor] | None = decode_blocks_direct("auto", branch, stream, [found])
        return pair
    weights, norms, (cos, sin, k, v, *options) = list(found[:7]), list(found[7:9]), found[9:]
    attention: Any = block.attention
    if not _fit(branch, stream, weights, norms, attention, options[2]):
        return None
    return decode_block(branch, stream, weights, norms, cos, sin, k, v, *options)


def _continues(stream: Tensor, paged: bool) -> bool:
    """Whether the operator may be called at all."""
    if MISSING is not None or invariance.on or not all(part.native_on_cpu for part in _PARTS):
        return False
    return decodes(stream, most_rows()) if paged else decodes(stream)


def _arguments(
    block: nn.Module, stream: Tensor, cache: Any, tables: dict[RotaryEmbedding, Any]
) -> tuple[Any, ...] | None:
    """The operator's arguments besides branch and stream, with separate weights and norms; None for an unsupported
    block. `tables` are those of earlier blocks of the call.

    For speed, submodules and weights are read from `nn.Module`'s dicts and not by attribute."""
    parts = block._modules
    attention: Any = parts.get("attention")
    feed_forward: Any = parts.get("feed_forward")
    norm: Any = parts.get("attention_norm")
    second: Any = parts.get("ffn_norm")
    if type(attention) is not Attention:
        return None
    if type(feed_forward) is not SwiGLU and type(feed_forward) is not GatedMLP:
        return None
    if is_observed(attention) or is_observed(feed_forward) or not _norms_alike(norm, second):
        return None
    inner, outer = attention._modules, feed_forward._modules
    rope = inner.get("rope")
    if type(rope) is not RotaryEmbedding or is_observed(rope) or not _attends_plainly(attention):
        return None
    if block.scaled or feed_forward.gate_options:
        return None
    if block.training and (block.dropout or attention.dropout or feed_forward.dropout):
        return None
    names = attention.backends["flash_attention"], rope.backends["rope"], feed_forward.backends[feed_forward.op]
    if names != ("auto", "auto", "auto") and not all(name in _NATIVE for name in names):
        return None
    layers = [*map(inner.get, ("wq", "wk", "wv", "wo")), *map(outer.get, ("w1", "w3", "w2"))]
    for layer in layers:
        if layer is None or not is_plain(layer):
            return None
    if stream.dim() != 3 or stream.shape[-1] != attention.dim:
        return None
    step = None
    if isinstance(cache, PagedKeyValues):
        step, k, v, start = cache.step, cache.k, cache.v, 0
        if step.max_seqlen_q != 1 or len(step.seqused_k) != len(step.page):
            return None
        end = step.max_seqlen_k
    elif isinstance(cache, KeyValueMemory):
        start = cache.length
        end = start + stream.shape[1]
    else:
        return None
    if (found := tables.get(rope)) is None:
        found = tables[rope] = whole_tables(rope, end)
    if found is None:
        return None
    if step is None:
        k, v = cache.memory(stream, attention.n_kv_heads, attention.head_dim)
    scale, window = attention.scale, attention.sliding_window
    return (
        *[layer._parameters.get("weight") for layer in (*layers, norm, second)], *found, k, v,
        torch.finfo(torch.float32).eps if norm.eps is None else norm.eps, norm.weight_offset, norm.round_before_weight,
        rope.interleaved, attention.n_heads, start, attention.head_dim**-0.5 if scale is None else scale,
        None if window is None else window - 1, _ACTIVATIONS[feed_forward.activation],
        None if step is None else step.block_table, None if step is None else step.seqused_k,
    )  # fmt: skip


def _norms_alike(first: Any, second: Any) -> bool:
    """Whether both are RMSNorms over one dimension, with weights and the same options, on native kernels."""
    return (
        type(first) is RMSNorm
        and type(second) is RMSNorm
        and not is_observed(first)
        and not is_observed(second)
        and first.elementwise_affine
        and second.elementwise_affine
        and len(first.normalized_shape) == 1
        and first.normalized_shape == second.normalized_shape
        and first.eps == second.eps
        and first.weight_offset == second.weight_offset
        and first.round_before_weight == second.round_before_weight
        and first.backends["rms_norm"] in _NATIVE
        and first.backends["add_rms_norm"] in _NATIVE
        and second.backends["add_rms_norm"] in _NATIVE
    )


def _attends_plainly(attention: Attention) -> bool:
    """Whether it is plain causal self-attention."""
    return (
        attention.causal
        and attention.attend is None
        and attention.alibi is None
        and attention.wg is None
        and attention.q_norm is None
        and attention.k_norm is None
        and attention.context_dim == attention.dim
    )


def _fit(
    branch: Tensor | None,
    stream: Tensor,
    weights: list[Tensor],
    norms: list[Tensor],
    attention: Attention,
    round_before_weight: bool,
) -> bool:
    """Whether the operator supports these fake tensors. For real tensors its direct call checks this."""
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
