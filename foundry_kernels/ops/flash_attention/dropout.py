"""Which weights of attention dropout keeps, in plain PyTorch.

A weight is decided by its batch n, query head h, query i and key j, counted from 0 in their own sequence, and by a seed
of 64 bits, the key of Philox4x32-10 (`foundry_kernels.core.dropout`). The counter

    ((j // 32) * 8 + j % 8, (i // 16) * 8 + i % 8, h, n)

gives four words, of which word ``j // 8 % 4`` decides about key j: by its lower half for queries with ``i // 8`` even,
by its upper half for the others. So one counter decides about the queries i and i + 8 with the keys j, j + 8, j + 16
and j + 24, which the matrix instructions of GPUs leave in the registers of one thread, and 8 keys in a row are a byte
of a register's comparison on a CPU. A weight is kept where its 16 bits are at least ``threshold``, and is then
multiplied by ``2^16 / (2^16 - threshold)``: p is rounded to a multiple of 2^-16, and the expectation is exact.

The mask depends on no tile, backend, number of threads or other sequence, and nothing but the seed is kept of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foundry_kernels.core.dropout import philox4x32

_LOW = 0xFFFFFFFF


def threshold(dropout_p: float) -> int:
    """The least 16 bits that keep a weight."""
    return min(round(dropout_p * 65536), 65535)


def keep_scale(dropout_p: float) -> float:
    """What kept weights are multiplied by, a float32."""
    return float(torch.tensor(65536 / (65536 - threshold(dropout_p)), dtype=torch.float32, device="cpu"))


def _words(key: Tensor, query: Tensor, head: Tensor, batch: Tensor, seed: Tensor) -> tuple[Tensor, ...]:
    """The four words of the counters of these parts, which broadcast."""
    seed = seed.reshape(())
    return philox4x32((key, query, head, batch), (seed & _LOW, seed >> 32 & _LOW))


def keep_pairs(query: Tensor, key: Tensor, head: Tensor, batch: Tensor, dropout_p: float, seed: Tensor) -> Tensor:
    """Whether the weight of each pair is kept; all are int64 tensors that broadcast. It takes eight times as long as
    `keep_mask`, but the pairs may be any."""
    w0, w1, w2, w3 = _words(key // 32 * 8 + key % 8, query // 16 * 8 + query % 8, head, batch, seed)
    which = key // 8 % 4
    word = torch.where(which < 2, torch.where(which == 0, w0, w1), torch.where(which == 2, w2, w3))
    return (word >> 16 * (query // 8 % 2) & 0xFFFF) >= threshold(dropout_p)


def keep_mask(shape: tuple[int, int, int, int], dropout_p: float, seed: Tensor, heads: Tensor | None = None) -> Tensor:
    """Which weights ``[B, H, T, S]`` are kept. heads: ``[B, H]``, the number ``batch << 32 | head`` of each head, or
    None for 0, 1, .. of both."""
    n_batch, n_heads, n_queries, n_keys = shape
    device = seed.device

    def count(n: int) -> Tensor:
        return torch.arange(n, device=device)

    heads = (count(n_batch)[:, None] << 32) + count(n_heads) if heads is None else heads
    heads = heads[:, :, None, None]
    queries, keys = count((n_queries + 15) // 16 * 8)[:, None], count((n_keys + 31) // 32 * 8)
    words = torch.stack(_words(keys, queries, heads & _LOW, heads >> 32, seed), -1)  # [B, H, queries, keys, 4]
    halves = torch.stack((words & 0xFFFF, words >> 16), -1) >= threshold(dropout_p)
    halves = halves.unflatten(2, (-1, 8)).unflatten(4, (-1, 8))  # [B, H, T / 16, 8, S / 32, 8, 4, 2]
    kept = halves.permute(0, 1, 2, 7, 3, 4, 6, 5).reshape(n_batch, n_heads, 2 * queries.shape[0], 4 * keys.shape[0])
    return kept[:, :, :n_queries, :n_keys]
