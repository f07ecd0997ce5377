"""The forward kernel in Gluon, for compute capability 9.0: a producer warp copies tiles, two warpgroups consume them.

It supports 16-bit heads of 64 or 128 in dense batches, with full attention or a right bound of the window (causal),
with either alignment.

A program owns 2 x BLOCK_M queries of one head, BLOCK_M for each consumer. Tiles of keys are visited from the right, and
STAGES of them are in shared memory. Tile i is in buffer i % STAGES, in the phase i // STAGES of its barriers. The
barrier `ready` means copied: it counts one arrival and the bytes. The barrier `free` means read: it counts one arrival
of each consumer. Names begin with b_ for a block of values and with t_ for the token of a matmul in flight.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from foundry_kernels.ops.flash_attention.triton.order import program_order
from foundry_kernels.ops.flash_attention.triton.softmax import LN2

CONSUMERS = gl.constexpr(2)
#: Registers of a thread. The 65536 of a multiprocessor are for 128 threads of each consumer and 128 of the producer.
CONSUMER_REGISTERS, PRODUCER_REGISTERS = gl.constexpr(240), gl.constexpr(24)
FIRST, SECOND = gl.constexpr(0), gl.constexpr(1)
#: Copies between a tensor and shared memory. Triton 3.8 renamed them, and 3.9 refuses the old names.
copy_in = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
copy_out = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global


class Buffers(NamedTuple):
    """Tiles in shared memory, and their barriers."""

    mem: Any
    ready: Any
    free: Any  # None for the queries, whose buffers are filled once


class Consumer(NamedTuple):
    """The inputs of a consumer. q [M, D] are its own queries; query r sees the keys before stop[r]."""

    q: Any
    k: Buffers
    v: Buffers
    stop: Any
    scale: Any
    n_tiles: Any


class State(NamedTuple):
    """The scores of a tile, the weights of the previous tile, and the sums so far."""

    s: Any
    p: Any
    acc: Any
    m: Any
    l: Any  # noqa: E741


class Form(NamedTuple):
    """Constants of the kernel."""

    BLOCK_M: Any
    BLOCK_N: Any
    D: Any
    STAGES: Any
    DTYPE: Any
    S_LAYOUT: Any
    O_LAYOUT: Any


@gluon.jit
def _wait(tiles, i, form):
    """Waits until tile i is in its buffer."""
    mbarrier.wait(tiles.ready.index(i % form.STAGES), (i // form.STAGES) & 1)


@gluon.jit
def _copy(desc, tiles, n, head, row, i, form):
    """Copies tile i of keys or values once its buffer is free. A wait for the phase before the first one returns at
    once."""
    at = i % form.STAGES
    mbarrier.wait(tiles.free.index(at), ((i // form.STAGES) & 1) ^ 1)
    mbarrier.expect(tiles.ready.index(at), form.BLOCK_N * form.D * 2)
    copy_in(desc, [n, head, row, 0], tiles.ready.index(at), tiles.mem.index(at))


@gluon.jit
def _produce(q_desc, k_desc, v_desc, q, k, v, n, head, kv_head, row, n_tiles, form):
    """Rows beyond the end of a tensor are filled with zeros."""
    for who in gl.static_range(CONSUMERS):
        at = [n, head, row + who * form.BLOCK_M, 0]
        mbarrier.expect(q.ready.index(who), form.BLOCK_M * form.D * 2)
        copy_in(q_desc, at, q.ready.index(who), q.mem.index(who))
    for i in range(n_tiles):
        key = (n_tiles - 1 - i) * form.BLOCK_N
        _copy(k_desc, k, n, kv_head, key, i, form)
        _copy(v_desc, v, n, kv_head, key, i, form)


@gluon.jit
def _scores(q, k, i, b_zero, form):
    """Starts the matmul of the queries with the keys of tile i [M, N]."""
    _wait(k, i, form)
    keys = k.mem.index(i % form.STAGES).reshape([form.BLOCK_N, form.D]).permute((1, 0))
    return hopper.warpgroup_mma(q, keys, b_zero, use_acc=False, is_async=True)


@gluon.jit
def _add_values(b_p, b_acc, v, i, form):
    """Starts the matmul b_acc + b_p @ (the values of tile i) [M, D]."""
    _wait(v, i, form)
    values = v.mem.index(i % form.STAGES).reshape([form.BLOCK_N, form.D])
    return hopper.warpgroup_mma(b_p, values, b_acc, is_async=True)


@gluon.jit
def _softmax(b_s, b_m, b_l, stop, key, scale, MASKED: gl.constexpr, form):
    """Adds the scores of the keys from `key` on to the running softmax; row r sees the keys before stop[r]. Returns the
    weights, the factor for earlier sums, and the state (see `softmax.py`)."""
    if MASKED:
        cols = gl.arange(0, b_s.shape[1], gl.SliceLayout(0, b_s.type.layout))
        b_s = gl.where(gl.expand_dims(cols, 0) < gl.expand_dims(stop - key, 1), b_s, -float("inf"))
    b_new = gl.maximum(b_m, gl.max(b_s, 1) * scale)
    b_base = b_new
    if MASKED:
        b_base = gl.where(b_new == -float("inf"), 0.0, b_new)
    b_p = gl.exp2(b_s * scale - gl.expand_dims(b_base, 1))
    b_shrink = gl.exp2(b_m - b_base)
    b_l = b_l * b_shrink + gl.sum(b_p, 1)
    return gl.convert_layout(b_p.to(form.DTYPE), gl.DotOperandLayout(0, form.O_LAYOUT, 2)), b_shrink, b_new, b_l


@gluon.jit
def _by_row(b_x, form):
    """Returns b_x [M] as [M, 1] in the layout of the sums."""
    return gl.expand_dims(gl.convert_layout(b_x, gl.SliceLayout(1, form.O_LAYOUT)), 1)


@gluon.jit
def _attend_tile(state, b_zero, i, given, MASKED: gl.constexpr, form):
    """Attends to tile i, which is neither the first nor the last. During its softmax, two matmuls run: the next tile's
    scores, and the previous tile's values. On an H100, it was slower if the consumers started their matmuls in
    turns."""
    t_s = _scores(given.q, given.k, i + 1, b_zero, form)
    t_acc = _add_values(state.p, state.acc, given.v, i - 1, form)
    key = (given.n_tiles - 1 - i) * form.BLOCK_N
    b_p, b_shrink, b_m, b_l = _softmax(state.s, state.m, state.l, given.stop, key, given.scale, MASKED, form)
    b_s, b_acc = hopper.warpgroup_mma_wait(0, deps=[t_s, t_acc])
    mbarrier.arrive(given.k.free.index((i + 1) % form.STAGES), count=1)
    mbarrier.arrive(given.v.free.index((i - 1) % form.STAGES), count=1)
    return State(b_s, b_p, b_acc * _by_row(b_shrink, form), b_m, b_l)


@gluon.jit
def _attend_range(state, begin, end, given, MASKED: gl.constexpr, form):
    """Attends to the tiles begin .. end - 1, without a mask two in each round. The scores of one tile then replace
    those of the other in registers without being moved."""
    b_zero = gl.full([state.s.shape[0], form.BLOCK_N], 0.0, gl.float32, form.S_LAYOUT)
    STEP: gl.constexpr = 1 if MASKED else 2
    for i in range(begin, end - STEP + 1, STEP):
        for j in gl.static_range(STEP):
            state = _attend_tile(state, b_zero, i + j, given, MASKED, form)
    if STEP == 2:  # noqa: SIM102 (the compiler evaluates one, the GPU the other)
        if (end - begin) % 2 == 1:
            state = _attend_tile(state, b_zero, end - 1, given, MASKED, form)
    return state


@gluon.jit
def _consume(
    WHO: gl.constexpr, out_desc, lse_ptr, q, k, v, n, head, at, row, tokens_q, tokens_k, past, scale,
    n_tiles, n_masked, HAS_RIGHT: gl.constexpr, form,
):  # fmt: skip
    """Computes the queries row .. row + BLOCK_M - 1 of one head. Query r sees the keys before r + past. The head's lse
    begins at `at`. The first `n_masked` tiles, at least one, need a mask."""
    S_ROWS: gl.constexpr = gl.SliceLayout(1, form.S_LAYOUT)
    rows = row + gl.arange(0, form.BLOCK_M, S_ROWS)
    stop = rows * 0 + tokens_k
    if HAS_RIGHT:
        stop = gl.minimum(rows + past, tokens_k)
    b_m = gl.full([form.BLOCK_M], -float("inf"), gl.float32, S_ROWS)
    b_l = gl.full([form.BLOCK_M], 0.0, gl.float32, S_ROWS)
    b_acc = gl.full([form.BLOCK_M, form.D], 0.0, gl.float32, form.O_LAYOUT)
    b_zero = gl.full([form.BLOCK_M, form.BLOCK_N], 0.0, gl.float32, form.S_LAYOUT)
    mbarrier.wait(q.ready.index(WHO), 0)
    own = q.mem.index(WHO).reshape([form.BLOCK_M, form.D])
    given = Consumer(own, k, v, stop, scale, n_tiles)
    t_s = _scores(own, k, 0, b_zero, form)
    b_s = hopper.warpgroup_mma_wait(0, deps=[t_s])
    mbarrier.arrive(k.free.index(0), count=1)
    last = n_tiles - 1
    b_p, b_shrink, b_m, b_l = _softmax(b_s, b_m, b_l, stop, last * form.BLOCK_N, scale, True, form)
    if last > 0:
        t_s = _scores(own, k, 1, b_zero, form)
        b_s = hopper.warpgroup_mma_wait(0, deps=[t_s])
        mbarrier.arrive(k.free.index(1), count=1)
        whole = gl.minimum(n_masked, last)
        state = State(b_s, b_p, b_acc, b_m, b_l)
        if HAS_RIGHT:  # otherwise only the first tile has keys past the end
            state = _attend_range(state, 1, whole, given, True, form)
        state = _attend_range(state, whole, last, given, False, form)
        t_acc = _add_values(state.p, state.acc, v, last - 1, form)
        b_p, b_shrink, b_m, b_l = _softmax(state.s, state.m, state.l, stop, 0, scale, True, form)
        b_acc = hopper.warpgroup_mma_wait(0, deps=[t_acc])
        mbarrier.arrive(v.free.index((last - 1) % form.STAGES), count=1)
        b_acc = b_acc * _by_row(b_shrink, form)
    t_acc = _add_values(b_p, b_acc, v, last, form)
    b_acc = hopper.warpgroup_mma_wait(0, deps=[t_acc])
    mbarrier.arrive(v.free.index(last % form.STAGES), count=1)
    m_empty = b_m == -float("inf")
    b_l = gl.where(m_empty, 1.0, b_l)
    b_lse = gl.where(m_empty, -float("inf"), (b_m + gl.log2(b_l)) * LN2)
    gl.store(lse_ptr + at + rows, b_lse, mask=rows < tokens_q)
    b_out = b_acc / _by_row(b_l, form)
    own.store(b_out.to(form.DTYPE))  # overwrites this consumer's queries, which are no longer read
    hopper.fence_async_shared()
    copy_out(out_desc, [n, head, row, 0], q.mem.index(WHO))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["section"])
def flash_attention_fwd_gluon_kernel(
    q_desc, k_desc, v_desc, out_desc, lse_ptr,
    n_batch, n_heads, group, section, tokens_q, tokens_k, scale, right,
    BOTTOM_RIGHT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    D: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The descriptors are for [B, H, T, D] in blocks of one consumer's queries, or of one tile of keys. lse [B, H, T]
    is contiguous."""
    n, head, tile, tiles = program_order(n_batch, n_heads, section)
    if HAS_RIGHT:
        tile = tiles - 1 - tile
    row = tile * CONSUMERS * BLOCK_M
    past = right + 1
    if BOTTOM_RIGHT:
        past += tokens_k - tokens_q
    stop, whole = tokens_k, tokens_k  # the keys that some query sees, and the keys that all queries see
    if HAS_RIGHT:
        stop = gl.minimum(gl.minimum(row + CONSUMERS * BLOCK_M, tokens_q) - 1 + past, tokens_k)
        whole = gl.minimum(gl.maximum(row + past, 0), tokens_k)
    n_tiles = gl.maximum(gl.cdiv(gl.maximum(stop, 0), BLOCK_N), 1)  # at least 1, also if no query sees a key
    n_masked = n_tiles - gl.minimum(whole // BLOCK_N, n_tiles - 1)

    q_mem = gl.allocate_shared_memory(q_desc.dtype, [CONSUMERS, 1, 1, BLOCK_M, D], q_desc.layout)
    k_mem = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, 1, BLOCK_N, D], k_desc.layout)
    v_mem = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, 1, BLOCK_N, D], v_desc.layout)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_ready = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], BARRIER)
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for who in gl.static_range(CONSUMERS):
        mbarrier.init(q_ready.index(who), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(stage), count=1)
        mbarrier.init(k_free.index(stage), count=CONSUMERS)
        mbarrier.init(v_ready.index(stage), count=1)
        mbarrier.init(v_free.index(stage), count=CONSUMERS)
    hopper.fence_async_shared()  # the copy engine arrives at barriers too, and must see them initialized
    at = (n * n_heads + head) * tokens_q
    n, head = n.to(gl.int32), head.to(gl.int32)
    kv_head = head // group
    form: gl.constexpr = Form(
        BLOCK_M, BLOCK_N, D, STAGES, q_desc.dtype,
        gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16]),
        gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16]),
    )  # fmt: skip
    q, k, v = Buffers(q_mem, q_ready, None), Buffers(k_mem, k_ready, k_free), Buffers(v_mem, v_ready, v_free)
    gl.warp_specialize(
        [
            (_consume, (
                FIRST, out_desc, lse_ptr, q, k, v, n, head, at, row, tokens_q, tokens_k, past, scale,
                n_tiles, n_masked, HAS_RIGHT, form,
            )),
            (_consume, (
                SECOND, out_desc, lse_ptr, q, k, v, n, head, at, row + BLOCK_M, tokens_q, tokens_k, past, scale,
                n_tiles, n_masked, HAS_RIGHT, form,
            )),
            (_produce, (q_desc, k_desc, v_desc, q, k, v, n, head, kv_head, row, n_tiles, form)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
