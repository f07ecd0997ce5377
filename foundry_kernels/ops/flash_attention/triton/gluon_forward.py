"""The forward kernel in Gluon, for compute capability 9.0: a producer warp copies tiles, two warpgroups consume them.

No GPU has run it: no launch takes it unless `python -m foundry_kernels tune --untried` has measured it there. It is for
16-bit heads of 64 or 128, dense, full or with a right bound of the window (causal), with either alignment.

A program owns 2 x BLOCK_M queries of one head, BLOCK_M a consumer. Tiles of keys, STAGES of them in shared memory, are
visited from the right; the i-th lies in buffer i % STAGES and fills it for the (i // STAGES)-th time, which is the
phase that its barriers count. *_ready: copied, one arrival and so many bytes. *_free: read, an arrival of each
consumer. b_ is a block of values, t_ the token of a product that is under way.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from foundry_kernels.ops.flash_attention.triton.order import program_order
from foundry_kernels.ops.flash_attention.triton.softmax import LN2

CONSUMERS = gl.constexpr(2)
#: Registers of a thread: 65536 for 128 threads of each consumer and of the producer, whose warps come in fours.
CONSUMER_REGISTERS, PRODUCER_REGISTERS = gl.constexpr(240), gl.constexpr(24)
FIRST, SECOND = gl.constexpr(0), gl.constexpr(1)


@gluon.jit
def _wait(ready, i, STAGES: gl.constexpr):
    """Until tile i is in its buffer."""
    mbarrier.wait(ready.index(i % STAGES), (i // STAGES) & 1)


@gluon.jit
def _copy(desc, mem, ready, free, n, head, row, i, ROWS: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr):
    """Copy tile i of keys or values, once its buffer is free: at first it is, in the phase before the first."""
    at = i % STAGES
    mbarrier.wait(free.index(at), ((i // STAGES) & 1) ^ 1)
    mbarrier.expect(ready.index(at), ROWS * D * 2)
    tma.async_copy_global_to_shared(desc, [n, head, row, 0], ready.index(at), mem.index(at))


@gluon.jit
def _produce(
    q_desc, k_desc, v_desc, q_mem, k_mem, v_mem, q_ready, k_ready, k_free, v_ready, v_free,
    n, head, kv_head, row, n_tiles,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Rows beyond the end of a tensor are filled with zeros."""
    for who in gl.static_range(CONSUMERS):
        mbarrier.expect(q_ready.index(who), BLOCK_M * D * 2)
        tma.async_copy_global_to_shared(q_desc, [n, head, row + who * BLOCK_M, 0], q_ready.index(who), q_mem.index(who))
    for i in range(n_tiles):
        key = (n_tiles - 1 - i) * BLOCK_N
        _copy(k_desc, k_mem, k_ready, k_free, n, kv_head, key, i, BLOCK_N, D, STAGES)
        _copy(v_desc, v_mem, v_ready, v_free, n, kv_head, key, i, BLOCK_N, D, STAGES)


@gluon.jit
def _scores(q, k_mem, k_ready, i, b_zero, BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr):
    """Begin the products of the queries with the keys of tile i [M, N]."""
    _wait(k_ready, i, STAGES)
    keys = k_mem.index(i % STAGES).reshape([BLOCK_N, D]).permute((1, 0))
    return hopper.warpgroup_mma(q, keys, b_zero, use_acc=False, is_async=True)


@gluon.jit
def _add_values(b_p, b_acc, v_mem, v_ready, i, BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr):
    """Begin b_acc + b_p @ the values of tile i [M, D]."""
    _wait(v_ready, i, STAGES)
    return hopper.warpgroup_mma(b_p, v_mem.index(i % STAGES).reshape([BLOCK_N, D]), b_acc, is_async=True)


@gluon.jit
def _softmax(b_s, b_m, b_l, stop, key, scale, MASKED: gl.constexpr, P_LAYOUT: gl.constexpr, DTYPE: gl.constexpr):
    """Add the scores of the keys from `key` on, of which row r sees those before stop[r], to the running softmax: its
    weights, what earlier sums shrink by, and the state (see `softmax.py`)."""
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
    return gl.convert_layout(b_p.to(DTYPE), P_LAYOUT), b_shrink, b_new, b_l


@gluon.jit
def _attend_tile(
    b_s, b_p, b_acc, b_m, b_l, b_zero, i, n_tiles, q, k_mem, v_mem, k_ready, k_free, v_ready, v_free, turn,
    stop, scale, WHO: gl.constexpr, MASKED: gl.constexpr, TURNS: gl.constexpr, P_LAYOUT: gl.constexpr,
    O_ROWS: gl.constexpr, DTYPE: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Tile i, neither the first nor the last. b_s are its scores, b_p the weights of the tile before: while its softmax
    runs, the next tile's scores and the values of the one before are multiplied.

    TURNS: a consumer begins its products when the other has begun its own, so that one multiplies while the other is
    at its exponentials. The second consumer's turn comes once the first has had as many more.
    """
    if TURNS:
        mbarrier.wait(turn.index(WHO), (i & 1) ^ WHO)
    t_s = _scores(q, k_mem, k_ready, i + 1, b_zero, BLOCK_N, D, STAGES)
    t_acc = _add_values(b_p, b_acc, v_mem, v_ready, i - 1, BLOCK_N, D, STAGES)
    if TURNS:
        mbarrier.arrive(turn.index(1 - WHO), count=1)
    key = (n_tiles - 1 - i) * BLOCK_N
    b_p, b_shrink, b_m, b_l = _softmax(b_s, b_m, b_l, stop, key, scale, MASKED, P_LAYOUT, DTYPE)
    b_s, b_acc = hopper.warpgroup_mma_wait(0, deps=[t_s, t_acc])
    mbarrier.arrive(k_free.index((i + 1) % STAGES), count=1)
    mbarrier.arrive(v_free.index((i - 1) % STAGES), count=1)
    b_acc = b_acc * gl.expand_dims(gl.convert_layout(b_shrink, O_ROWS), 1)
    return b_s, b_p, b_acc, b_m, b_l


@gluon.jit
def _attend_range(
    b_s, b_p, b_acc, b_m, b_l, begin, end, n_tiles, q, k_mem, v_mem, k_ready, k_free, v_ready, v_free, turn,
    stop, scale, WHO: gl.constexpr, MASKED: gl.constexpr, TURNS: gl.constexpr, P_LAYOUT: gl.constexpr,
    O_ROWS: gl.constexpr, DTYPE: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The tiles begin .. end - 1. Two at a time without a mask: the scores of one are then where those of the other
    were, and need not be moved there."""
    b_zero = gl.full([b_s.shape[0], BLOCK_N], 0.0, gl.float32, b_s.type.layout)
    STEP: gl.constexpr = 1 if MASKED else 2
    for i in range(begin, end - STEP + 1, STEP):
        for j in gl.static_range(STEP):
            b_s, b_p, b_acc, b_m, b_l = _attend_tile(
                b_s, b_p, b_acc, b_m, b_l, b_zero, i + j, n_tiles, q, k_mem, v_mem, k_ready, k_free, v_ready, v_free,
                turn, stop, scale, WHO, MASKED, TURNS, P_LAYOUT, O_ROWS, DTYPE, BLOCK_N, D, STAGES,
            )  # fmt: skip
    if STEP == 2:  # noqa: SIM102 (one is decided by the compiler, the other by the GPU)
        if (end - begin) % 2 == 1:
            b_s, b_p, b_acc, b_m, b_l = _attend_tile(
                b_s, b_p, b_acc, b_m, b_l, b_zero, end - 1, n_tiles, q, k_mem, v_mem, k_ready, k_free, v_ready, v_free,
                turn, stop, scale, WHO, MASKED, TURNS, P_LAYOUT, O_ROWS, DTYPE, BLOCK_N, D, STAGES,
            )  # fmt: skip
    return b_s, b_p, b_acc, b_m, b_l


@gluon.jit
def _consume(
    WHO: gl.constexpr, out_desc, lse_ptr, q_mem, k_mem, v_mem, q_ready, k_ready, k_free, v_ready, v_free, turn,
    n, head, at, row, tokens_q, tokens_k, past, scale, n_tiles, n_masked,
    HAS_RIGHT: gl.constexpr, TURNS: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The queries row .. row + BLOCK_M - 1 of one head, of which query r sees the keys before r + past. `at` is where
    the head's lse begins. The first `n_masked` tiles, one at least, need a mask."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    S_ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    O_ROWS: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    DTYPE: gl.constexpr = q_mem.dtype
    rows = row + gl.arange(0, BLOCK_M, S_ROWS)
    stop = rows * 0 + tokens_k
    if HAS_RIGHT:
        stop = gl.minimum(rows + past, tokens_k)
    b_m = gl.full([BLOCK_M], -float("inf"), gl.float32, S_ROWS)
    b_l = gl.full([BLOCK_M], 0.0, gl.float32, S_ROWS)
    b_acc = gl.full([BLOCK_M, D], 0.0, gl.float32, O_LAYOUT)
    b_zero = gl.full([BLOCK_M, BLOCK_N], 0.0, gl.float32, S_LAYOUT)
    mbarrier.wait(q_ready.index(WHO), 0)
    q = q_mem.index(WHO).reshape([BLOCK_M, D])
    t_s = _scores(q, k_mem, k_ready, 0, b_zero, BLOCK_N, D, STAGES)
    b_s = hopper.warpgroup_mma_wait(0, deps=[t_s])
    mbarrier.arrive(k_free.index(0), count=1)
    last = n_tiles - 1
    b_p, b_shrink, b_m, b_l = _softmax(b_s, b_m, b_l, stop, last * BLOCK_N, scale, True, P_LAYOUT, DTYPE)
    if last > 0:
        t_s = _scores(q, k_mem, k_ready, 1, b_zero, BLOCK_N, D, STAGES)
        b_s = hopper.warpgroup_mma_wait(0, deps=[t_s])
        mbarrier.arrive(k_free.index(1), count=1)
        whole = gl.minimum(n_masked, last)
        if HAS_RIGHT:  # else no tile but the first has keys that are not there
            b_s, b_p, b_acc, b_m, b_l = _attend_range(
                b_s, b_p, b_acc, b_m, b_l, 1, whole, n_tiles, q, k_mem, v_mem, k_ready, k_free, v_ready, v_free, turn,
                stop, scale, WHO, True, TURNS, P_LAYOUT, O_ROWS, DTYPE, BLOCK_N, D, STAGES,
            )  # fmt: skip
        b_s, b_p, b_acc, b_m, b_l = _attend_range(
            b_s, b_p, b_acc, b_m, b_l, whole, last, n_tiles, q, k_mem, v_mem, k_ready, k_free, v_ready, v_free, turn,
            stop, scale, WHO, False, TURNS, P_LAYOUT, O_ROWS, DTYPE, BLOCK_N, D, STAGES,
        )  # fmt: skip
        t_acc = _add_values(b_p, b_acc, v_mem, v_ready, last - 1, BLOCK_N, D, STAGES)
        b_p, b_shrink, b_m, b_l = _softmax(b_s, b_m, b_l, stop, 0, scale, True, P_LAYOUT, DTYPE)
        b_acc = hopper.warpgroup_mma_wait(0, deps=[t_acc])
        mbarrier.arrive(v_free.index((last - 1) % STAGES), count=1)
        b_acc = b_acc * gl.expand_dims(gl.convert_layout(b_shrink, O_ROWS), 1)
    t_acc = _add_values(b_p, b_acc, v_mem, v_ready, last, BLOCK_N, D, STAGES)
    b_acc = hopper.warpgroup_mma_wait(0, deps=[t_acc])
    mbarrier.arrive(v_free.index(last % STAGES), count=1)
    m_empty = b_m == -float("inf")
    b_l = gl.where(m_empty, 1.0, b_l)
    b_lse = gl.where(m_empty, -float("inf"), (b_m + gl.log2(b_l)) * LN2)
    gl.store(lse_ptr + at + rows, b_lse, mask=rows < tokens_q)
    b_out = b_acc / gl.expand_dims(gl.convert_layout(b_l, O_ROWS), 1)
    q.store(b_out.to(DTYPE))  # where this consumer's queries were, which nothing reads any more
    hopper.fence_async_shared()
    tma.async_copy_shared_to_global(out_desc, [n, head, row, 0], q_mem.index(WHO))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["section"])
def flash_attention_fwd_gluon_kernel(
    q_desc, k_desc, v_desc, out_desc, lse_ptr,
    n_batch, n_heads, group, section, tokens_q, tokens_k, scale, right,
    BOTTOM_RIGHT: gl.constexpr, HAS_RIGHT: gl.constexpr, TURNS: gl.constexpr,
    D: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The descriptors are of [B, H, T, D] in blocks of one consumer's queries, or one tile of keys. lse [B, H, T] is
    contiguous."""
    n, head, tile, tiles = program_order(n_batch, n_heads, section)
    if HAS_RIGHT:
        tile = tiles - 1 - tile
    row = tile * CONSUMERS * BLOCK_M
    past = right + 1
    if BOTTOM_RIGHT:
        past += tokens_k - tokens_q
    stop, whole = tokens_k, tokens_k  # keys that any query sees, and those that all queries see
    if HAS_RIGHT:
        stop = gl.minimum(gl.minimum(row + CONSUMERS * BLOCK_M, tokens_q) - 1 + past, tokens_k)
        whole = gl.minimum(gl.maximum(row + past, 0), tokens_k)
    n_tiles = gl.maximum(gl.cdiv(gl.maximum(stop, 0), BLOCK_N), 1)  # where no query sees a key too
    n_masked = n_tiles - gl.minimum(whole // BLOCK_N, n_tiles - 1)

    q_mem = gl.allocate_shared_memory(q_desc.dtype, [CONSUMERS, 1, 1, BLOCK_M, D], q_desc.layout)
    k_mem = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, 1, BLOCK_N, D], k_desc.layout)
    v_mem = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, 1, BLOCK_N, D], v_desc.layout)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_ready = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], BARRIER)
    turn = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], BARRIER)
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for who in gl.static_range(CONSUMERS):
        mbarrier.init(q_ready.index(who), count=1)
        mbarrier.init(turn.index(who), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(stage), count=1)
        mbarrier.init(k_free.index(stage), count=CONSUMERS)
        mbarrier.init(v_ready.index(stage), count=1)
        mbarrier.init(v_free.index(stage), count=CONSUMERS)
    hopper.fence_async_shared()  # the engine that copies arrives at barriers too, and must see them initialized
    at = (n * n_heads + head) * tokens_q
    n, head = n.to(gl.int32), head.to(gl.int32)
    kv_head = head // group
    gl.warp_specialize(
        [
            (_consume, (
                FIRST, out_desc, lse_ptr, q_mem, k_mem, v_mem, q_ready, k_ready, k_free, v_ready, v_free, turn,
                n, head, at, row, tokens_q, tokens_k, past, scale, n_tiles, n_masked,
                HAS_RIGHT, TURNS, BLOCK_M, BLOCK_N, D, STAGES,
            )),
            (_consume, (
                SECOND, out_desc, lse_ptr, q_mem, k_mem, v_mem, q_ready, k_ready, k_free, v_ready, v_free, turn,
                n, head, at, row + BLOCK_M, tokens_q, tokens_k, past, scale, n_tiles, n_masked,
                HAS_RIGHT, TURNS, BLOCK_M, BLOCK_N, D, STAGES,
            )),
            (_produce, (
                q_desc, k_desc, v_desc, q_mem, k_mem, v_mem, q_ready, k_ready, k_free, v_ready, v_free,
                n, head, kv_head, row, n_tiles, BLOCK_M, BLOCK_N, D, STAGES,
            )),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
