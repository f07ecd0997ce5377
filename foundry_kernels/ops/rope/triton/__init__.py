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


def config(
    width: int, rotary: int, tokens: int, heads: int, kv_heads: int, *, heads_inner: bool, aligned: bool, backward: bool
) -> dict[str, Any]:
    """Tile and warps for heads of `width`, of which `rotary` dimensions turn: 8 pairs a thread, 4 warps
    forward and 8 backward where there is enough.

    A tile lies along what is next to each other in memory: the heads of a token (`heads_inner`) or the tokens of a
    head. Along heads it takes a power of two that divides both numbers of heads, so that no lane is without one, unless
    there are too few tokens to fill it otherwise.

    What fits in registers was read off the compiler for compute capabilities 8.0 to 12.0: rows that are not `aligned`
    to 16 elements need more address arithmetic, and half the rows in the backward pass; heads that are narrow, turn in
    part, do not fill their block or, backward, are wide need some more than the 128 that leave room for two programs.
    `maxnreg` says how many registers there are; without it ptxas spills some for an occupancy that it guesses at, or
    takes so many that one program fits where there should be two.
    """
    block = triton.next_power_of_2((width + 1) // 2)
    roomy = aligned and rotary == width == 2 * block and 64 <= width <= (128 if backward else 256)
    registers = 128 if roomy else 255
    pairs = 2048 if backward else 1024
    rows = max(1, min(128, (pairs if aligned or not backward else pairs // 2) // block))
    block_heads = 1
    if heads_inner:
        common = math.gcd(heads, kv_heads)
        block_heads = min(rows, common & -common)
    block_tokens = min(rows // block_heads, triton.next_power_of_2(tokens))
    block_heads = min(rows // block_tokens, triton.next_power_of_2(max(heads, kv_heads)))
    warps = max(1, min(32, block_tokens * block_heads * block // (256 if aligned or not backward else 128)))
    return {
        "BLOCK_TOKENS": block_tokens,
        "BLOCK_HEADS": block_heads,
        "BLOCK": block,
        "num_warps": warps,
        "maxnreg": min(registers, 65536 // (32 * warps)),
    }


def _split(launch: dict[str, Any], x: Tensor, chunks: int) -> tuple[int, int]:
    """How many programs share the `chunks` of heads of one tile of tokens, and how many items of work that makes. About
    4 chunks each, so that the angles are loaded for some work; fewer where the device would not be full."""
    tiles = x.shape[0] * triton.cdiv(x.shape[2], launch["BLOCK_TOKENS"])
    splits = min(chunks, max(triton.cdiv(chunks, 4), triton.cdiv(4 * programs(x.device), tiles)))
    return splits, tiles * splits


def _dense(x: Tensor, order: list[int]) -> Tensor:
    """An unfilled tensor of x's shape and dtype, dense with its dimensions in this order."""
    return torch.empty([x.shape[d] for d in order], dtype=x.dtype, device=x.device).permute(inverse(order))


def _unit(x: Tensor | None) -> Tensor | None:
    """x with a last stride of 1."""
    return x if x is None or x.stride(-1) == 1 else x.contiguous()


def _strides(*tensors: Tensor | None) -> list[int]:
    """Of each over batch, heads and tokens."""
    return [s for x in tensors for s in ((0, 0, 0) if x is None else x.stride()[:3])]


def _tables(cos: Tensor, sin: Tensor, positions: Tensor | None) -> tuple[list[Any], list[int], list[int]]:
    """cos, sin and positions as the kernels take them; the tables' strides over batch and rows; those of positions."""
    found: list[Any] = [_unit(cos), _unit(sin)]
    strides = [s for table in found for s in (table.stride() if table.dim() == 3 else (0, *table.stride()))[:2]]
    if positions is None:
        return [*found, None], strides, [0, 0]
    if positions.device.type == "cpu" and positions.numel() > 0:  # a GPU would have to wait for the answer
        low, high = (int(x) for x in positions.aminmax())
        if low < 0 or high >= cos.shape[-2]:
            raise IndexError(f"positions must lie in 0 .. {cos.shape[-2] - 1}, the table's rows; got {low} to {high}")
    return [*found, positions], strides, list(positions.stride() if positions.dim() == 2 else (0, positions.stride(0)))


def _heads(x: Tensor | None) -> int:
    return 0 if x is None else x.shape[1]


def _present(q: Tensor | None, k: Tensor | None) -> Tensor | None:
    """The first of q and k that is there and has elements."""
    return next((x for x in (q, k) if x is not None and x.numel() > 0), None)


def _launch(
    q: Tensor | None, k: Tensor | None, orders: list[list[int]], cos: Tensor, strides: list[int], *, backward: bool
) -> Any:
    """The launch for what is there of q and k."""
    x = _present(q, k)
    assert x is not None
    order = orders[0] if x is q else orders[1]
    chosen = config(
        x.shape[3], 2 * cos.shape[-1], x.shape[2], _heads(q), _heads(k), heads_inner=order.index(1) > order.index(2),
        aligned=all(s % 16 == 0 for s in strides), backward=backward,
    )  # fmt: skip
    return chosen | {"COMPUTE": compute_dtype(x.dtype)}


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
    x = _present(q, k)
    if x is None:
        return y
    tables, table_strides, position_strides = _tables(cos, sin, positions)
    q, k = _unit(q), _unit(k)
    yq, yk = None if q is None else y[0], None if k is None else y[1]
    strides = [*_strides(q, k, yq, yk), *table_strides]
    launch = _launch(q, k, [q_order, k_order], cos, strides, backward=False)
    splits, items = _split(launch, x, sum(triton.cdiv(_heads(x), launch["BLOCK_HEADS"]) for x in (q, k)))
    rope_kernel[(items,)](
        q, k, *weights, yq, yk, *rstds, *tables, x.shape[2], _heads(q), _heads(k), cos.shape[-2], splits,
        *strides, *position_strides, D=x.shape[3], HALF=cos.shape[-1], **launch, **options,
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
        q, k, q_order, k_order, (None, None), (None, None), cos, sin, positions, direction=-1.0 if inverse else 1.0,
        eps=0.0, offset=0.0, INTERLEAVED=interleaved, NORM=False, ROUND_FIRST=False,
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
        (q_rstd if save_q else None, k_rstd if save_k else None), cos, sin, positions, direction=1.0, eps=eps,
        offset=weight_offset, INTERLEAVED=interleaved, NORM=True, ROUND_FIRST=round_before_weight,
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
        cos.new_empty(0)
        if weight is None or not needed
        else torch.empty_like(weight, memory_format=torch.contiguous_format)
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
    x = _present(q, k)
    if x is None:
        for result in results:
            result.zero_()
        return results
    tables, table_strides, position_strides = _tables(cos, sin, positions)
    dyq, dyk, q, k = _unit(dyq), _unit(dyk), _unit(q), _unit(k)
    dq, dk = (result if needed else None for result, needed in zip(results[:2], needs[:2], strict=True))
    strides = [*_strides(dyq, dyk, q, k, dq, dk), *table_strides]
    launch = _launch(q, k, [q_order, k_order], cos, strides, backward=True)
    (q_splits, q_items), (k_splits, k_items) = (
        _split(launch, x, triton.cdiv(_heads(t), launch["BLOCK_HEADS"])) for t in (q, k)
    )
    width, grid = x.shape[3], min(max(q_items, k_items), programs(x.device))
    accumulate = torch.float64 if x.dtype == torch.float64 else torch.float32
    partials = [
        torch.empty((grid, width), dtype=accumulate, device=x.device) if needed else None for needed in needs[2:]
    ]
    qk_norm_rope_bwd_kernel[(grid,)](
        dyq, dyk, q, k, _unit(q_weight), _unit(k_weight), q_rstd, k_rstd, *tables, dq, dk, *partials,
        x.shape[2], _heads(q), _heads(k), cos.shape[-2], q_items, k_items, q_splits, k_splits,
        *strides, *position_strides, weight_offset,
        D=width, HALF=cos.shape[-1], INTERLEAVED=interleaved, ROUND_FIRST=round_before_weight, **launch,
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
        ctx.set_materialize_grads(False)  # zeros would cost a pass, and are no DTensor where the outputs are
        ctx.orders, ctx.interleaved = (storage_order(q), storage_order(k)), interleaved
        ctx.save_for_backward(cos, sin, positions)
        y = _turn(q, k, *ctx.orders, cos, sin, positions, interleaved, False)
        ctx.mark_non_differentiable(*(out for out, x in zip(y, (q, k), strict=True) if not x.requires_grad))
        return y

    @staticmethod
    def backward(ctx: Any, dyq: Tensor | None, dyk: Tensor | None) -> Any:
        refuse_second_derivative("rope")
        need_q, need_k = (ctx.needs_input_grad[i] and dy is not None for i, dy in enumerate((dyq, dyk)))
        if not (need_q or need_k):
            return (None,) * 6
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
        ctx.set_materialize_grads(False)
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
    def backward(ctx: Any, dyq: Tensor | None, dyk: Tensor | None) -> Any:
        refuse_second_derivative("qk_norm_rope")
        *sides, cos, sin, positions = ctx.saved_tensors
        needs = list(ctx.needs_input_grad[:4])
        if dyq is None or sides[0] is None:  # a side without gradient takes no part
            dyq, needs[0], needs[2], sides[:3] = None, False, False, (None,) * 3
        if dyk is None or sides[3] is None:
            dyk, needs[1], needs[3], sides[3:] = None, False, False, (None,) * 3
        if not any(needs):
            return (None,) * 11
        q, q_weight, q_rstd, k, k_weight, k_rstd = sides
        grads = _norm_and_turn_bwd(
            dyq, dyk, q, k, *ctx.orders, q_weight, k_weight,
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
