"""What attention allocates and launches for a call.

The kernels see every call as ``[B, H, T, D]``. Packed tokens ``[total, H, D]`` are viewed as ``[1, H, total, D]``, of
which cu_seqlens give each sequence's part.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from foundry_kernels._layout import inverse, storage_order
from foundry_kernels._triton import capability, compute_dtype
from foundry_kernels.ops.flash_attention.options import AttentionOptions
from foundry_kernels.ops.flash_attention.triton.backward import (
    flash_attention_dkdv_kernel,
    flash_attention_dq_kernel,
    flash_attention_preprocess_kernel,
)
from foundry_kernels.ops.flash_attention.triton.config import config
from foundry_kernels.ops.flash_attention.triton.forward import flash_attention_fwd_kernel

#: Within a tile the offset of a row has 32 bits: inputs whose rows lie this many elements apart are copied.
_FAR_APART = 1 << 23


def _batched(x: Tensor) -> Tensor:
    return x if x.dim() == 4 else x.transpose(0, 1).unsqueeze(0)


def _aligned(x: Tensor) -> Tensor:
    """x ``[B, H, T, width]``, or a copy with rows padded by zeros, which can be read 16 bytes at a time.

    Reading single elements would take the kernels more registers than there are; next to attention a copy is cheap.
    """
    step, width = 16 // x.element_size(), x.shape[3]
    whole = x.stride(3) == 1 and width % step == 0 and x.data_ptr() % 16 == 0
    if whole and x.stride(2) < _FAR_APART and all(s % step == 0 for s in x.stride()[:3]):
        return x
    copy = _empty_rows(x, -(-width // step) * step)
    copy[..., :width] = x
    copy[..., width:] = 0
    return copy


def _empty_rows(x: Tensor, width: int) -> Tensor:
    """Memory for rows of `width` columns, as many as x has and in x's storage order."""
    order = storage_order(x)
    shape = [*x.shape[:-1], width]
    return torch.empty([shape[d] for d in order], dtype=x.dtype, device=x.device).permute(inverse(order))


def _target(result: Tensor, width: int) -> Tensor:
    """What a kernel that works on rows of `width` columns writes `result` to: itself, or memory with padded rows."""
    return result if result.shape[3] == width else _empty_rows(result, width)


def _copy_back(target: Tensor, result: Tensor) -> None:
    if target is not result:
        result.copy_(target[..., : result.shape[3]])


def empty_fwd(q: Tensor, v: Tensor, options: AttentionOptions, save_lse: bool, save_stats: bool) -> tuple[Tensor, ...]:
    """(out, lse, entropy, max_logit), empty tensors in place of what is not wanted.

    Of float32 inputs lse has float64: rounded to float32, it would be the largest error of the gradients by far.
    """
    head_dim_v = v.shape[-1]
    if options.packed:
        total, n_heads, _ = q.shape
        out, rows = q.new_empty(total, n_heads, head_dim_v), [n_heads, total]
    else:
        out, rows = _empty_rows(q, head_dim_v), list(q.shape[:3])
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    lse_dtype = torch.float64 if q.dtype == torch.float32 else dtype
    wanted = ((save_lse, lse_dtype), (save_stats, dtype), (save_stats, dtype))
    return out, *(torch.empty(rows if want else [0], dtype=dtype, device=q.device) for want, dtype in wanted)


def empty_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: AttentionOptions,
    need_dq: bool,
    need_dk: bool,
    need_dv: bool,
    need_dsinks: bool,
) -> tuple[Tensor, ...]:
    """(dq, dk, dv, dsinks), empty tensors in place of what is not needed."""
    needed = ((q, need_dq), (k, need_dk), (v, need_dv))
    dsinks = q.new_empty(0) if options.sinks is None or not need_dsinks else torch.empty_like(options.sinks)
    return *(_empty_rows(x, x.shape[-1]) if need else x.new_empty(0) for x, need in needed), dsinks


class _Problem:
    """What the launches of one call have in common; q, k and v are batched and aligned."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> None:
        self.packed = options.packed
        self.n_heads, self.tokens_q, self.head_dim = q.shape[1:]
        self.n_kv_heads, self.tokens_k, self.head_dim_v = v.shape[1:]
        self.n_batch = q.shape[0] if options.cu_seqlens_q is None else options.cu_seqlens_q.shape[0] - 1
        self.group = self.n_heads // max(self.n_kv_heads, 1)
        self.max_seqlen_q = min(options.max_seqlen_q, self.tokens_q)
        self.max_seqlen_k = min(options.max_seqlen_k, self.tokens_k)
        self.dtype, self.capability = q.dtype, capability(q.device)
        reach = self.tokens_q + self.tokens_k  # a window that extends past every key bounds nothing
        left, right = options.window_left, options.window_right
        left = None if left is None or left >= reach else left
        right = None if right is None or right >= reach else right
        self.window = (left or 0, right or 0)
        self.cu_seqlens = [None if x is None else x.contiguous() for x in (options.cu_seqlens_q, options.cu_seqlens_k)]
        slopes = options.alibi_slopes
        self.alibi_slopes = None if slopes is None else slopes.contiguous()
        self.stride_alibi = self.n_heads if slopes is not None and slopes.dim() == 2 else 0
        self.sinks = None if options.sinks is None else options.sinks.contiguous()
        self.stride_lseb = 0 if self.packed else self.n_heads * self.tokens_q
        self.natural_scale, softcap, log2e = options.scale, options.softcap, math.log2(math.e)
        self.scale, self.softcap = options.scale * log2e, 1.0
        if softcap is not None:
            self.scale, self.softcap = options.scale / softcap, softcap * log2e
        self.constants = {
            "VARLEN": self.packed,
            "BOTTOM_RIGHT": options.bottom_right,
            "HAS_LEFT": left is not None,
            "HAS_RIGHT": right is not None,
            "HAS_SOFTCAP": softcap is not None,
            "HAS_ALIBI": slopes is not None,
            "COMPUTE": compute_dtype(q.dtype),
            "D": self.head_dim,
            "DV": self.head_dim_v,
            "BLOCK_D": max(16, triton.next_power_of_2(self.head_dim)),
            "BLOCK_DV": max(16, triton.next_power_of_2(self.head_dim_v)),
        }

    def config(self, kernel: str) -> dict[str, Any]:
        blocks = (self.constants["BLOCK_D"], self.constants["BLOCK_DV"])
        needs_registers = (
            self.constants["HAS_SOFTCAP"] or self.constants["HAS_ALIBI"] or blocks != (self.head_dim, self.head_dim_v)
        )
        return config(kernel, self.capability, max(blocks), self.dtype, needs_registers)

    def strides(self, *tensors: Tensor) -> list[int]:
        """Of the sequence, the head and the token; packed sequences are told apart by cu_seqlens."""
        found: list[int] = []
        for x in tensors:
            sequence, head, token, _ = x.stride()
            found += [0 if self.packed else sequence, head, token]
        return found


def launch_fwd(
    q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, save_lse: bool, save_stats: bool
) -> tuple[Tensor, ...]:
    out, lse, entropy, max_logit = empty_fwd(q, v, options, save_lse, save_stats)
    if out.numel() == 0:
        return out, lse, entropy, max_logit
    q, k, v, result = _aligned(_batched(q)), _aligned(_batched(k)), _aligned(_batched(v)), _batched(out)
    p = _Problem(q, k, v, options)
    target = _target(result, p.head_dim_v)
    launch = p.config("fwd")
    tiles = triton.cdiv(p.max_seqlen_q, launch["BLOCK_M"])
    flash_attention_fwd_kernel[(tiles * p.n_batch * p.n_heads,)](
        q, k, v, target, lse, entropy, max_logit, *p.cu_seqlens, p.alibi_slopes, p.sinks,
        p.n_batch, p.n_heads, p.group, p.tokens_q, p.tokens_k, *p.strides(q, k, v, target),
        p.stride_lseb, p.stride_alibi, p.scale, p.softcap, *p.window,
        HAS_SINKS=p.sinks is not None, SAVE_LSE=save_lse, SAVE_STATS=save_stats, **p.constants, **launch,
    )  # fmt: skip
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
) -> tuple[Tensor, ...]:
    dq, dk, dv, dsinks = grads = empty_bwd(q, k, v, options, need_dq, need_dk, need_dv, need_dsinks)
    if out.numel() == 0 or k.numel() == 0:
        return tuple(x.zero_() for x in grads)
    dout, q, k, v = (_aligned(_batched(x)) for x in (dout, q, k, v))
    p = _Problem(q, k, v, options)
    rows = _launch_preprocess(p, dout, dlse, _aligned(_batched(out)), lse, dsinks if need_dsinks else None)
    if need_dk or need_dv:
        _launch_dkdv(p, q, k, v, dout, rows, dk if need_dk else None, dv if need_dv else None)
    if need_dq:
        _launch_dq(p, q, k, v, dout, rows, dq)
    return grads


class _Rows(NamedTuple):
    """What the backward kernels read of each row."""

    lse_log2: Tensor
    lse_low: Tensor | None
    delta: Tensor


def _launch_preprocess(
    p: _Problem, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, dsinks: Tensor | None
) -> _Rows:
    delta = torch.empty_like(lse, dtype=torch.float64 if p.dtype == torch.float64 else torch.float32)
    rows = _Rows(torch.empty_like(delta), torch.empty_like(delta) if p.dtype == torch.float32 else None, delta)
    n_batch = out.shape[0]  # all packed tokens at once
    dlse_strides = [0, 0, 0] if dlse is None else [*[0] * (3 - dlse.dim()), *dlse.stride()]
    launch = p.config("preprocess")
    tiles = triton.cdiv(p.tokens_q, launch["BLOCK_M"]) * n_batch
    partial = None if dsinks is None else delta.new_empty((tiles, p.n_heads))
    flash_attention_preprocess_kernel[(tiles * p.n_heads,)](
        dout, out, lse, dlse, p.sinks, rows.delta, rows.lse_log2, rows.lse_low, partial,
        n_batch, p.n_heads, p.tokens_q, *dout.stride()[:3], *out.stride()[:3], *dlse_strides,
        HAS_DLSE=dlse is not None, NEED_DSINKS=dsinks is not None, LSE_LOW=rows.lse_low is not None,
        COMPUTE=p.constants["COMPUTE"], DV=p.head_dim_v, BLOCK_DV=p.constants["BLOCK_DV"], **launch,
    )  # fmt: skip
    if dsinks is not None and partial is not None:
        torch.sum(partial, 0, out=dsinks) if dsinks.dtype == partial.dtype else dsinks.copy_(partial.sum(0))
    return rows


def _launch_dkdv(
    p: _Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    rows: _Rows,
    dk: Tensor | None,
    dv: Tensor | None,
) -> None:
    results = [None if x is None else _batched(x) for x in (dk, dv)]
    widths = (p.head_dim, p.head_dim_v)
    targets = [None if x is None else _target(x, width) for x, width in zip(results, widths, strict=True)]
    strides = [s for x in targets for s in ([0, 0, 0] if x is None else p.strides(x))]
    launch = p.config("dkdv")
    tiles = triton.cdiv(p.max_seqlen_k, launch["BLOCK_N"])
    flash_attention_dkdv_kernel[(tiles * p.n_batch * p.n_kv_heads,)](
        q, k, v, dout, *rows, *targets, *p.cu_seqlens, p.alibi_slopes,
        p.n_batch, p.n_kv_heads, p.group, p.tokens_q, p.tokens_k, *p.strides(q, k, v, dout), *strides,
        p.stride_lseb, p.stride_alibi, p.scale, p.softcap, p.natural_scale, *p.window,
        LSE_LOW=rows.lse_low is not None, NEED_DK=dk is not None, NEED_DV=dv is not None, **p.constants, **launch,
    )  # fmt: skip
    for target, result in zip(targets, results, strict=True):
        if target is not None and result is not None:
            _copy_back(target, result)


def _launch_dq(p: _Problem, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, rows: _Rows, dq: Tensor) -> None:
    result = _batched(dq)
    target = _target(result, p.head_dim)
    launch = p.config("dq")
    tiles = triton.cdiv(p.max_seqlen_q, launch["BLOCK_M"])
    flash_attention_dq_kernel[(tiles * p.n_batch * p.n_heads,)](
        q, k, v, dout, *rows, target, *p.cu_seqlens, p.alibi_slopes,
        p.n_batch, p.n_heads, p.group, p.tokens_q, p.tokens_k, *p.strides(q, k, v, dout, target),
        p.stride_lseb, p.stride_alibi, p.scale, p.softcap, p.natural_scale, *p.window,
        LSE_LOW=rows.lse_low is not None, **p.constants, **launch,
    )  # fmt: skip
    _copy_back(target, result)
