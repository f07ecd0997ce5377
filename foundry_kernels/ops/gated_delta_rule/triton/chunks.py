"""Chunks of tokens: where they are, and what of each token the kernels read.

Tensors by chunk are [B, H_v, n_chunks, ...]. The lengths of packed documents are only on the device. There document n
has its first chunk at start // CHUNK + n, so that chunks never overlap; of tokens // CHUNK + documents, some are empty.

Names: b_ is a block of values, o_ offsets, m_ a mask.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Place(NamedTuple):
    """Where the rows of a chunk are."""

    batch: Any
    chunk: Any  # its number in tensors by chunk
    first: Any  # token
    n_rows: Any  # at most CHUNK; not positive in an empty chunk


@triton.jit
def document(n, cu_seqlens_ptr, tokens, CHUNK: tl.constexpr, VARLEN: tl.constexpr):
    """(batch, start, length, first chunk) of sequence n, clamped to the tokens, so that nothing outside is accessed."""
    if VARLEN:
        start = tl.minimum(tl.maximum(tl.load(cu_seqlens_ptr + n), 0), tokens).to(tl.int32)
        stop = tl.minimum(tl.maximum(tl.load(cu_seqlens_ptr + n + 1), 0), tokens).to(tl.int32)
        return n * 0, start, tl.maximum(stop - start, 0), start // CHUNK + n
    else:
        return n, n * 0, tokens, n * 0


@triton.jit
def place_of(i, cu_seqlens_ptr, n_documents, tokens, n_chunks, CHUNK: tl.constexpr, DOCUMENTS: tl.constexpr):
    """The `Place` of chunk i of all sequences. DOCUMENTS: a power of two, at least the number of packed documents, or 0
    for a dense batch."""
    if DOCUMENTS:
        o_n = tl.arange(0, DOCUMENTS)
        b_start = tl.load(cu_seqlens_ptr + o_n, mask=o_n < n_documents, other=0)
        b_chunk = tl.minimum(tl.maximum(b_start, 0), tokens).to(tl.int32) // CHUNK + o_n
        n = tl.sum(((o_n < n_documents) & (b_chunk <= i)).to(tl.int32), 0) - 1
        batch, start, length, chunk = document(tl.maximum(n, 0), cu_seqlens_ptr, tokens, CHUNK, True)
        done = (i - chunk) * CHUNK
        n_rows = tl.where(done < 0, 0, tl.minimum(length - done, CHUNK))
        return Place(batch.to(tl.int64), i.to(tl.int64), (start + done).to(tl.int64), n_rows)
    else:
        done = i % n_chunks * CHUNK
        n_rows = tl.minimum(tokens - done, CHUNK)
        return Place((i // n_chunks).to(tl.int64), (i % n_chunks).to(tl.int64), done.to(tl.int64), n_rows)


@triton.jit
def load_tile(ptr, stride, n_rows, n_cols, ROWS: tl.constexpr, COLS: tl.constexpr, WHOLE: tl.constexpr):
    """Values [ROWS, COLS] of rows `stride` apart; 0 from row n_rows and column n_cols on. WHOLE: all columns exist."""
    rows = tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, COLS)[None, :]
    m = rows < n_rows if WHOLE else (rows < n_rows) & (cols < n_cols)
    return tl.load(ptr + rows * stride + cols, mask=m, other=0.0)


@triton.jit
def store_tile(ptr, stride, b_x, n_rows, n_cols, ROWS: tl.constexpr, COLS: tl.constexpr, WHOLE: tl.constexpr):
    rows = tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, COLS)[None, :]
    m = rows < n_rows if WHOLE else (rows < n_rows) & (cols < n_cols)
    tl.store(ptr + rows * stride + cols, b_x, mask=m)


@triton.jit
def load_tokens(ptr, first, stride, n_rows, COMPUTE: tl.constexpr, CHUNK: tl.constexpr, other=0.0):
    """One value for each token [CHUNK]; `other` past the chunk's end. `other` everywhere without a pointer."""
    if ptr is None:
        return tl.full([CHUNK], other, COMPUTE)
    else:
        rows = tl.arange(0, CHUNK)
        o = (first + rows).to(tl.int64) * stride
        return tl.load(ptr + o, mask=rows < n_rows, other=other).to(COMPUTE)


class Decay(NamedTuple):
    """The sums of a chunk's log decays up to each token [CHUNK], each the sum of two numbers. Differences of the sums
    are as exact as sums of the decays between."""

    high: Any
    low: Any
    last_high: Any  # of the chunk's last token
    last_low: Any


@triton.jit
def load_decay(ptr, offset, size, n_rows, COMPUTE: tl.constexpr, CHUNK: tl.constexpr):
    """The `Decay` of the chunk whose first token is at `offset` in both halves, `size` apart, of the tensor.
    Without a tensor nothing decays."""
    if ptr is None:
        b_none = tl.zeros([CHUNK], COMPUTE)
        return Decay(b_none, b_none, tl.zeros([], COMPUTE), tl.zeros([], COMPUTE))
    else:
        rows = tl.arange(0, CHUNK)
        m = rows < n_rows
        last = tl.maximum(n_rows - 1, 0)
        last_high = tl.load(ptr + offset + last)
        last_low = tl.load(ptr + offset + size + last)
        b_high = tl.load(ptr + offset + rows, mask=m, other=0.0)
        b_low = tl.load(ptr + offset + size + rows, mask=m, other=0.0)
        # Past the end nothing decays.
        return Decay(tl.where(m, b_high, last_high), tl.where(m, b_low, last_low), last_high, last_low)


@triton.jit
def from_start(decay):
    """How much of the state at the chunk's start is left at each token."""
    return tl.exp(decay.high + decay.low)


@triton.jit
def to_end(decay):
    """How much of each token's update is left at the chunk's end."""
    return tl.exp((decay.last_high - decay.high) + (decay.last_low - decay.low))


@triton.jit
def of_chunk(decay):
    return tl.exp(decay.last_high + decay.last_low)


@triton.jit
def between(decay, STRICT: tl.constexpr, CHUNK: tl.constexpr):
    """[CHUNK, CHUNK]: how much of the update of token j is left at token i; 0 for j > i and, if STRICT, for j = i."""
    rows = tl.arange(0, CHUNK)
    m = rows[:, None] > rows[None, :] if STRICT else rows[:, None] >= rows[None, :]
    b_sum = (decay.high[:, None] - decay.high[None, :]) + (decay.low[:, None] - decay.low[None, :])
    return tl.where(m, tl.exp(tl.where(m, b_sum, 0.0)), 0.0)
