"""What attention allocates and launches for a call.

The kernels see every call as ``[B, H, T, D]``. Packed tokens ``[total, H, D]`` are viewed as ``[1, H, total, D]``, of
which cu_seqlens give each sequence's part.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from foundry_kernels._launch import Plan, launch, planned
from foundry_kernels._layout import dense_strides, inverse, order_of, storage_order
from foundry_kernels._triton import capability, compute_dtype, contiguous, strides_of
from foundry_kernels.ops.flash_attention.options import AttentionOptions
from foundry_kernels.ops.flash_attention.triton.backward import (
    flash_attention_dkdv_kernel,
    flash_attention_dq_kernel,
    flash_attention_preprocess_kernel,
)
from foundry_kernels.ops.flash_attention.triton.config import rows as config_rows
from foundry_kernels.ops.flash_attention.triton.decode_launch import launch_decode
from foundry_kernels.ops.flash_attention.triton.forward import flash_attention_fwd_kernel
from foundry_kernels.tuning import choose

#: Within a tile the offset of a row has 32 bits: inputs whose rows lie this many elements apart are copied.
_FAR_APART = 1 << 23

Layout = tuple[tuple[int, ...], tuple[int, ...]]  # shape and strides


def _batched(x: Tensor) -> Tensor:
    return x if x.dim() == 4 else x.transpose(0, 1).unsqueeze(0)


def _aligned(x: Tensor) -> Tensor:
    """x ``[B, H, T, width]``, or a copy with rows padded by zeros, which can be read 16 bytes at a time.

    Reading single elements would take the kernels more registers than there are; next to attention a copy is cheap.
    """
    if x.data_ptr() % 16 == 0 and _has_aligned_rows(x.shape, x.stride(), x.dtype):
        return x
    step, width = 16 // x.element_size(), x.shape[3]
    copy = _empty_rows(x, -(-width // step) * step)
    copy[..., :width] = x
    copy[..., width:] = 0
    return copy


@planned
def _has_aligned_rows(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> bool:
    step = 16 // dtype.itemsize
    whole = strides[3] == 1 and shape[3] % step == 0
    return whole and strides[2] < _FAR_APART and all(s % step == 0 for s in strides[:3])


Rows = Callable[[Tensor, int], Tensor]


def _empty_rows(x: Tensor, width: int) -> Tensor:
    """Memory for rows of `width` columns, as many as x has and in x's storage order."""
    shape, strides = _row_layout(x.shape, x.stride(), width)
    return torch.empty_strided(shape, strides, dtype=x.dtype, device=x.device)


@planned
def _row_layout(shape: tuple[int, ...], strides: tuple[int, ...], width: int) -> tuple[list[int], tuple[int, ...]]:
    order = list(range(len(shape))) if 0 in shape else order_of(shape, strides)
    shape = (*shape[:-1], width)
    return list(shape), dense_strides(shape, order)


def fake_rows(x: Tensor, width: int) -> Tensor:
    """As `_empty_rows`, for sizes that may be symbolic."""
    order = storage_order(x)
    shape = [*x.shape[:-1], width]
    return torch.empty([shape[d] for d in order], dtype=x.dtype, device=x.device).permute(inverse(order))


def _target(result: Tensor, width: int) -> Tensor:
    """What a kernel that works on rows of `width` columns writes `result` to: itself, or memory with padded rows."""
    return result if result.shape[3] == width else _empty_rows(result, width)


def _copy_back(target: Tensor, result: Tensor) -> None:
    if target is not result:
        result.copy_(target[..., : result.shape[3]])


def empty_fwd(
    q: Tensor, v: Tensor, options: AttentionOptions, save_lse: bool, save_stats: bool, rows: Rows = _empty_rows
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """(out, lse, entropy, max_logit), None in place of what is not wanted.

    Of float32 inputs lse has float64: rounded to float32, it would be the largest error of the gradients by far.
    """
    head_dim_v = v.shape[-1]
    if options.packed:
        total, n_heads, _ = q.shape
        out, shape = q.new_empty(total, n_heads, head_dim_v), [n_heads, total]
    else:
        out, shape = rows(q, head_dim_v), list(q.shape[:3])
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    lse_dtype = torch.float64 if q.dtype == torch.float32 else dtype
    lse = torch.empty(shape, dtype=lse_dtype, device=q.device) if save_lse else None
    if not save_stats:
        return out, lse, None, None
    entropy = torch.empty(shape, dtype=dtype, device=q.device)
    return out, lse, entropy, torch.empty_like(entropy)


Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def empty_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: AttentionOptions,
    need_dq: bool,
    need_dk: bool,
    need_dv: bool,
    need_dsinks: bool,
    rows: Rows = _empty_rows,
) -> Gradients:
    """(dq, dk, dv, dsinks), None in place of what is not needed."""
    return (
        rows(q, q.shape[-1]) if need_dq else None,
        rows(k, k.shape[-1]) if need_dk else None,
        rows(v, v.shape[-1]) if need_dv else None,
        torch.empty_like(options.sinks) if need_dsinks and options.sinks is not None else None,
    )


class _Problem:
    """What the launches of calls with the same shapes, strides and options have in common; q, k and v are batched and
    aligned. There is one for each combination, so that it can stand for them (`_problem`)."""

    def __init__(
        self,
        q: Layout,
        k: Layout,
        v: Layout,
        dtype: torch.dtype,
        device: torch.device,
        n_sequences: int | None,
        alibi_dims: int,
        max_seqlen_q: int,
        max_seqlen_k: int,
        scale: float,
        left: int | None,
        right: int | None,
        softcap: float | None,
        bottom_right: bool,
    ) -> None:
        self.packed = n_sequences is not None
        self.n_heads, self.tokens_q, self.head_dim = q[0][1:]
        self.n_kv_heads, self.tokens_k, self.head_dim_v = v[0][1:]
        self.n_batch = q[0][0] if n_sequences is None else n_sequences
        self.group = self.n_heads // max(self.n_kv_heads, 1)
        self.max_seqlen_q = min(max_seqlen_q, self.tokens_q)
        self.max_seqlen_k = min(max_seqlen_k, self.tokens_k)
        self.dtype, self.device, self.capability = dtype, device, capability(device)
        reach = self.tokens_q + self.tokens_k  # a window that extends past every key bounds nothing
        left = None if left is None or left >= reach else left
        right = None if right is None or right >= reach else right
        self.window = (left or 0, right or 0)
        self.stride_alibi = self.n_heads if alibi_dims == 2 else 0
        self.stride_lseb = 0 if self.packed else self.n_heads * self.tokens_q
        self.natural_scale, log2e = scale, math.log2(math.e)
        self.scale, self.softcap = scale * log2e, 1.0
        if softcap is not None:
            self.scale, self.softcap = scale / softcap, softcap * log2e
        self.strides_qkv = self.strides(q[1], k[1], v[1])
        self.constants = {
            "VARLEN": self.packed,
            "BOTTOM_RIGHT": bottom_right,
            "HAS_LEFT": left is not None,
            "HAS_RIGHT": right is not None,
            "HAS_SOFTCAP": softcap is not None,
            "HAS_ALIBI": alibi_dims > 0,
            "COMPUTE": compute_dtype(dtype),
            "D": self.head_dim,
            "DV": self.head_dim_v,
            "BLOCK_D": max(16, triton.next_power_of_2(self.head_dim)),
            "BLOCK_DV": max(16, triton.next_power_of_2(self.head_dim_v)),
        }
        self.few_queries = self.group * self.max_seqlen_q <= self._rows("decode")[1][0]["BLOCK_M"]

    def config(self, kernel: str, **fixed: int) -> dict[str, Any]:
        """The row for `kernel`, with what is `fixed` in place of what the table says."""
        tags, found = self._rows(kernel)
        return choose(f"flash_attention_{kernel}_kernel", tags, [row | fixed for row in found], self.device)

    def _rows(self, kernel: str) -> tuple[str, list[dict[str, Any]]]:
        """What tells the launch apart from others with the same row, and the rows."""
        blocks = (self.constants["BLOCK_D"], self.constants["BLOCK_DV"])
        needs_registers = (
            self.constants["HAS_SOFTCAP"] or self.constants["HAS_ALIBI"] or blocks != (self.head_dim, self.head_dim_v)
        )
        found = config_rows(kernel, self.capability, max(blocks), self.dtype, needs_registers)
        tags = f"{8 * self.dtype.itemsize}-bit D<={max(blocks)}{' with options' if needs_registers else ''}"
        return tags, found

    def strides(self, *tensors: tuple[int, ...] | None) -> tuple[int, ...]:
        """Of the sequence, the head and the token; packed sequences are told apart by cu_seqlens."""
        found: list[int] = []
        for strides in tensors:
            sequence, head, token, _ = strides or (0, 0, 0, 0)
            found += [0 if self.packed else sequence, head, token]
        return tuple(found)


_kept_problem = planned(_Problem)


def _problem(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> _Problem:
    cu_seqlens, slopes = options.cu_seqlens_q, options.alibi_slopes
    return _kept_problem(
        (q.shape, q.stride()), (k.shape, k.stride()), (v.shape, v.stride()), q.dtype, q.device,
        None if cu_seqlens is None else cu_seqlens.shape[0] - 1, 0 if slopes is None else slopes.dim(),
        options.max_seqlen_q, options.max_seqlen_k, options.scale, options.window_left, options.window_right,
        options.softcap, options.bottom_right,
    )  # fmt: skip


@planned
def _plan_fwd(p: _Problem, out: tuple[int, ...], has_sinks: bool, save_lse: bool, save_stats: bool) -> Plan:
    config = p.config("fwd")
    tiles = triton.cdiv(p.max_seqlen_q, config["BLOCK_M"])
    numbers = (
        p.n_batch, p.n_heads, p.group, p.tokens_q, p.tokens_k, *p.strides_qkv, *p.strides(out),
        p.stride_lseb, p.stride_alibi, p.scale, p.softcap, *p.window,
    )  # fmt: skip
    flags = {"HAS_SINKS": has_sinks, "SAVE_LSE": save_lse, "SAVE_STATS": save_stats}
    return Plan((tiles * p.n_batch * p.n_heads,), numbers, p.constants | flags | config)


def launch_fwd(
    q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, save_lse: bool, save_stats: bool
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    out, lse, entropy, max_logit = empty_fwd(q, v, options, save_lse, save_stats)
    if out.numel() == 0:
        return out, lse, entropy, max_logit
    q, k, v, result = _aligned(_batched(q)), _aligned(_batched(k)), _aligned(_batched(v)), _batched(out)
    p = _problem(q, k, v, options)
    target = _target(result, p.head_dim_v)
    sinks, slopes = contiguous(options.sinks), contiguous(options.alibi_slopes)
    lengths, results = (contiguous(options.cu_seqlens_q), contiguous(options.cu_seqlens_k)), (lse, entropy, max_logit)
    if p.few_queries:
        launch_decode(p, (q, k, v), (target, *results), lengths, slopes, sinks, save_lse, save_stats)
    else:
        plan = _plan_fwd(p, target.stride(), sinks is not None, save_lse, save_stats)
        launch(flash_attention_fwd_kernel, plan, q, k, v, target, *results, *lengths, slopes, sinks)
    _copy_back(target, result)
    return out, lse, entropy, max_logit


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
) -> Gradients:
    dq, dk, dv, dsinks = grads = empty_bwd(q, k, v, options, need_dq, need_dk, need_dv, need_dsinks)
    if out.numel() == 0 or k.numel() == 0:
        for x in grads:
            if x is not None:
                x.zero_()
        return grads
    dout, q, k, v = _aligned(_batched(dout)), _aligned(_batched(q)), _aligned(_batched(k)), _aligned(_batched(v))
    p = _problem(q, k, v, options)
    rows = _launch_preprocess(p, dout, dlse, _aligned(_batched(out)), lse, options, dsinks)
    lengths = contiguous(options.cu_seqlens_q), contiguous(options.cu_seqlens_k), contiguous(options.alibi_slopes)
    if dk is not None or dv is not None:
        _launch_dkdv(p, (q, k, v, dout, *rows), lengths, dk, dv)
    if dq is not None:
        _launch_dq(p, (q, k, v, dout, *rows), lengths, dq)
    return grads


class _Rows(NamedTuple):
    """What the backward kernels read of each row."""

    lse_log2: Tensor
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
    """The number of tiles, and the launch; n_batch is 1 for all packed tokens at once."""
    config = p.config("preprocess")
    tiles = triton.cdiv(p.tokens_q, config["BLOCK_M"]) * n_batch
    dlse_strides = (0, 0, 0) if dlse is None else (*[0] * (3 - len(dlse)), *dlse)
    numbers = (n_batch, p.n_heads, p.tokens_q, *dout[:3], *out[:3], *dlse_strides)
    flags = {"HAS_DLSE": dlse is not None, "NEED_DSINKS": need_dsinks, "LSE_LOW": p.dtype == torch.float32}
    shared = {name: p.constants[name] for name in ("COMPUTE", "DV", "BLOCK_DV")}
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
    rows = _Rows(torch.empty_like(delta), torch.empty_like(delta) if p.dtype == torch.float32 else None, delta)
    tiles, plan = _plan_preprocess(p, out.shape[0], dout.stride(), out.stride(), strides_of(dlse), dsinks is not None)
    partial = None if dsinks is None else delta.new_empty((tiles, p.n_heads))
    launch(
        flash_attention_preprocess_kernel, plan, dout, out, lse, dlse, contiguous(options.sinks),
        rows.delta, rows.lse_log2, rows.lse_low, partial,
    )  # fmt: skip
    if dsinks is not None and partial is not None:
        torch.sum(partial, 0, out=dsinks) if dsinks.dtype == partial.dtype else dsinks.copy_(partial.sum(0))
    return rows


def _numbers(p: _Problem, n_heads: int, *tensors: tuple[int, ...] | None) -> tuple[Any, ...]:
    """That follow the tensors of both kernels; the strides are those of dout and of what is written."""
    return (
        p.n_batch, n_heads, p.group, p.tokens_q, p.tokens_k, *p.strides_qkv, *p.strides(*tensors),
        p.stride_lseb, p.stride_alibi, p.scale, p.softcap, p.natural_scale, *p.window,
    )  # fmt: skip


@planned
def _plan_dkdv(p: _Problem, dout: tuple[int, ...], dk: tuple[int, ...] | None, dv: tuple[int, ...] | None) -> Plan:
    config = p.config("dkdv")
    tiles = triton.cdiv(p.max_seqlen_k, config["BLOCK_N"])
    flags = {"LSE_LOW": p.dtype == torch.float32, "NEED_DK": dk is not None, "NEED_DV": dv is not None}
    numbers = _numbers(p, p.n_kv_heads, dout, dk, dv)
    return Plan((tiles * p.n_batch * p.n_kv_heads,), numbers, p.constants | flags | config)


def _launch_dkdv(
    p: _Problem,
    inputs: tuple[Tensor | None, ...],
    lengths: tuple[Tensor | None, ...],
    dk: Tensor | None,
    dv: Tensor | None,
) -> None:
    results = [None if x is None else _batched(x) for x in (dk, dv)]
    widths = (p.head_dim, p.head_dim_v)
    targets = [None if x is None else _target(x, width) for x, width in zip(results, widths, strict=True)]
    dout = inputs[3]
    assert dout is not None
    plan = _plan_dkdv(p, dout.stride(), *(strides_of(x) for x in targets))
    launch(flash_attention_dkdv_kernel, plan, *inputs, *targets, *lengths)
    for target, result in zip(targets, results, strict=True):
        if target is not None and result is not None:
            _copy_back(target, result)


@planned
def _plan_dq(p: _Problem, dout: tuple[int, ...], dq: tuple[int, ...]) -> Plan:
    config = p.config("dq")
    if config["BLOCK_M"] == 128 and p.max_seqlen_q <= 64 and p.constants["BLOCK_D"] <= 128:
        config["BLOCK_M"] = 64  # with rows of few queries alone, whose other half would be empty, the large tile spills
    tiles = triton.cdiv(p.max_seqlen_q, config["BLOCK_M"])
    constants = p.constants | {"LSE_LOW": p.dtype == torch.float32} | config
    return Plan((tiles * p.n_batch * p.n_heads,), _numbers(p, p.n_heads, dout, dq), constants)


def _launch_dq(p: _Problem, inputs: tuple[Tensor | None, ...], lengths: tuple[Tensor | None, ...], dq: Tensor) -> None:
    result = _batched(dq)
    target = _target(result, p.head_dim)
    dout = inputs[3]
    assert dout is not None
    plan = _plan_dq(p, dout.stride(), target.stride())
    launch(flash_attention_dq_kernel, plan, *inputs, target, *lengths)
    _copy_back(target, result)
