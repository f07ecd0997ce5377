"""Attention in Triton: what is launched for which call, the operators and their gradient.

Packed sequences are a batch of unequal ones: the operators take ``[1, H, total, D]`` with the starts of the sequences,
and the same kernels serve both.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
from torch import Tensor

from foundry_kernels._layout import inverse, storage_order
from foundry_kernels._triton import capability, compute_dtype, define, refuse_second_derivative
from foundry_kernels.ops.flash_attention.triton.backward import (
    flash_attention_delta_kernel,
    flash_attention_dkdv_kernel,
    flash_attention_dq_kernel,
)
from foundry_kernels.ops.flash_attention.triton.config import config
from foundry_kernels.ops.flash_attention.triton.forward import flash_attention_fwd_kernel

#: Tiles take the offset of a row in 32 bits; rows that lie this far apart are copied together first.
_FAR = 1 << 23


def _aligned(x: Tensor) -> Tensor:
    """x ``[B, H, T, width]``, or a copy with rows padded by zeros, which can be read 16 bytes at a time.

    Reading single elements takes the kernels more registers than there are; a copy takes little beside attention.
    """
    step, width = 16 // x.element_size(), x.shape[3]
    whole = x.stride(3) == 1 and width % step == 0 and x.data_ptr() % 16 == 0
    if whole and x.stride(2) < _FAR and all(s % step == 0 for s in x.stride()[:3]):
        return x
    copy = _dense(x, -(-width // step) * step)
    copy[..., :width] = x
    copy[..., width:] = 0
    return copy


def _padded(x: Tensor, width: int) -> Tensor:
    """Where a kernel writes x, given the width of its padded rows: x itself if that is its own."""
    return x if x.dim() < 4 or x.shape[3] == width else _dense(x, width)


def _keep(written: Tensor, x: Tensor) -> None:
    if written is not x:
        x.copy_(written[..., : x.shape[3]])


def _strides(x: Tensor, packed: bool) -> tuple[int, int, int]:
    """Of the sequence, the head and the token; packed sequences are told apart by their starts."""
    sequence, head, token = x.stride()[:3]
    return (0 if packed else sequence), head, token


def _dense(x: Tensor, width: int, packed: bool = False) -> Tensor:
    """Memory for ``[B, H, T, width]`` in x's storage order, that of tokens for packed sequences."""
    order = [0, 2, 1, 3] if packed else storage_order(x)
    shape = [*x.shape[:3], width]
    return torch.empty([shape[d] for d in order], dtype=x.dtype, device=x.device).permute(inverse(order))


def _sums(q: Tensor, *wanted: bool) -> list[Tensor]:
    """Memory for one number a row, ``[B, H, T]``, of each kind that is wanted."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return [torch.empty(q.shape[:3] if want else (0,), dtype=dtype, device=q.device) for want in wanted]


class _Problem:
    """What the launches of one call have in common."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        starts_q: Tensor | None,
        starts_k: Tensor | None,
        longest_q: int,
        longest_k: int,
        slopes: Tensor | None,
        scale: float,
        left: int | None,
        right: int | None,
        softcap: float | None,
        bottom_right: bool,
    ) -> None:
        self.packed = starts_q is not None
        self.heads, self.queries, self.width = q.shape[1:]
        self.kv_heads, self.keys, self.value_width = v.shape[1:]
        self.batch = q.shape[0] if starts_q is None else starts_q.shape[0] - 1
        self.group = self.heads // max(self.kv_heads, 1)
        self.longest_q, self.longest_k = min(longest_q, self.queries), min(longest_k, self.keys)
        self.dtype, self.capability = q.dtype, capability(q.device)
        reach = self.queries + self.keys  # a side that reaches past every key bounds nothing
        left = None if left is None or left >= reach else left
        right = None if right is None or right >= reach else right
        self.slopes = None if slopes is None else slopes.contiguous()
        self.slopes_stride = self.heads if slopes is not None and slopes.dim() == 2 else 0
        self.starts = [None if s is None else s.contiguous() for s in (starts_q, starts_k)]
        self.rows_stride = 0 if self.packed else self.heads * self.queries
        per_score = scale if softcap is None else scale / softcap
        log2e = math.log2(math.e)
        self.scale, self.cap = (scale * log2e, 1.0) if softcap is None else (per_score, softcap * log2e)
        self.sides = (left or 0, right or 0)
        self.constants = {
            "VARLEN": self.packed,
            "BOTTOM_RIGHT": bottom_right,
            "HAS_LEFT": left is not None,
            "HAS_RIGHT": right is not None,
            "HAS_CAP": softcap is not None,
            "HAS_SLOPES": slopes is not None,
            "COMPUTE": compute_dtype(q.dtype),
            "D": self.width,
            "DV": self.value_width,
            "BLOCK_D": max(16, triton.next_power_of_2(self.width)),
            "BLOCK_DV": max(16, triton.next_power_of_2(self.value_width)),
        }

    def config(self, kernel: str) -> dict[str, Any]:
        blocks, widths = (self.constants["BLOCK_D"], self.constants["BLOCK_DV"]), (self.width, self.value_width)
        width = max(blocks)
        crowded = self.constants["HAS_CAP"] or self.constants["HAS_SLOPES"] or blocks != widths
        return config(kernel, self.capability, width, self.dtype, crowded)


def _empty_fwd(
    q: Tensor, v: Tensor, packed: bool, keep_lse: bool, return_stats: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    lse, entropy, max_logit = _sums(q, keep_lse, return_stats, return_stats)
    return _dense(q, v.shape[3], packed), lse, entropy, max_logit


def _fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts_q: Tensor | None,
    starts_k: Tensor | None,
    longest_q: int,
    longest_k: int,
    slopes: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    left: int | None,
    right: int | None,
    softcap: float | None,
    bottom_right: bool,
    keep_lse: bool,
    return_stats: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    out, lse, entropy, max_logit = _empty_fwd(q, v, starts_q is not None, keep_lse, return_stats)
    if out.numel() == 0:
        return out, lse, entropy, max_logit
    q, k, v = _aligned(q), _aligned(k), _aligned(v)
    p = _Problem(q, k, v, starts_q, starts_k, longest_q, longest_k, slopes, scale, left, right, softcap, bottom_right)
    written = _padded(out, p.value_width)
    launch = p.config("fwd")
    tiles = triton.cdiv(p.longest_q, launch["BLOCK_M"])
    flash_attention_fwd_kernel[(tiles * p.batch * p.heads,)](
        q, k, v, written, lse, entropy, max_logit, *p.starts, p.slopes, None if sinks is None else sinks.contiguous(),
        p.batch, p.heads, p.group, p.queries, p.keys,
        *_strides(q, p.packed), *_strides(k, p.packed), *_strides(v, p.packed), *_strides(written, p.packed),
        p.rows_stride, p.slopes_stride, p.scale, p.cap, *p.sides,
        HAS_SINKS=sinks is not None, LSE=keep_lse, STATS=return_stats, **p.constants, **launch,
    )  # fmt: skip
    _keep(written, out)
    return out, lse, entropy, max_logit


def _empty_bwd(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, needed: tuple[bool, bool, bool, bool]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv = (_dense(x, x.shape[3]) if need else x.new_empty(0) for x, need in zip((q, k, v), needed, strict=False))
    dsinks = q.new_empty(0) if sinks is None or not needed[3] else torch.empty_like(sinks)
    return dq, dk, dv, dsinks


def _bwd(
    g: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    starts_q: Tensor | None,
    starts_k: Tensor | None,
    longest_q: int,
    longest_k: int,
    slopes: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    left: int | None,
    right: int | None,
    softcap: float | None,
    bottom_right: bool,
    need_dq: bool,
    need_dk: bool,
    need_dv: bool,
    need_dsinks: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv, dsinks = _empty_bwd(q, k, v, sinks, (need_dq, need_dk, need_dv, need_dsinks))
    if out.numel() == 0 or k.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_(), dsinks.zero_()
    g, q, k, v = _aligned(g), _aligned(q), _aligned(k), _aligned(v)
    p = _Problem(q, k, v, starts_q, starts_k, longest_q, longest_k, slopes, scale, left, right, softcap, bottom_right)
    delta = torch.empty_like(lse)
    written = [_padded(x, y.shape[3]) for x, y in ((dq, q), (dk, k), (dv, v))]
    if need_dq or need_dk or need_dsinks:
        out = _aligned(out)
        launch = p.config("delta")
        tiles = triton.cdiv(p.queries, launch["BLOCK_M"]) * q.shape[0]
        partial = lse.new_empty((tiles, p.heads)) if need_dsinks else None
        flash_attention_delta_kernel[(tiles * p.heads,)](
            g, out, lse, dlse, None if sinks is None else sinks.contiguous(), delta, partial,
            q.shape[0], p.heads, p.queries, *g.stride()[:3], *out.stride()[:3],
            *((0, 0, 0) if dlse is None else dlse.stride()), HAS_DLSE=dlse is not None, NEED_DSINKS=need_dsinks,
            COMPUTE=p.constants["COMPUTE"], DV=p.value_width, BLOCK_DV=p.constants["BLOCK_DV"], **launch,
        )  # fmt: skip
        if partial is not None:
            torch.sum(partial, 0, out=dsinks) if dsinks.dtype == partial.dtype else dsinks.copy_(partial.sum(0))
    shared = (
        *_strides(q, p.packed), *_strides(k, p.packed), *_strides(v, p.packed), *_strides(g, p.packed)
    )  # fmt: skip
    numbers = (p.rows_stride, p.slopes_stride, p.scale, p.cap, scale, *p.sides)
    if need_dk or need_dv:
        launch = p.config("dkdv")
        tiles = triton.cdiv(p.longest_k, launch["BLOCK_N"])
        flash_attention_dkdv_kernel[(tiles * p.batch * p.kv_heads,)](
            q, k, v, g, lse, delta, *written[1:], *p.starts, p.slopes,
            p.batch, p.kv_heads, p.group, p.queries, p.keys, *shared,
            *(_strides(written[1], p.packed) if need_dk else (0, 0, 0)),
            *(_strides(written[2], p.packed) if need_dv else (0, 0, 0)),
            *numbers, NEED_DK=need_dk, NEED_DV=need_dv, **p.constants, **launch,
        )  # fmt: skip
    if need_dq:
        launch = p.config("dq")
        tiles = triton.cdiv(p.longest_q, launch["BLOCK_M"])
        flash_attention_dq_kernel[(tiles * p.batch * p.heads,)](
            q, k, v, g, lse, delta, written[0], *p.starts, p.slopes,
            p.batch, p.heads, p.group, p.queries, p.keys, *shared, *_strides(written[0], p.packed),
            *numbers, **p.constants, **launch,
        )  # fmt: skip
    for x, gradient in zip(written, (dq, dk, dv), strict=True):
        _keep(x, gradient)
    return dq, dk, dv, dsinks


_PROBLEM = (
    "Tensor? starts_q, Tensor? starts_k, SymInt longest_q, SymInt longest_k, Tensor? slopes, Tensor? sinks, "
    "float scale, SymInt? left, SymInt? right, float? softcap, bool bottom_right"
)
_flash_attention_fwd = define(
    f"triton_flash_attention_fwd(Tensor q, Tensor k, Tensor v, {_PROBLEM}, bool keep_lse, bool return_stats) "
    "-> (Tensor out, Tensor lse, Tensor entropy, Tensor max_logit)",
    _fwd,
    lambda q, k, v, starts_q, *rest: _empty_fwd(q, v, starts_q is not None, *rest[-2:]),
)
_flash_attention_bwd = define(
    f"triton_flash_attention_bwd(Tensor g, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_PROBLEM}, bool need_dq, bool need_dk, bool need_dv, bool need_dsinks) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)",
    _bwd,
    lambda g, dlse, q, k, v, out, lse, *rest: _empty_bwd(q, k, v, rest[5], rest[-4:]),
)


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        starts_q: Tensor | None,
        starts_k: Tensor | None,
        longest_q: int,
        longest_k: int,
        slopes: Tensor | None,
        sinks: Tensor | None,
        scale: float,
        left: int | None,
        right: int | None,
        softcap: float | None,
        bottom_right: bool,
        return_lse: bool,
        return_stats: bool,
    ) -> Any:
        ctx.set_materialize_grads(False)  # zeros would cost a pass, and are no DTensor where the outputs are
        options = (scale, left, right, softcap, bottom_right)
        out, lse, *stats = _flash_attention_fwd(
            q, k, v, starts_q, starts_k, longest_q, longest_k, slopes, sinks, *options, True, return_stats
        )
        ctx.save_for_backward(q, k, v, out, lse, starts_q, starts_k, slopes, sinks)
        ctx.options = (longest_q, longest_k, *options)
        ctx.has_lse = return_lse
        constant = list(stats)
        if not (q.requires_grad or k.requires_grad or (sinks is not None and sinks.requires_grad)):
            constant.append(lse)  # which does not depend on v
        ctx.mark_non_differentiable(*constant)
        return (out, *((lse,) if return_lse else ()), *(stats if return_stats else ()))

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, second: Tensor | None = None, *_: Any) -> Any:
        refuse_second_derivative("flash_attention")
        q, k, v, out, lse, starts_q, starts_k, slopes, sinks = ctx.saved_tensors
        dlse = second if ctx.has_lse else None  # a statistic has no gradient
        if g is None and dlse is None:
            return (None,) * 16
        longest_q, longest_k, *options = ctx.options
        need_dq, need_dk, need_dv = ctx.needs_input_grad[:3]
        needed = (need_dq, need_dk, need_dv and g is not None, ctx.needs_input_grad[8])  # of lse alone v is no part
        g = torch.zeros_like(out) if g is None else g
        grads = _flash_attention_bwd(
            g, dlse, q, k, v, out, lse, starts_q, starts_k, longest_q, longest_k, slopes, sinks, *options, *needed
        )
        dq, dk, dv, dsinks = (grad if need else None for grad, need in zip(grads, needed, strict=True))
        return dq, dk, dv, None, None, None, None, None, dsinks, *(None,) * 7


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts_q: Tensor | None,
    starts_k: Tensor | None,
    longest_q: int,
    longest_k: int,
    slopes: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    left: int | None,
    right: int | None,
    softcap: float | None,
    bottom_right: bool,
    return_lse: bool,
    return_stats: bool,
) -> tuple[Tensor, ...]:
    arguments = (q, k, v, starts_q, starts_k, longest_q, longest_k, slopes, sinks, scale, left, right, softcap)
    taken = (q, k, v) if sinks is None else (q, k, v, sinks)
    if torch.is_grad_enabled() and any(x.requires_grad for x in taken):
        return _FlashAttention.apply(*arguments, bottom_right, return_lse, return_stats)
    out, lse, *stats = _flash_attention_fwd(*arguments, bottom_right, return_lse, return_stats)
    return (out, *((lse,) if return_lse else ()), *(stats if return_stats else ()))


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    left: int | None,
    right: int | None,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    bottom_right: bool,
    return_lse: bool,
    return_stats: bool,
) -> Tensor | tuple[Tensor, ...]:
    results = _attend(
        q, k, v, None, None, q.shape[2], k.shape[2], alibi_slopes, sinks, scale, left, right, softcap, bottom_right,
        return_lse, return_stats,
    )  # fmt: skip
    return results if len(results) > 1 else results[0]


def flash_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    left: int | None,
    right: int | None,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    bottom_right: bool,
    return_lse: bool,
    return_stats: bool,
) -> Tensor | tuple[Tensor, ...]:
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # [1, H, total, D]
    out, *rows = _attend(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, alibi_slopes, sinks, scale, left, right,
        softcap, bottom_right, return_lse, return_stats,
    )  # fmt: skip
    results = (out.squeeze(0).transpose(0, 1), *(x.squeeze(0) for x in rows))
    return results if len(results) > 1 else results[0]
