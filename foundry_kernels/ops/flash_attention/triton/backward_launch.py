"""The launches of attention's backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from foundry_kernels._triton import INTERPRET
from foundry_kernels._triton.devices import device_of
from foundry_kernels._triton.launch import Plan, launch
from foundry_kernels._triton.plans import planned
from foundry_kernels._triton.rows import contiguous, strides_of
from foundry_kernels.ops.flash_attention.options import AttentionOptions
from foundry_kernels.ops.flash_attention.triton.backward import (
    flash_attention_dkdv_kernel,
    flash_attention_preprocess_kernel,
    flash_attention_sum_splits_kernel,
)
from foundry_kernels.ops.flash_attention.triton.backward_dq import flash_attention_dq_kernel
from foundry_kernels.ops.flash_attention.triton.bias_launch import launch_dbias
from foundry_kernels.ops.flash_attention.triton.bundles import HeadStrides
from foundry_kernels.ops.flash_attention.triton.kernel_options import captured_tensors, pair_tensors
from foundry_kernels.ops.flash_attention.triton.launch import (
    Gradients,
    _aligned,
    _batched,
    _copy_back,
    _target,
    aligned_problem,
    empty_bwd,
)
from foundry_kernels.ops.flash_attention.triton.problem import _Problem
from foundry_kernels.ops.flash_attention.triton.score_launch import launch_dscore
from foundry_kernels.ops.flash_attention.triton.tiles_launch import launch_lists, list_strides


def launch_bwd(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    options: AttentionOptions,
    need_dq: bool,
    need_dk: bool,
    need_dv: bool,
    need_dsinks: bool,
    need_dbias: bool,
    dscore_slots: Sequence[int],
) -> Gradients:
    needed = need_dq, need_dk, need_dv, need_dsinks, need_dbias, dscore_slots
    dq, dk, dv, dsinks, dbias, dscore = grads = empty_bwd(q, k, v, options, *needed)
    if out.numel() == 0 or k.numel() == 0:
        for x in grads:
            if x is not None:
                x.zero_()
        return grads
    q, k, v, p = aligned_problem(q, k, v, options)
    dout = _aligned(_batched(dout))
    rows = _launch_preprocess(p, dout, dlse, _aligned(_batched(out)), lse, options, dsinks)
    lengths = contiguous(options.cu_seqlens_q), contiguous(options.cu_seqlens_k), contiguous(options.alibi_slopes)
    others = (*lengths, *pair_tensors(options), captured_tensors(options, q))
    inputs = (q, k, v, dout, *rows)
    if p.apart and dk is not None and dv is not None:
        _launch_dkdv(p, inputs, others, dk, None)
        _launch_dkdv(p, inputs, others, None, dv)
    elif dk is not None or dv is not None:
        _launch_dkdv(p, inputs, others, dk, dv)
    if dq is not None:
        _launch_dq(p, inputs, others, dq)
    if dbias is not None:
        launch_dbias(p, inputs, others, dbias)
    if dscore is not None:
        launch_dscore(p, inputs, others, options, dscore_slots, dscore)
    return grads


class _Rows(NamedTuple):
    """The values that the backward kernels read for each row."""

    lse_high: Tensor
    lse_low: Tensor | None
    delta: Tensor


@planned
def _plan_preprocess(
    p: _Problem,
    n_batch: int,
    dout: tuple[int, ...],
    out: tuple[int, ...],
    dlse: tuple[int, ...] | None,
    need_dsinks: bool,
) -> tuple[int, Plan]:
    """The number of tiles, and the launch. n_batch is 1 for packed tokens."""
    config = p.config("preprocess")
    tiles = triton.cdiv(p.tokens_q, config["BLOCK_M"]) * n_batch
    dlse_strides = (0, 0, 0) if dlse is None else (*[0] * (3 - len(dlse)), *dlse)
    strides = (HeadStrides(*each) for each in (dout[:3], out[:3], dlse_strides))
    numbers = (n_batch, p.n_heads, p.tokens_q, *strides)
    flags = {"HAS_DLSE": dlse is not None, "NEED_DSINKS": need_dsinks, "LSE_LOW": p.wide_lse}
    shared = {name: p.constants[name] for name in ("COMPUTE", "DV", "BLOCK_DV")}
    shared["HAS_BIAS"] = p.constants["HAS_NATURAL"]
    return tiles, Plan((tiles * p.n_heads,), numbers, flags | shared | config)


def _launch_preprocess(
    p: _Problem,
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    options: AttentionOptions,
    dsinks: Tensor | None,
) -> _Rows:
    delta = torch.empty_like(lse, dtype=torch.float64 if p.dtype == torch.float64 else torch.float32)
    rows = _Rows(torch.empty_like(delta), torch.empty_like(delta) if p.wide_lse else None, delta)
    tiles, plan = _plan_preprocess(p, out.shape[0], dout.stride(), out.stride(), strides_of(dlse), dsinks is not None)
    partial = None if dsinks is None else delta.new_empty((tiles, p.n_heads))
    launch(
        flash_attention_preprocess_kernel, plan, dout, out, lse, dlse, contiguous(options.sinks),
        rows.delta, rows.lse_high, rows.lse_low, partial,
    )  # fmt: skip
    if dsinks is not None and partial is not None:
        torch.sum(partial, 0, out=dsinks) if dsinks.dtype == partial.dtype else dsinks.copy_(partial.sum(0))
    return rows


#: The index of `mask_tiles` in the tuple of lengths, slopes and `pair_tensors`.
_MASK_TILES = 4


def _numbers(p: _Problem, *tensors: tuple[int, ...] | None) -> tuple[Any, ...]:
    """The last numbers of both kernels' arguments. `tensors` are the strides of dout and of the results."""
    return (p.tokens_q, p.tokens_k, *p.strides_qkv, *p.strides(*tensors), p.stride_lseb)


#: The cost for a program of leaving its sums to another kernel, as the number of query rows with the same bytes.
_ROWS_OF_A_SPLIT = 8 if INTERPRET else 300
#: With more programs for each multiprocessor than this, heads are not split. This bounds the memory for partial sums.
_MOST_PROGRAMS = 4


def head_splits(programs: int, group: int, queries: int, uneven: bool, at_once: int) -> int:
    """Returns into how many parts a group of heads is split. Without splits, there are `programs` programs, `at_once`
    of them run at the same time, and each visits the `queries` of a whole group. `uneven`: some see all queries and
    some hardly any, and those with the most work start first.

    It minimises the time when the last program ends, counted in rows of queries. It depends only on shapes, so the
    order of the sums is the same in every call.
    """

    def end(splits: int) -> float:
        count, rows = programs * splits, group * queries / splits
        cost = _ROWS_OF_A_SPLIT if splits > 1 else 0
        if uneven:  # on average, a program sees half of the queries
            return max(rows, count * rows / 2 / at_once) + cost * max(1, count / at_once)
        return (rows + cost) * triton.cdiv(count, at_once)

    possible = [n for n in range(1, group + 1) if group % n == 0 and programs * n <= _MOST_PROGRAMS * at_once]
    return min(possible, key=end, default=1)


def _head_splits(p: _Problem, block_n: int) -> int:
    """The lengths of packed sequences are on the device, so their number of tiles is an upper bound: the tiles that all
    tokens fill, and one more for each sequence."""
    if p.batch_invariant:
        return 1
    tiles = triton.cdiv(p.max_seqlen_k, block_n) * p.n_batch
    if p.packed:
        tiles = min(tiles, p.tokens_k // block_n + p.n_batch)
    sides = p.constants["HAS_LEFT"] + p.constants["HAS_RIGHT"]
    queries = min(p.max_seqlen_q, sum(p.window) + block_n) if sides == 2 else p.max_seqlen_q
    return head_splits(tiles * p.n_kv_heads, p.group, queries, sides == 1, device_of(p.capability).multiprocessors)


Strides = tuple[int, ...] | None


@planned
def _plan_dkdv(p: _Problem, dout: tuple[int, ...], dk: Strides, dv: Strides) -> tuple[Plan, int, tuple[Plan, ...]]:
    """Returns the launch, into how many parts a group of heads is split and, if it is split, the launches that sum dk
    and dv."""
    flags = {"LSE_LOW": p.wide_lse, "NEED_DK": dk is not None, "NEED_DV": dv is not None}
    config = p.config("dkdv" if not p.apart else "dk" if dv is None else "dv")
    unbounded = p.packed or p.batch_invariant or not p.constants["HAS_RIGHT"]
    if config["BLOCK_M"] == 64 and config["num_warps"] == 4 and unbounded:
        config["BLOCK_M"] = 32  # avoids spills in packed sequences and without a right edge; batches are packed too
    splits = _head_splits(p, config["BLOCK_N"])
    parts, members = p.n_kv_heads * splits, p.group // splits
    written: tuple[Strides, Strides] = (dk, dv)
    sums: tuple[Plan, ...] = ()
    if splits > 1:
        sums = (
            _plan_sum(p, splits, dk, p.head_dim, p.natural_scale),
            _plan_sum(p, splits, dv, p.head_dim_v, 1.0),
        )
        written = _parts_strides(p, parts, p.head_dim), _parts_strides(p, parts, p.head_dim_v)
    numbers = (
        p.n_batch, parts, members, splits, p.section(members * p.max_seqlen_q, splits),
        *_numbers(p, dout, *written),
    )  # fmt: skip
    scale = {"natural_scale": 1.0 if splits > 1 else p.natural_scale}
    lists = list_strides(p, config["BLOCK_N"], config["BLOCK_M"], True)
    functions = p.score_functions(by_keys=True, slope=0)
    tiles = triton.cdiv(p.max_seqlen_k, config["BLOCK_N"])
    return p.plan(tiles * p.n_batch * parts, numbers, scale, lists, flags, functions, config), splits, sums


def _empty_parts(p: _Problem, target: Tensor, splits: int) -> Tensor:
    """Returns memory for the partial dk or dv of each part of a group. For each multiprocessor, this is at most
    `_MOST_PROGRAMS` tiles of keys with 4 bytes an element."""
    n_batch, n_kv_heads, tokens, width = target.shape
    dtype = torch.float64 if p.dtype == torch.float64 else torch.float32
    return torch.empty((n_batch, n_kv_heads * splits, tokens, width), dtype=dtype, device=target.device)


def _parts_strides(p: _Problem, parts: int, width: int) -> tuple[int, ...]:
    return (parts * p.tokens_k * width, p.tokens_k * width, width, 1)


def _plan_sum(p: _Problem, splits: int, result: Strides, width: int, scale: float) -> Plan:
    config = p.config("sum_splits")
    n_batch = 1 if p.packed else p.n_batch
    numbers = (p.n_kv_heads, splits, p.tokens_k, *p.strides(result), scale)
    shape = {"COMPUTE": p.constants["COMPUTE"], "D": width, "BLOCK_D": max(16, triton.next_power_of_2(width))}
    return Plan((triton.cdiv(p.tokens_k, config["BLOCK_M"]) * n_batch * p.n_kv_heads,), numbers, shape | config)


def _launch_dkdv(
    p: _Problem,
    inputs: tuple[Tensor | None, ...],
    others: tuple[Any, ...],
    dk: Tensor | None,
    dv: Tensor | None,
) -> None:
    results = [None if x is None else _batched(x) for x in (dk, dv)]
    widths = (p.head_dim, p.head_dim_v)
    targets = [None if x is None else _target(x, width) for x, width in zip(results, widths, strict=True)]
    dout = inputs[3]
    assert dout is not None
    plan, splits, sums = _plan_dkdv(p, dout.stride(), *(strides_of(x) for x in targets))
    written = targets if splits == 1 else [None if x is None else _empty_parts(p, x, splits) for x in targets]
    lists = launch_lists(p, plan, others[_MASK_TILES], True)
    launch(flash_attention_dkdv_kernel, plan, *inputs, *written, *others[:-1], lists, others[-1])
    for sum_plan, parts, target in zip(sums, written, targets, strict=False):  # `sums` is empty if nothing is split
        if target is not None:
            launch(flash_attention_sum_splits_kernel, sum_plan, parts, target)
    for target, result in zip(targets, results, strict=True):
        if target is not None and result is not None:
            _copy_back(target, result)


@planned
def _plan_dq(p: _Problem, dout: tuple[int, ...], dq: tuple[int, ...]) -> Plan:
    config = p.config("dq")
    few = p.max_seqlen_q <= 64 or p.batch_invariant
    if config["BLOCK_M"] == 128 and few and p.constants["BLOCK_D"] <= 128:
        config["BLOCK_M"] = 64  # the large tile spills for few queries, which would leave half of it empty
    modified, wide = p.constants["HAS_MODIFIED"], p.constants["BLOCK_D"] == 128
    small = p.capability != 0 and device_of(p.capability).name in ("ampere", "small")
    if (p.constants["HAS_LEFT"] and wide) or (modified and (wide or small)):
        config["BLOCK_N"] = min(config["BLOCK_N"], 32)  # with a score function or one more masked loop, 64 keys spill
    if modified and wide and small:
        config["BLOCK_M"] = min(config["BLOCK_M"], 64)
    if p.constants["HAS_TILES"]:  # as in the forward pass
        config["BLOCK_N"] = min(config["BLOCK_N"], 64)
    lists = list_strides(p, config["BLOCK_M"], config["BLOCK_N"], False)
    tiles = triton.cdiv(p.max_seqlen_q, config["BLOCK_M"])
    numbers = (p.n_batch, p.n_heads, p.group, p.group * p.section(p.max_seqlen_k), *_numbers(p, dout, dq))
    fixed = {"natural_scale": p.natural_scale, "LSE_LOW": p.wide_lse}
    return p.plan(tiles * p.n_batch * p.n_heads, numbers, lists, fixed, p.score_functions(slope=0), config)


def _launch_dq(p: _Problem, inputs: tuple[Tensor | None, ...], others: tuple[Any, ...], dq: Tensor) -> None:
    result = _batched(dq)
    target = _target(result, p.head_dim)
    dout = inputs[3]
    assert dout is not None
    plan = _plan_dq(p, dout.stride(), target.stride())
    lists = launch_lists(p, plan, others[_MASK_TILES], False)
    launch(flash_attention_dq_kernel, plan, *inputs, target, *others[:-1], lists, others[-1])
    _copy_back(target, result)
