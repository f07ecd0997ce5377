"""Checks the arguments of a model's call, and combines what limits the positions that attention sees."""

from __future__ import annotations

import torch
from torch import Tensor

from foundry_kernels.core.checks import check_device, check_int, check_integer, check_rank, check_shape, check_tensor
from foundry_kernels.models.cache import KVCache
from foundry_kernels.models.call import Call, Positions
from foundry_kernels.models.config import ModelConfig
from foundry_kernels.models.context import Context
from foundry_kernels.models.model import Model
from foundry_kernels.models.paged_cache import PagedBatch
from foundry_kernels.models.validate import check_linear_layers
from foundry_kernels.nn._masks import add_bias, check_masks, hide_padding, packed_positions
from foundry_kernels.ops.flash_attention.attention_mask import AttentionMask
from foundry_kernels.ops.flash_attention.checks import check_lengths


def read_call(model: Model, call: Call) -> tuple[Tensor | AttentionMask | None, Positions | None]:
    """Checks a call, and returns the mask and the positions for the attention of every block; both None in a plain
    call. The mask includes relative positions and padding. A cache in pages has its own positions."""
    config, weight, shard, cache = model.config, model.tok_embeddings.weight, model.sequence_shard, call.cache
    if shard is None:
        check_tokens(call, config, weight)
    else:
        shard.check(call, config, weight)
    if isinstance(cache, KVCache):
        cache.check(call.tokens, model._key_dtype(), config.n_layers)
    if call.targets is not None:
        _check_targets(call.targets, call, config)
    if call.token_types is not None:
        _check_types(call.token_types, call, config)
    check_context(call.context, call.context_lengths, call.tokens.shape[0], weight, config)
    _check_combination(model, call)
    if isinstance(cache, PagedBatch):
        return None, None
    if shard is not None:
        return None, shard.positions(call)
    attn_mask, relative, count = call.attn_mask, model.relative_bias, call.tokens.shape[1]
    if attn_mask is not None or call.lengths is not None or relative is not None:
        keys = count if cache is None else cache.length + count
        shape = call.tokens.shape[0], config.n_heads, count, keys
        check_masks(attn_mask, call.lengths, call.cu_seqlens, shape, weight, "the model")
        if relative is not None:
            attn_mask = add_bias(relative(count, keys), attn_mask)
        if call.lengths is not None:
            attn_mask = hide_padding(attn_mask, call.lengths, keys)
        return attn_mask, None
    if call.cu_seqlens is None:
        return None, None
    return None, Positions(packed_positions(call.cu_seqlens, count), call.cu_seqlens, call.max_seqlen)


def _check_combination(model: Model, call: Call) -> None:
    """Checks what masks, lengths, packed sequences and a cache exclude."""
    cache, relative = call.cache, model.relative_bias is not None
    masked = call.attn_mask is not None or call.lengths is not None or relative
    stored = cache.cache if isinstance(cache, PagedBatch) else cache
    if stored is not None:
        check_linear_layers(model.config, stored.linear_layers)
    if model.config.linear_layers:
        if call.attn_mask is not None:
            raise ValueError("attn_mask must be None: linear attention, which layer_types has, takes no mask")
        if call.lengths is not None and cache is not None:
            raise ValueError(
                "lengths and cache exclude each other with linear attention, whose state would take in the padding"
            )
    if isinstance(cache, PagedBatch) and masked:
        raise ValueError("PagedKVCache does not support attn_mask, lengths or relative positions")
    if relative and call.cu_seqlens is not None:
        raise ValueError("cu_seqlens does not support relative positions")


def check_tokens(call: Call, config: ModelConfig, weight: Tensor) -> None:
    """Checks that tokens fit the model and, if they are packed, the starts of sequences. weight: the embedding's."""
    tokens, cache, max_seqlen = call.tokens, call.cache, call.max_seqlen
    check_integer("tokens", tokens, 2, "[B, T]")
    if tokens.shape[1] == 0:
        raise ValueError(f"tokens must hold at least one position; got shape {tuple(tokens.shape)}")
    if tokens.device != weight.device:
        raise ValueError(f"tokens must be on the model's device {weight.device}; got {tokens.device}")
    if cache is not None and not config.causal:
        raise ValueError("cache needs causal=True: every position of an encoder sees the last one")
    if call.cu_seqlens is not None:
        _check_packed(call.cu_seqlens, call, config)
        return
    if max_seqlen is not None:
        raise ValueError(f"max_seqlen needs cu_seqlens; got max_seqlen={max_seqlen} alone")
    start = 0 if cache is None else cache.length
    if ends_before(start + tokens.shape[1], config):
        cached = f" behind {start} cached ones" if start else ""
        raise ValueError(f"tokens hold {tokens.shape[1]} positions{cached}; {table_of(config)}")


def ends_before(length: int, config: ModelConfig) -> bool:
    """Whether `length` exceeds the model's positions. Only learned positions are limited."""
    return config.positions == "learned" and length > config.max_seq_len


def table_of(config: ModelConfig) -> str:
    return f"max_seq_len is {config.max_seq_len}, the length of the table of learned positions"


def _check_packed(cu_seqlens: Tensor, call: Call, config: ModelConfig) -> None:
    tokens, max_seqlen = call.tokens, call.max_seqlen
    check_integer("cu_seqlens", cu_seqlens, 1, "[N + 1]")
    check_device("cu_seqlens", cu_seqlens, "tokens", tokens)
    if isinstance(call.cache, KVCache):
        raise ValueError("cu_seqlens and cache exclude each other unless it is a PagedKVCache; got both")
    if tokens.shape[0] != 1:
        raise ValueError(f"tokens must be [1, total] with cu_seqlens; got shape {tuple(tokens.shape)}")
    total = tokens.shape[1]
    if max_seqlen is not None:
        check_int("max_seqlen", max_seqlen, 1)
    longest = min(total, total if max_seqlen is None else max_seqlen)
    if values_known(tokens):
        check_lengths("cu_seqlens", cu_seqlens, "max_seqlen", longest, total)
        longest = int(cu_seqlens.diff().max()) if type(cu_seqlens) is Tensor else longest
    elif max_seqlen is None:
        return  # the lengths are on a GPU; reading them would synchronize
    if ends_before(longest, config):
        raise ValueError(f"cu_seqlens hold a sequence of {longest} positions; {table_of(config)}")


def _check_targets(targets: Tensor, call: Call, config: ModelConfig) -> None:
    tokens = call.tokens
    check_integer("targets", targets)
    if not config.head:
        raise ValueError("targets need a model with an output projection; its configuration has head=False")
    if call.last_only:
        raise ValueError("targets need the logits of all positions; got last_only=True")
    if targets.shape != tokens.shape:
        raise ValueError(f"targets must have tokens' shape {tuple(tokens.shape)}; got {tuple(targets.shape)}")
    if targets.device != tokens.device:
        raise ValueError(f"targets must be on the model's device {tokens.device}; got {targets.device}")
    if values_known(targets):
        check_range("targets", targets[targets != call.ignore_index], config.vocab_size)


def _check_types(token_types: Tensor, call: Call, config: ModelConfig) -> None:
    check_integer("token_types", token_types)
    if not config.token_types:
        raise ValueError("token_types need a model whose configuration has token_types; its has 0")
    check_shape("token_types", token_types, tuple(call.tokens.shape), "one for each token")
    check_device("token_types", token_types, "tokens", call.tokens)
    if values_known(token_types):
        check_range("token_types", token_types, config.token_types)


def check_context(
    context: Tensor | Context | None, lengths: Tensor | None, rows: int | None, weight: Tensor, config: ModelConfig
) -> None:
    """rows: of the tokens, or None for `read_context`. weight: the embedding's."""
    if config.context_dim is None:
        if context is not None or lengths is not None:
            given = "context_lengths" if context is None else "context"
            raise ValueError(f"{given} needs a model with context_dim, whose layers attend to a context")
        return
    if isinstance(context, Context):
        if len(context.layers) != config.n_layers:
            raise ValueError(f"context has {len(context.layers)} layers; the model has {config.n_layers}")
        if lengths is not None:
            raise ValueError("context_lengths must be None: the context has been read with its own")
        batch = context.layers[0][0].shape[0]
    elif context is None:
        raise ValueError("context must be given: the layers of a model with context_dim attend to it")
    else:
        check_tensor("context", context)
        check_rank("context", context, 3, f"[B, S, {config.context_dim}]")
        if context.shape[-1] != config.context_dim:
            raise ValueError(f"context must have context_dim={config.context_dim} last; got {tuple(context.shape)}")
        check_device("context", context, "the model", weight)
        batch = context.shape[0]
        if lengths is not None:
            check_integer("context_lengths", lengths)
            check_shape("context_lengths", lengths, (batch,), "one for each context")
            check_device("context_lengths", lengths, "context", context)
    if rows is not None and batch != rows:
        raise ValueError(f"context must have the tokens' batch of {rows}; got {batch}")


def values_known(x: Tensor) -> bool:
    """Whether values can be read without synchronizing: on the CPU, not under tracing, and not for a fake tensor."""
    return x.is_cpu and not torch.compiler.is_compiling() and type(x) is Tensor


def check_range(name: str, tokens: Tensor, vocab_size: int) -> None:
    if tokens.numel() == 0:
        return
    low, high = (int(bound) for bound in torch.aminmax(tokens))
    if low < 0 or high >= vocab_size:
        raise ValueError(f"{name} must be in 0 .. {vocab_size - 1}; got {low if low < 0 else high}")
