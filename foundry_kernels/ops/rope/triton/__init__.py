"""`rope` and `qk_norm_rope` in Triton: launches, operators and their gradients."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
from torch import Tensor

from foundry_kernels._layout import inverse, storage_order
from foundry_kernels._triton import compute_dtype, define, programs, refuse_second_derivative, sum_partials
from foundry_kernels.ops.rope.triton.kernels import qk_norm_rope_bwd_kernel, rope_kernel


def config(width: int, tokens: int, heads: int, kv_heads: int, heads_inner: bool, *, backward: bool) -> dict[str, Any]:
    """Tile and warps for heads of `width`: 8 pairs a thread, 4 warps forward and 8 backward where there is enough.

    A tile lies along what is next to each other in memory: the heads of a token (`heads_inner`) or the tokens of a
    head. Along heads it takes a power of two that divides both numbers of heads, so that no lane is without one, unless
    there are too few tokens to fill it otherwise.
    """
    block = triton.next_power_of_2((width + 1) // 2)
    rows = max(1, min(128, (2048 if backward else 1024) // block))
    block_heads = 1
    if heads_inner:
        common = math.gcd(heads, kv_heads)
        block_heads = min(rows, common & -common)
    block_tokens = min(rows // block_heads, triton.next_power_of_2(tokens))
    block_heads = min(rows // block_tokens, triton.next_power_of_2(max(heads, kv_heads)))
    return {
        "BLOCK_TOKENS": block_tokens,
        "BLOCK_HEADS": block_heads,
        "BLOCK": block,
        "num_warps": max(1, min(8 if backward else 4, block_tokens * block_heads * block // 256)),
    }


def _split(launch: dict[str, Any], batch: int, tokens: int, n_q: int, n_k: int, device: torch.device) -> tuple[int, int]:
    """How many programs share the heads of one tile of tokens, and how many items of work that makes. About 4 chunks of
    heads a program, so that the angles are loaded for some work; fewer where the device would not be full."""
    tiles = batch * triton.cdiv(tokens, launch["BLOCK_TOKENS"])
    chunks = sum(triton.cdiv(n, launch["BLOCK_HEADS"]) for n in (n_q, n_k))
    splits = min(chunks, max(triton.cdiv(chunks, 4), triton.cdiv(4 * programs(device), tiles)))
    return splits, tiles * splits


def _dense(x: Tensor, order: list[int]) -> Tensor:
    """An unfilled tensor of x's shape and dtype, dense with its dimensions in this order."""
    return torch.empty([x.shape[d] for d in order], dtype=x.dtype, device=x.device).permute(inverse(order))


def _unit(x: Tensor | None) -> Tensor | None:
    """x with a last stride of 1."""
    return x if x is None or x.stride(-1) == 1 else x.contiguous()


def _strides(x: Tensor | None) -> tuple[int, ...]:
    """Over batch, heads and tokens."""
    return (0, 0, 0) if x is None else x.stride()[:3]


def _tables(cos: Tensor, sin: Tensor, positions: Tensor | None) -> tuple[list[Any], list[int]]:
    """cos, sin and positions as the kernels take them, and their strides over batch and rows."""
    found: list[Any] = [table if table.stride(-1) == 1 else table.contiguous() for table in (cos, sin)]
    strides = [s for table in found for s in (table.stride() if table.dim() == 3 else (0, *table.stride()))[:2]]
    if positions is None:
        return [*found, None], [*strides, 0, 0]
    if positions.device.type == "cpu" and positions.numel() > 0:  # a GPU would have to wait for the answer
        low, high = (int(x) for x in positions.aminmax())
        if low < 0 or high >= cos.shape[0]:
            raise IndexError(f"positions must lie in 0 .. {cos.shape[0] - 1}, the table's rows; got {low} to {high}")
    return [*found, positions], [*strides, *(positions.stride() if positions.dim() == 2 else (0, positions.stride(0)))]


def _plan(
    q: Tensor | None, k: Tensor | None, q_order: list[int], k_order: list[int], *, backward: bool
) -> tuple[dict[str, Any], int, int] | None:
    """The launch for what is there of q and k, with its splits and items; None where there is nothing to do."""
    if all(x is None or x.numel() == 0 for x in (q, k)):
        return None
    some, order = (k, k_order) if q is None else (q, q_order)
    assert some is not None
    batch, _, tokens, width = some.shape
    n_q, n_k = (0 if x is None else x.shape[1] for x in (q, k))
    launch = config(width, tokens, n_q, n_k, order.index(1) > order.index(2), backward=backward)
    launch["COMPUTE"] = compute_dtype(some.dtype)
    return launch, *_split(launch, batch, tokens, n_q, n_k, some.device)


def _heads(x: Tensor | None) -> int:
    return 0 if x is None else x.shape[1]


def _forward(
    q: Tensor | None,
    k: Tensor | None,
    q_order: list[int],
    k_order: list[int],
    weights: tuple[Tensor | None, Tensor | None],
    rstds: tuple[Tensor | None, Tensor | None],
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """The results for what is there of q and k, in one launch; nothing for what is not."""
    y = _turned(q, k, q_order, k_order, cos)
    found = _plan(q, k, q_order, k_order, backward=False)
    if found is None:
        return y
    launch, splits, items = found
    tables, table_strides = _tables(cos, sin, positions)
    q, k = _unit(q), _unit(k)
    yq, yk = y[0] if q is not None else None, y[1] if k is not None else None
    some = q if q is not None else k
    assert some is not None
    rope_kernel[(items,)](
        q, k, *weights, yq, yk, *rstds, *tables, some.shape[2], _heads(q), _heads(k), cos.shape[-2], splits,
        *_strides(q), *_strides(k), *_strides(yq), *_strides(yk), *table_strides,
        D=some.shape[3], HALF=cos.shape[-1], **launch, **options,
    )  # fmt: skip
    return y


def _turned(
    q: Tensor | None, k: Tensor | None, q_order: list[int], k_order: list[int], cos: Tensor
) -> tuple[Tensor, Tensor]:
    """Unfilled results; an empty tensor for what is not there."""
    yq = cos.new_empty(0) if q is None else _dense(q, q_order)
    return yq, cos.new_empty(0) if k is None else _dense(k, k_order)


def _rope(
    q: Tensor | None,
    k: Tensor | None,
    q_order: list[int],
    k_order: list[int],
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    interleaved: bool,
    inverse: bool,
) -> tuple[Tensor, Tensor]:
    return _forward(
        q, k, q_order, k_order, (None, None), (None, None), cos, sin, positions, eps=0.0, offset=0.0,
        INTERLEAVED=interleaved, INVERSE=inverse, NORM=False, ROUND_FIRST=False,
    )  # fmt: skip


def _empty_rstd(x: Tensor, save: bool) -> Tensor:
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    return torch.empty(x.shape[:-1] if save else (0,), dtype=compute, device=x.device)


def _qk_norm_rope_fwd(
    q: Tensor,
    k: Tensor,
    q_order: list[int],
    k_order: list[int],
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    eps: float,
    weight_offset: float,
    round_before_weight: bool,
    interleaved: bool,
    save_q: bool,
    save_k: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q_rstd, k_rstd = _empty_rstd(q, save_q), _empty_rstd(k, save_k)
    yq, yk = _forward(
        q, k, q_order, k_order, (_unit(q_weight), _unit(k_weight)),
        (q_rstd if save_q else None, k_rstd if save_k else None), cos, sin, positions, eps=eps, offset=weight_offset,
        INTERLEAVED=interleaved, INVERSE=False, NORM=True, ROUND_FIRST=round_before_weight,
    )  # fmt: skip
    return yq, yk, q_rstd, k_rstd


def _empty_bwd(
    q: Tensor | None,
    k: Tensor | None,
    q_order: list[int],
    k_order: list[int],
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    need_dq, need_dk, need_dqw, need_dkw = needs
    dq, dk = _turned(q if need_dq else None, k if need_dk else None, q_order, k_order, cos)
    dqw, dkw = (
        cos.new_empty(0) if weight is None or not needed else torch.empty_like(weight, memory_format=torch.contiguous_format)
        for weight, needed in ((q_weight, need_dqw), (k_weight, need_dkw))
    )
    return dq, dk, dqw, dkw


def _qk_norm_rope_bwd(
    dyq: Tensor | None,
    dyk: Tensor | None,
    q: Tensor | None,
    k: Tensor | None,
    q_order: list[int],
    k_order: list[int],
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    q_rstd: Tensor | None,
    k_rstd: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    weight_offset: float,
    round_before_weight: bool,
    interleaved: bool,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`needs`: which of the four results are wanted. q, its rstd and gradient are None where none of q's is."""
    results = _empty_bwd(q, k, q_order, k_order, q_weight, k_weight, cos, needs)
    found = _plan(q, k, q_order, k_order, backward=True)
    if found is None:
        for result in results:
            result.zero_()
        return results
    launch, splits, items = found
    tables, table_strides = _tables(cos, sin, positions)
    dyq, dyk, q, k = _unit(dyq), _unit(dyk), _unit(q), _unit(k)
    dq, dk = (result if needed else None for result, needed in zip(results[:2], needs[:2], strict=True))
    some = q if q is not None else k
    assert some is not None
    width = some.shape[3]
    grid = min(items, programs(some.device))
    accumulate = torch.float64 if some.dtype == torch.float64 else torch.float32
    partials = [
        torch.empty((grid, width), dtype=accumulate, device=some.device) if needed else None for needed in needs[2:]
    ]
    qk_norm_rope_bwd_kernel[(grid,)](
        dyq, dyk, q, k, _unit(q_weight), _unit(k_weight), q_rstd, k_rstd, *tables, dq, dk, *partials,
        items, some.shape[2], _heads(q), _heads(k), cos.shape[-2], splits,
        *_strides(dyq), *_strides(dyk), *_strides(q), *_strides(k), *_strides(dq), *_strides(dk), *table_strides,
        weight_offset, D=width, HALF=cos.shape[-1], INTERLEAVED=interleaved, ROUND_FIRST=round_before_weight, **launch,
    )  # fmt: skip
    for partial, dw in zip(partials, results[2:], strict=True):
        if partial is not None:
            sum_partials(partial, dw)
    return results


_turn = define(
    "triton_rope(Tensor? q, Tensor? k, int[] q_order, int[] k_order, Tensor cos, Tensor sin, Tensor? positions, "
    "bool interleaved, bool inverse) -> (Tensor yq, Tensor yk)",
    _rope,
    lambda q, k, q_order, k_order, cos, *_: _turned(q, k, q_order, k_order, cos),
)
_norm_and_turn = define(
    "triton_qk_norm_rope_fwd(Tensor q, Tensor k, int[] q_order, int[] k_order, Tensor? q_weight, Tensor? k_weight, "
    "Tensor cos, Tensor sin, Tensor? positions, float eps, float weight_offset, bool round_before_weight, "
    "bool interleaved, bool save_q, bool save_k) -> (Tensor yq, Tensor yk, Tensor q_rstd, Tensor k_rstd)",
    _qk_norm_rope_fwd,
    lambda q, k, q_order, k_order, q_weight, k_weight, cos, sin, positions, eps, offset, rounded, interleaved, save_q,
    save_k: (*_turned(q, k, q_order, k_order, cos), _empty_rstd(q, save_q), _empty_rstd(k, save_k)),
)  # fmt: skip
_norm_and_turn_bwd = define(
    "triton_qk_norm_rope_bwd(Tensor? dyq, Tensor? dyk, Tensor? q, Tensor? k, int[] q_order, int[] k_order, "
    "Tensor? q_weight, Tensor? k_weight, Tensor? q_rstd, Tensor? k_rstd, Tensor cos, Tensor sin, Tensor? positions, "
    "float weight_offset, bool round_before_weight, bool interleaved, bool[] needs) "
    "-> (Tensor dq, Tensor dk, Tensor dqw, Tensor dkw)",
    _qk_norm_rope_bwd,
    lambda dyq, dyk, q, k, q_order, k_order, q_weight, k_weight, q_rstd, k_rstd, cos, sin, positions, offset, rounded,
    interleaved, needs: _empty_bwd(q, k, q_order, k_order, q_weight, k_weight, cos, needs),
)  # fmt: skip


def _wants(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, positions: Tensor | None
    ) -> Any:
        ctx.orders, ctx.interleaved = (storage_order(q), storage_order(k)), interleaved
        ctx.save_for_backward(cos, sin, positions)
        y = _turn(q, k, *ctx.orders, cos, sin, positions, interleaved, False)
        ctx.mark_non_differentiable(*(out for out, x in zip(y, (q, k), strict=True) if not x.requires_grad))
        return y

    @staticmethod
    def backward(ctx: Any, dyq: Tensor, dyk: Tensor) -> Any:
        refuse_second_derivative("rope")
        need_q, need_k = ctx.needs_input_grad[:2]
        dq, dk = _turn(
            dyq if need_q else None, dyk if need_k else None, *ctx.orders, *ctx.saved_tensors, ctx.interleaved, True
        )
        return dq if need_q else None, dk if need_k else None, None, None, None, None


class _QKNormRope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        eps: float,
        weight_offset: float,
        round_before_weight: bool,
        interleaved: bool,
        positions: Tensor | None,
    ) -> Any:
        need_q, need_k, need_qw, need_kw = ctx.needs_input_grad[:4]
        save_q, save_k = need_q or need_qw, need_k or need_kw
        ctx.orders = storage_order(q), storage_order(k)
        yq, yk, q_rstd, k_rstd = _norm_and_turn(
            q, k, *ctx.orders, q_weight, k_weight, cos, sin, positions, eps, weight_offset, round_before_weight,
            interleaved, save_q, save_k,
        )  # fmt: skip
        ctx.save_for_backward(
            *((q, q_weight, q_rstd) if save_q else (None, None, None)),
            *((k, k_weight, k_rstd) if save_k else (None, None, None)),
            cos, sin, positions,
        )  # fmt: skip
        ctx.options = weight_offset, round_before_weight, interleaved
        ctx.mark_non_differentiable(*(y for y, saved in ((yq, save_q), (yk, save_k)) if not saved))
        return yq, yk

    @staticmethod
    def backward(ctx: Any, dyq: Tensor, dyk: Tensor) -> Any:
        refuse_second_derivative("qk_norm_rope")
        q, q_weight, q_rstd, k, k_weight, k_rstd, cos, sin, positions = ctx.saved_tensors
        needs = list(ctx.needs_input_grad[:4])
        grads = _norm_and_turn_bwd(
            None if q is None else dyq, None if k is None else dyk, q, k, *ctx.orders, q_weight, k_weight,
            q_rstd, k_rstd, cos, sin, positions, *ctx.options, needs,
        )  # fmt: skip
        return *(g if needed else None for g, needed in zip(grads, needs, strict=True)), *(None,) * 7


def rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, positions: Tensor | None
) -> tuple[Tensor, Tensor]:
    if _wants(q, k):
        return _Rope.apply(q, k, cos, sin, interleaved, positions)
    return _turn(q, k, storage_order(q), storage_order(k), cos, sin, positions, interleaved, False)


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    weight_offset: float,
    round_before_weight: bool,
    interleaved: bool,
    positions: Tensor | None,
) -> tuple[Tensor, Tensor]:
    if _wants(q, k, q_weight, k_weight):
        return _QKNormRope.apply(
            q, k, q_weight, k_weight, cos, sin, eps, weight_offset, round_before_weight, interleaved, positions
        )
    return _norm_and_turn(
        q, k, storage_order(q), storage_order(k), q_weight, k_weight, cos, sin, positions, eps, weight_offset,
        round_before_weight, interleaved, False, False,
    )[:2]  # fmt: skip
