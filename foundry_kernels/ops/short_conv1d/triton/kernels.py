"""The kernels of short_conv1d.

A program takes a chunk of the tokens of one row of the batch, and a tile of channels, and goes through the tokens in
order. A thread keeps its channels of the last tokens in registers, so each element is loaded once (and those of the
last W - 1 tokens again by the chunk after). UNROLL tokens are loaded at a time, before any result is stored.

Backward: a chunk also computes dz of the W - 1 tokens after it, which the gradients of its last tokens need. It sums
the gradients of the filter over its tokens into a row of the partial buffers; `sum_partials` adds these. There are no
atomics, so gradients are bitwise deterministic.

Names: a document is a row of the batch or, if `info_ptr` is given, packed with others in the only row: info_ptr [3, T]
holds the document of each token, its first token and its end. t is a token's index in the row; b_ is a block of
values, o_ offsets, m_ a mask. Tuples have a block for each tap or token.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foundry_kernels._triton.activations import activated, derivative, gate_factor
from foundry_kernels._triton.functions import round_to


@triton.jit
def _append(blocks, b_next):
    return blocks + (b_next,)  # noqa: RUF005  # Triton compiles no unpacking


@triton.jit
def _zeros(COUNT: tl.constexpr, BLOCK_COLS: tl.constexpr, dtype: tl.constexpr):
    blocks = ()
    for _ in tl.static_range(COUNT):
        blocks = _append(blocks, tl.zeros([BLOCK_COLS], dtype))
    return blocks


@triton.jit
def short_conv1d_info_kernel(cu_ptr, info_ptr, n_documents, length, n_steps, BLOCK: tl.constexpr):
    """Writes the document of each token, found by bisection, its first token and its end. Values that are not in order
    give wrong numbers, but a document always contains its token."""
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    low = tl.zeros([BLOCK], tl.int32)
    high = low + n_documents
    for _ in range(n_steps):
        middle = (low + high) // 2
        b_end = tl.load(cu_ptr + middle + 1, mask=low < high, other=0)
        before = (b_end <= t) & (low < high)
        high = tl.where(before, high, middle)
        low = tl.where(before, middle + 1, low)
    n = tl.minimum(low, tl.maximum(n_documents - 1, 0))
    some = n < n_documents
    first = tl.maximum(tl.load(cu_ptr + n, mask=some, other=0), 0)
    end = tl.minimum(tl.load(cu_ptr + n + 1, mask=some, other=0), length)
    tl.store(info_ptr + t, n, mask=t < length)
    tl.store(info_ptr + length + t, tl.minimum(first, t).to(tl.int32), mask=t < length)
    tl.store(info_ptr + 2 * length + t, tl.maximum(end, t + 1).to(tl.int32), mask=t < length)


@triton.jit
def _document(t, batch, info_ptr, length):
    """The document of a token, its first token and its end."""
    if info_ptr is None:
        return batch, 0, length
    else:
        info_ptr += tl.maximum(tl.minimum(t, length - 1), 0)
        return tl.load(info_ptr), tl.load(info_ptr + length), tl.load(info_ptr + 2 * length)


@triton.jit
def _filter(w_ptr, cols, m_cols, W: tl.constexpr, COMPUTE: tl.constexpr):
    """The filter's taps."""
    w = ()
    for j in tl.static_range(W):
        w = _append(w, tl.load(w_ptr + cols * W + j, mask=m_cols, other=0.0).to(COMPUTE))
    return w


@triton.jit
def _bias(bias_ptr, cols, m_cols, COMPUTE: tl.constexpr):
    if bias_ptr is None:
        return tl.zeros_like(cols).to(COMPUTE)
    else:
        return tl.load(bias_ptr + cols, mask=m_cols, other=0.0).to(COMPUTE)


@triton.jit
def _state_block(state_ptr, n, position, cols, mask, n_channels, W: tl.constexpr):
    """The inputs of a state at a position before the first token, -1 for the newest."""
    o_state = (tl.cast(n, tl.int64) * n_channels + cols) * (W - 1) + position + (W - 1)
    return tl.load(state_ptr + o_state, mask=mask & (position < 0), other=0.0)


@triton.jit
def _before(x_ptr, t, batch, cols, m_cols, info_ptr, state_ptr, length, n_channels, stride_t, W: tl.constexpr):
    """The W - 1 tokens before t: those of its document, and of its state."""
    n, first, _ = _document(t, batch, info_ptr, length)
    window = ()
    for j in tl.static_range(W - 1):
        earlier = t - (W - 1 - j)
        b_x = tl.load(x_ptr + tl.cast(earlier, tl.int64) * stride_t + cols, mask=m_cols & (earlier >= first), other=0.0)
        if state_ptr is not None:
            b_state = _state_block(state_ptr, n, earlier - first, cols, m_cols, n_channels, W)
            b_x = tl.where(earlier >= first, b_x, b_state)
        window = _append(window, b_x)
    return window


@triton.jit
def _with_tokens(window, x_ptr, t, cols, m_cols, length, stride_t, UNROLL: tl.constexpr):
    """`window` and the tokens from t on."""
    for r in tl.static_range(UNROLL):
        o_x = tl.cast(t + r, tl.int64) * stride_t
        window = _append(window, tl.load(x_ptr + o_x + cols, mask=m_cols & (t + r < length), other=0.0))
    return window


@triton.jit
def _last(window, START: tl.constexpr, COUNT: tl.constexpr):
    """COUNT blocks of a tuple, from START on."""
    kept = ()
    for j in tl.static_range(COUNT):
        kept = _append(kept, window[START + j])
    return kept


@triton.jit
def _taps(window, R: tl.constexpr, t, batch, info_ptr, state_ptr, cols, m_cols, length, n_channels, W: tl.constexpr,
          COMPUTE: tl.constexpr):  # fmt: skip
    """The inputs of the taps of token t, which is the R-th after the first W - 1 of the window. Of packed documents,
    those before the document are the state's."""
    n, first, _ = _document(t, batch, info_ptr, length)
    taps = ()
    for j in tl.static_range(W):
        b_x = window[R + j].to(COMPUTE)
        if info_ptr is not None and j < W - 1:
            position = t - first - (W - 1 - j)
            b_before = tl.zeros_like(b_x)
            if state_ptr is not None:
                b_before = _state_block(state_ptr, n, position, cols, m_cols, n_channels, W).to(COMPUTE)
            b_x = tl.where(position >= 0, b_x, b_before)
        taps = _append(taps, b_x)
    return taps


@triton.jit
def _convolved(taps, w, b_bias, W: tl.constexpr):
    b_z = b_bias
    for j in tl.static_range(W):
        b_z += w[j] * taps[j]
    return b_z


@triton.jit
def short_conv1d_fwd_kernel(
    x_ptr, w_ptr, bias_ptr, info_ptr, state_ptr, residual_ptr, y_ptr,
    n_channels, n_tiles, n_chunks, length, stride_b, stride_t, stride_rb, stride_rt,
    W: tl.constexpr, SILU: tl.constexpr, COMPUTE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """n_chunks: of a row of the batch."""
    cols = (tl.program_id(0) % n_tiles) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    m_cols = cols < n_channels
    chunk = tl.program_id(0) // n_tiles
    batch = (chunk // n_chunks).to(tl.int64)
    start = (chunk % n_chunks) * BLOCK_ROWS
    x_ptr += batch * stride_b
    y_ptr += batch * length * n_channels
    w = _filter(w_ptr, cols, m_cols, W, COMPUTE)
    b_bias = _bias(bias_ptr, cols, m_cols, COMPUTE)
    window = _before(x_ptr, start, batch, cols, m_cols, info_ptr, state_ptr, length, n_channels, stride_t, W)
    for t in range(start, tl.minimum(start + BLOCK_ROWS, length), UNROLL):
        window = _with_tokens(window, x_ptr, t, cols, m_cols, length, stride_t, UNROLL)
        for r in tl.static_range(UNROLL):
            taps = _taps(window, r, t + r, batch, info_ptr, state_ptr, cols, m_cols, length, n_channels, W, COMPUTE)
            b_z = _convolved(taps, w, b_bias, W)
            if SILU:
                b_z = activated(b_z, gate_factor(b_z, "silu"), "silu")
            row = tl.cast(t + r, tl.int64)
            mask = m_cols & (t + r < length)
            if residual_ptr is not None:
                p_residual = residual_ptr + batch * stride_rb + row * stride_rt + cols
                b_z += tl.load(p_residual, mask=mask, other=0.0).to(COMPUTE)
            tl.store(y_ptr + row * n_channels + cols, round_to(b_z, y_ptr.dtype.element_ty), mask=mask)
        window = _last(window, UNROLL, W - 1)


@triton.jit
def short_conv1d_bwd_kernel(
    dy_ptr, dstate_ptr, x_ptr, w_ptr, bias_ptr, info_ptr, state_ptr, dx_ptr, dw_ptr, dbias_ptr,
    n_channels, n_tiles, n_chunks, length, stride_b, stride_t, stride_dy_b, stride_dy_t,
    W: tl.constexpr, SILU: tl.constexpr, COMPUTE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """dw_ptr [chunks, n_channels, W] and dbias_ptr [chunks, n_channels] are partial sums; they and dx may be None."""
    cols = (tl.program_id(0) % n_tiles) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    m_cols = cols < n_channels
    chunk = tl.program_id(0) // n_tiles
    batch = (chunk // n_chunks).to(tl.int64)
    start = (chunk % n_chunks) * BLOCK_ROWS
    end = tl.minimum(start + BLOCK_ROWS, length)
    x_ptr += batch * stride_b
    dy_ptr += batch * stride_dy_b
    if dx_ptr is not None:
        dx_ptr += batch * length * n_channels
    w = _filter(w_ptr, cols, m_cols, W, COMPUTE)
    b_bias = _bias(bias_ptr, cols, m_cols, COMPUTE)
    window = _before(x_ptr, start, batch, cols, m_cols, info_ptr, state_ptr, length, n_channels, stride_t, W)
    dz = _zeros(W - 1, BLOCK_COLS, COMPUTE)  # of the W - 1 tokens before
    sums = _zeros(W, BLOCK_COLS, COMPUTE)
    b_dbias = tl.zeros([BLOCK_COLS], COMPUTE)
    for t in range(start, end + (W - 1), UNROLL):
        window = _with_tokens(window, x_ptr, t, cols, m_cols, length, stride_t, UNROLL)
        dy = _with_tokens((), dy_ptr, t, cols, m_cols, length, stride_dy_t, UNROLL)
        for r in tl.static_range(UNROLL):
            taps = _taps(window, r, t + r, batch, info_ptr, state_ptr, cols, m_cols, length, n_channels, W, COMPUTE)
            b_dz = dy[r].to(COMPUTE)
            if SILU:
                b_z = _convolved(taps, w, b_bias, W)
                b_dz *= derivative(b_z, gate_factor(b_z, "silu"), "silu")
            dz = _append(dz, tl.where(t + r < length, b_dz, 0.0))
            b_own = tl.where(t + r < end, b_dz, 0.0)
            if dw_ptr is not None:
                added = ()
                for j in tl.static_range(W):
                    added = _append(added, sums[j] + b_own * taps[j])
                sums = added
            if dbias_ptr is not None:
                b_dbias += b_own
            if dx_ptr is not None:
                to = t + r - (W - 1)  # the token whose gradient has all of its terms now
                n_to, _, end_to = _document(to, batch, info_ptr, length)
                b_dx = tl.zeros([BLOCK_COLS], COMPUTE)
                for j in tl.static_range(W):
                    b_term = dz[r + j]
                    if info_ptr is not None:
                        b_term = tl.where(to + j < end_to, b_term, 0.0)
                    b_dx += w[W - 1 - j] * b_term
                mask = m_cols & (to >= start) & (to < end)
                if dstate_ptr is not None:
                    b_dx += _state_block(dstate_ptr, n_to, to - end_to, cols, mask & (to >= end_to - (W - 1)),
                                         n_channels, W).to(COMPUTE)  # fmt: skip
                o_dx = tl.cast(to, tl.int64) * n_channels
                tl.store(dx_ptr + o_dx + cols, round_to(b_dx, dx_ptr.dtype.element_ty), mask=mask)
        window = _last(window, UNROLL, W - 1)
        dz = _last(dz, UNROLL, W - 1)
    chunk = chunk.to(tl.int64)
    if dw_ptr is not None:
        for j in tl.static_range(W):
            tl.store(dw_ptr + (chunk * n_channels + cols) * W + j, sums[j], mask=m_cols)
    if dbias_ptr is not None:
        tl.store(dbias_ptr + chunk * n_channels + cols, b_dbias, mask=m_cols)


@triton.jit
def _bounds(n, cu_ptr, length):
    """The first token of document n in its row of the batch, and its end, which may be the same."""
    if cu_ptr is None:
        return 0, length
    else:
        first = tl.minimum(tl.maximum(tl.load(cu_ptr + n), 0), length)
        return first, tl.maximum(tl.minimum(tl.load(cu_ptr + n + 1), length), first)


@triton.jit
def _row_of(x_ptr, n, cu_ptr, stride_b):
    """x of a document's row of the batch."""
    if cu_ptr is None:
        return x_ptr + n * stride_b
    else:
        return x_ptr


@triton.jit
def short_conv1d_final_kernel(
    x_ptr, cu_ptr, state_ptr, final_ptr,
    n_channels, n_tiles, length, stride_b, stride_t, W: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """The last W - 1 inputs of each document."""
    cols = (tl.program_id(0) % n_tiles) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    m_cols = cols < n_channels
    n = (tl.program_id(0) // n_tiles).to(tl.int64)
    first, end = _bounds(n, cu_ptr, length)
    x_ptr = _row_of(x_ptr, n, cu_ptr, stride_b)
    last = ()
    for i in tl.static_range(W - 1):
        t = end - (W - 1) + i
        b_x = tl.load(x_ptr + tl.cast(t, tl.int64) * stride_t + cols, mask=m_cols & (t >= first), other=0.0)
        if state_ptr is not None:
            b_x = tl.where(t >= first, b_x, _state_block(state_ptr, n, t - first, cols, m_cols, n_channels, W))
        last = _append(last, b_x)
    o_state = (n * n_channels + cols) * (W - 1)
    for i in tl.static_range(W - 1):
        tl.store(final_ptr + o_state + i, last[i], mask=m_cols)


@triton.jit
def short_conv1d_state_bwd_kernel(
    dy_ptr, dstate_ptr, x_ptr, w_ptr, bias_ptr, cu_ptr, state_ptr, dinitial_ptr,
    n_channels, n_tiles, length, stride_b, stride_t, stride_dy_b, stride_dy_t,
    W: tl.constexpr, SILU: tl.constexpr, COMPUTE: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """The gradient of each document's initial state, from dz of its first W - 1 tokens."""
    cols = (tl.program_id(0) % n_tiles) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    m_cols = cols < n_channels
    n = (tl.program_id(0) // n_tiles).to(tl.int64)
    first, end = _bounds(n, cu_ptr, length)
    x_ptr, dy_ptr = _row_of(x_ptr, n, cu_ptr, stride_b), _row_of(dy_ptr, n, cu_ptr, stride_dy_b)
    w = _filter(w_ptr, cols, m_cols, W, COMPUTE)
    b_bias = _bias(bias_ptr, cols, m_cols, COMPUTE)
    window = ()
    for j in tl.static_range(W - 1):
        window = _append(window, _state_block(state_ptr, n, j - (W - 1), cols, m_cols, n_channels, W))
    dz = ()
    for r in tl.static_range(W - 1):
        t = first + r
        mask = m_cols & (t < end)
        window = _append(window, tl.load(x_ptr + tl.cast(t, tl.int64) * stride_t + cols, mask=mask, other=0.0))
        taps = _taps(window, r, t, n, None, None, cols, m_cols, length, n_channels, W, COMPUTE)
        b_dz = tl.load(dy_ptr + tl.cast(t, tl.int64) * stride_dy_t + cols, mask=mask, other=0.0).to(COMPUTE)
        if SILU:
            b_z = _convolved(taps, w, b_bias, W)
            b_dz *= derivative(b_z, gate_factor(b_z, "silu"), "silu")
        dz = _append(dz, tl.where(t < end, b_dz, 0.0))
    o_state = (n * n_channels + cols) * (W - 1)
    for i in tl.static_range(W - 1):
        b_sum = tl.zeros([BLOCK_COLS], COMPUTE)
        for j in tl.static_range(i + 1):
            b_sum += w[j] * dz[i - j]
        if dstate_ptr is not None:
            kept = m_cols & (i >= end - first)
            b_sum += tl.load(dstate_ptr + o_state + i - (end - first), mask=kept, other=0.0).to(COMPUTE)
        tl.store(dinitial_ptr + o_state + i, round_to(b_sum, dinitial_ptr.dtype.element_ty), mask=m_cols)


@triton.jit
def short_conv1d_step_kernel(
    x_ptr, w_ptr, bias_ptr, state_ptr, residual_ptr, y_ptr,
    n_channels, n_tiles, stride_x, stride_n, stride_c, stride_s, stride_r,
    W: tl.constexpr, S: tl.constexpr, SILU: tl.constexpr, COMPUTE: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """One row of the batch and a tile of channels; the S >= W - 1 inputs of the state are shifted in place."""
    cols = (tl.program_id(0) % n_tiles) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    m_cols = cols < n_channels
    n = (tl.program_id(0) // n_tiles).to(tl.int64)
    state_ptr += n * stride_n + cols.to(tl.int64) * stride_c
    window = ()
    for i in tl.static_range(S):
        window = _append(window, tl.load(state_ptr + i * stride_s, mask=m_cols, other=0.0))
    window = _append(window, tl.load(x_ptr + n * stride_x + cols, mask=m_cols, other=0.0))
    w = _filter(w_ptr, cols, m_cols, W, COMPUTE)
    b_z = _bias(bias_ptr, cols, m_cols, COMPUTE)
    for j in tl.static_range(W):
        b_z += w[j] * window[S + 1 - W + j].to(COMPUTE)
    if SILU:
        b_z = activated(b_z, gate_factor(b_z, "silu"), "silu")
    if residual_ptr is not None:
        b_z += tl.load(residual_ptr + n * stride_r + cols, mask=m_cols, other=0.0).to(COMPUTE)
    tl.store(y_ptr + n * n_channels + cols, round_to(b_z, y_ptr.dtype.element_ty), mask=m_cols)
    tl.debug_barrier()  # all reads before any write, whichever threads do them
    for i in tl.static_range(S):
        tl.store(state_ptr + i * stride_s, window[i + 1], mask=m_cols)
