"""Checks of what a model is called with, before it computes anything."""

from __future__ import annotations

import torch
from torch import Tensor

from foundry_kernels.core.checks import check_device, check_int, check_integer, check_rank
from foundry_kernels.models.cache import KVCache
from foundry_kernels.models.config import ModelConfig
from foundry_kernels.ops.flash_attention.checks import check_lengths


def check_tokens(
    tokens: Tensor,
    cache: KVCache | None,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
    config: ModelConfig,
    weight: Tensor,
) -> None:
    """Tokens that fit the model and, if they are packed, the places where sequences begin. weight: of the embedding."""
    check_integer("tokens", tokens)
    check_rank("tokens", tokens, 2, "[B, T]")
    if tokens.shape[1] == 0:
        raise ValueError(f"tokens must hold at least one position; got shape {tuple(tokens.shape)}")
    if tokens.device != weight.device:
        raise ValueError(f"tokens must be on the model's device {weight.device}; got {tokens.device}")
    if cu_seqlens is not None:
        _check_packed(tokens, cache, cu_seqlens, max_seqlen, config.max_seq_len)
        return
    if max_seqlen is not None:
        raise ValueError(f"max_seqlen needs cu_seqlens; got max_seqlen={max_seqlen} alone")
    start = 0 if cache is None else cache.length
    if start + tokens.shape[1] > config.max_seq_len:
        cached = f" behind {start} cached ones" if start else ""
        learned = ", the length of the table of learned positions" if config.positions == "learned" else ""
        raise ValueError(
            f"tokens hold {tokens.shape[1]} positions{cached}; max_seq_len is {config.max_seq_len}{learned}"
        )


def _check_packed(
    tokens: Tensor, cache: KVCache | None, cu_seqlens: Tensor, max_seqlen: int | None, max_seq_len: int
) -> None:
    check_integer("cu_seqlens", cu_seqlens)
    check_rank("cu_seqlens", cu_seqlens, 1, "[N + 1]")
    check_device("cu_seqlens", cu_seqlens, "tokens", tokens)
    if cache is not None:
        raise ValueError("cu_seqlens and cache exclude each other; got both")
    if tokens.shape[0] != 1:
        raise ValueError(f"tokens must be [1, total] with cu_seqlens; got shape {tuple(tokens.shape)}")
    total = tokens.shape[1]
    if max_seqlen is not None:
        check_int("max_seqlen", max_seqlen, 1)
    longest = min(total, total if max_seqlen is None else max_seqlen)
    if tokens.is_cpu and not torch.compiler.is_compiling():
        check_lengths("cu_seqlens", cu_seqlens, "max_seqlen", longest, total)
        longest = int(cu_seqlens.diff().max())
    elif max_seqlen is None:
        return  # the lengths are on a GPU, and whoever waits for them is the caller
    if longest > max_seq_len:
        raise ValueError(f"cu_seqlens hold a sequence of {longest} positions; max_seq_len is {max_seq_len}")


def check_targets(targets: Tensor, tokens: Tensor, last_only: bool, ignore_index: int, vocab_size: int) -> None:
    check_integer("targets", targets)
    if last_only:
        raise ValueError("targets need the logits of all positions; got last_only=True")
    if targets.shape != tokens.shape:
        raise ValueError(f"targets must have tokens' shape {tuple(tokens.shape)}; got {tuple(targets.shape)}")
    if targets.device != tokens.device:
        raise ValueError(f"targets must be on the model's device {tokens.device}; got {targets.device}")
    if tokens.device.type == "cpu" and not torch.compiler.is_compiling():
        check_range("targets", targets[targets != ignore_index], vocab_size)


def check_range(name: str, tokens: Tensor, vocab_size: int) -> None:
    if tokens.numel() == 0:
        return
    low, high = (int(bound) for bound in torch.aminmax(tokens))
    if low < 0 or high >= vocab_size:
        raise ValueError(f"{name} must be in 0 .. {vocab_size - 1}; got {low if low < 0 else high}")
