"""Allocates the results of attention, and launches the forward pass; `backward_launch` launches the backward pass.

The kernels see every call as ``[B, H, T, D]``. Packed tokens ``[total, H, D]`` are viewed as ``[1, H, total, D]``, and
cu_seqlens give each sequence's part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from foundry_kernels._triton.devices import capability, device_of
from foundry_kernels._triton.launch import Plan, launch
from foundry_kernels._triton.plans import planned
from foundry_kernels._triton.rows import contiguous, empty_like
from foundry_kernels.core.layout import dense_strides, inverse, order_of, storage_order
from foundry_kernels.core.registry import BackendUnavailable
from foundry_kernels.ops.flash_attention.options import AttentionOptions
from foundry_kernels.ops.flash_attention.score_program.gradients import empty_dscore
from foundry_kernels.ops.flash_attention.triton.config import shared_needed
from foundry_kernels.ops.flash_attention.triton.decode_launch import launch_decode
from foundry_kernels.ops.flash_attention.triton.forward import flash_attention_fwd_kernel
from foundry_kernels.ops.flash_attention.triton.kernel_options import (
    captured_tensors,
    page_tensors,
    pair_tensors,
)
from foundry_kernels.ops.flash_attention.triton.problem import (
    _FAR_APART,
    _has_aligned_rows,
    _Problem,
    _problem,
)
from foundry_kernels.ops.flash_attention.triton.tiles_launch import launch_lists, list_strides


def _batched(x: Tensor) -> Tensor:
    return x if x.dim() == 4 else x.transpose(0, 1).unsqueeze(0)


def _aligned(x: Tensor) -> Tensor:
    """x ``[B, H, T, width]``, or a copy with rows padded by zeros, which can be read 16 bytes at a time.

    Kernels that read single elements would need too many registers, and a copy is cheap next to attention.
    """
    if x.data_ptr() % 16 == 0 and _has_aligned_rows(x.shape, x.stride(), x.dtype):
        return x
    step, width = 16 // x.element_size(), x.shape[3]
    copy = _empty_rows(x, -(-width // step) * step)
    copy[..., :width] = x
    copy[..., width:] = 0
    return copy


Rows = Callable[[Tensor, int], Tensor]


def _empty_rows(x: Tensor, width: int) -> Tensor:
    """Memory for as many rows as x has, of `width` columns, in x's storage order."""
    if width == x.shape[-1] and x.is_contiguous():
        return empty_like(x)
    shape, strides = _row_layout(x.shape, x.stride(), width)
    return torch.empty_strided(shape, strides, dtype=x.dtype, device=x.device)


@planned
def _row_layout(shape: tuple[int, ...], strides: tuple[int, ...], width: int) -> tuple[list[int], tuple[int, ...]]:
    order = list(range(len(shape))) if 0 in shape else order_of(shape, strides)
    shape = (*shape[:-1], width)
    return list(shape), dense_strides(shape, order)


def fake_rows(x: Tensor, width: int) -> Tensor:
    """Does the same as `_empty_rows`, for sizes that may be symbolic."""
    order = storage_order(x)
    shape = [*x.shape[:-1], width]
    return torch.empty([shape[d] for d in order], dtype=x.dtype, device=x.device).permute(inverse(order))


def _target(result: Tensor, width: int) -> Tensor:
    """The memory in which a kernel for rows of `width` columns writes `result`: `result` itself, or memory with padded
    rows."""
    return result if result.shape[3] == width else _empty_rows(result, width)


def _copy_back(target: Tensor, result: Tensor) -> None:
    if target is not result:
        result.copy_(target[..., : result.shape[3]])


def empty_fwd(
    q: Tensor, v: Tensor, options: AttentionOptions, save_lse: bool, save_stats: bool, rows: Rows = _empty_rows
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """(out, lse, entropy, max_logit), with None for a result that is not requested."""
    head_dim_v = v.shape[-1]
    if options.packed:
        total, n_heads, _ = q.shape
        out, shape = q.new_empty(total, n_heads, head_dim_v), [n_heads, total]
    else:
        out, shape = rows(q, head_dim_v), list(q.shape[:3])
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    lse = None
    if save_lse:
        # `lse_dtype` without the calls, which cost time on the host.
        biased = options.attn_mask is not None and options.attn_mask.dtype != torch.bool
        wide = torch.float64 if biased or options.score_mod or q.dtype.itemsize >= 4 else torch.float32
        lse = q.new_empty(shape, dtype=wide)
    if not save_stats:
        return out, lse, None, None
    entropy = q.new_empty(shape, dtype=dtype)
    return out, lse, entropy, torch.empty_like(entropy)


Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def empty_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: AttentionOptions,
    need_dq: bool,
    need_dk: bool,
    need_dv: bool,
    need_dsinks: bool,
    need_dbias: bool,
    dscore_slots: Sequence[int],
    rows: Rows = _empty_rows,
) -> Gradients:
    """(dq, dk, dv, dsinks, dbias, dscore), with None for a gradient that is not needed."""
    return (
        rows(q, q.shape[-1]) if need_dq else None,
        rows(k, k.shape[-1]) if need_dk else None,
        rows(v, v.shape[-1]) if need_dv else None,
        torch.empty_like(options.sinks) if need_dsinks and options.sinks is not None else None,
        torch.empty_like(options.attn_mask) if need_dbias and options.attn_mask is not None else None,
        empty_dscore(q, options.score_tensors or (), dscore_slots) if dscore_slots else None,
    )


def refuse_wide(q: Tensor, v: Tensor, backward: bool) -> None:
    """Refuses a call whose tiles do not fit a program's shared memory or, on AMD's GPUs, its registers.

    Raises:
        BackendUnavailable: the message says what does not fit.
    """
    widths = (q.shape[-1], v.shape[-1])
    if sum(widths) * q.element_size() <= 2048 and max(widths) <= 256:  # these fit every GPU
        return
    chip = capability(q.device)
    gpu = device_of(chip)
    if chip == 0 or q.element_size() == 2:
        return
    blocks = [max(16, triton.next_power_of_2(width)) for width in widths]
    if gpu.name == "cdna":
        if backward and max(blocks) > 256:  # every tile would spill half of its registers
            raise BackendUnavailable(
                f"flash_attention: backend 'triton': the backward pass in {q.dtype} with head_dim {widths[0]} (v's is "
                f"{widths[1]}) is for heads of at most 256 on this GPU. Use 16 bits, or backend 'reference'"
            )
        return
    for kernel in ("fwd", "dkdv", "dq") if backward else ("fwd",):
        needed = shared_needed(kernel, blocks[0], blocks[1], q.dtype)
        if needed > gpu.block_shared:
            raise BackendUnavailable(
                f"flash_attention: backend 'triton': the {'forward' if kernel == 'fwd' else 'backward'} pass in "
                f"{q.dtype} with head_dim {widths[0]} (v's is {widths[1]}) needs {needed} bytes of shared memory; a "
                f"program on this GPU, of compute capability {chip / 10}, has {gpu.block_shared}. Use 16 bits, or "
                "backend 'reference'"
            )


def aligned_problem(
    q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions
) -> tuple[Tensor, Tensor, Tensor, _Problem]:
    """q, k and v, batched and `_aligned`, and their problem."""
    q, k, v = _batched(q), _batched(k), _batched(v)
    p = _problem(q, k, v, options)
    if p.rows_aligned and (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16 == 0:
        return q, k, v, p
    q, k, v = _aligned(q), _aligned(k), _aligned(v)
    return q, k, v, _problem(q, k, v, options)


@planned
def _plan_fwd(p: _Problem, out: tuple[int, ...], has_sinks: bool, save_lse: bool, save_stats: bool) -> Plan:
    preferred: list[dict[str, Any]] = []
    flags = {"HAS_SINKS": has_sinks, "SAVE_LSE": save_lse, "SAVE_STATS": save_stats}
    if p.capability == 90 and not p.batch_invariant:  # the choice between the two kernels may depend on the batch
        from foundry_kernels.ops.flash_attention.triton import gluon_launch  # takes 60 ms, which other GPUs need not

        preferred = gluon_launch.configs(p, flags, out)
    config = p.config("fwd", *preferred)
    if "GLUON" in config:
        return gluon_launch.plan(p, tuple(config.items()))
    if config["BLOCK_N"] == 128 and (p.constants["HAS_LEFT"] or p.max_seqlen_k <= 64 or p.batch_invariant):
        config |= {"BLOCK_N": 64, "num_stages": 3}  # with one more masked loop for the left edge, 128 keys spill
    if p.constants["HAS_MODIFIED"] and p.constants["BLOCK_D"] >= 128:
        config["AHEAD"] = False  # a score function needs the registers of the next tile's scores
    if p.constants["HAS_TILES"]:  # a tile must be within one tile of the mask
        config["BLOCK_N"] = min(config["BLOCK_N"], 64)
        if p.wide_pairs and config["BLOCK_M"] == 64:  # the tile for wgmma leaves no registers for lists
            config |= {"BLOCK_M": 32, "BLOCK_N": 32, "num_stages": 2}
    tiles = triton.cdiv(p.max_seqlen_q, config["BLOCK_M"])
    numbers = (
        p.n_batch, p.n_heads, p.group, p.group * p.section(p.max_seqlen_k), p.tokens_q, p.tokens_k, *p.strides_qkv,
        *p.strides(out), p.stride_lseb,
    )  # fmt: skip
    lists = list_strides(p, config["BLOCK_M"], config["BLOCK_N"], False)
    functions = p.score_functions()
    return p.plan(tiles * p.n_batch * p.n_heads, numbers, p.pages, lists, flags, functions, config)


def launch_fwd(
    q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, save_lse: bool, save_stats: bool
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    out, lse, entropy, max_logit = empty_fwd(q, v, options, save_lse, save_stats)
    if out.numel() == 0:
        return out, lse, entropy, max_logit
    result = _batched(out)
    if options.block_table is None:
        q, k, v, p = aligned_problem(q, k, v, options)
        keys = options.cu_seqlens_k
    else:  # pages are not copied, whatever their alignment; queries keep the same number of columns
        near = q.stride(2) == 1 and q.stride(0) < _FAR_APART
        q, k, v, keys = _batched(q if near else q.contiguous()), k.transpose(1, 2), v.transpose(1, 2), options.seqused_k
        p = _problem(q, k, v, options)
    target = _target(result, p.head_dim_v)
    sinks, slopes = contiguous(options.sinks), contiguous(options.alibi_slopes)
    pairs, pages, captured = pair_tensors(options), page_tensors(options), None
    if options.score_mod:
        captured = captured_tensors(options, q)
    lengths, results = (contiguous(options.cu_seqlens_q), contiguous(keys)), (lse, entropy, max_logit)
    if p.few_queries:
        tensors = (target, *results), lengths, slopes, sinks, pairs, pages, captured
        launch_decode(p, (q, k, v), *tensors, save_lse, save_stats)
    else:
        plan = _plan_fwd(p, target.stride(), sinks is not None, save_lse, save_stats)
        if "STAGES" in plan.constants:
            from foundry_kernels.ops.flash_attention.triton import gluon_launch

            gluon_launch.launch_gluon(plan, q, k, v, target, lse)
        else:
            lists = launch_lists(p, plan, options.mask_tiles, False)
            others = (*results, *lengths, slopes, sinks, *pairs, lists, *pages, captured)
            launch(flash_attention_fwd_kernel, plan, q, k, v, target, *others)
    _copy_back(target, result)
    return out, lse, entropy, max_logit
