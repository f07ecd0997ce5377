"""How the kernels are launched: tiles, strides, and which of q and k take part."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from foundry_kernels._layout import storage_order
from foundry_kernels._triton import compute_dtype, programs, sum_partials
from foundry_kernels.ops.rope.triton.kernels import qk_norm_rope_bwd_kernel, rope_kernel


def config(
    head_dim: int,
    rotary_dim: int,
    tokens: int,
    n_heads: int,
    n_kv_heads: int,
    *,
    heads_inner: bool,
    aligned: bool,
    backward: bool,
) -> dict[str, Any]:
    """Tile and warps for heads of `head_dim`, of which `rotary_dim` dimensions are rotated: 8 pairs a thread, 4 warps
    forward and 8 backward where there is enough work.

    A tile covers what is adjacent in memory: the heads of a token (`heads_inner`) or the tokens of a head. Along heads
    it takes a power of two that divides both numbers of heads, so that no lane is idle, unless there are too few tokens
    to fill it otherwise.

    What fits in registers was measured with the compiler for compute capabilities 8.0 to 12.0: rows that are not
    `aligned` to 16 elements need more address arithmetic, and take half the rows in the backward pass; heads that are
    narrow, partly rotated, smaller than their block or, backward, wide need more than the 128 that leave room for two
    programs. `maxnreg` says how many registers there are; without it ptxas spills some to reach an occupancy that it
    guesses, or takes so many that one program fits instead of two.
    """
    block = triton.next_power_of_2((head_dim + 1) // 2)
    fits_128_registers = (
        aligned and rotary_dim == head_dim == 2 * block and 64 <= head_dim <= (128 if backward else 256)
    )
    registers = 128 if fits_128_registers else 255
    pairs = 2048 if backward else 1024
    rows = max(1, min(128, (pairs if aligned or not backward else pairs // 2) // block))
    block_heads = 1
    if heads_inner:
        common = math.gcd(n_heads, n_kv_heads)
        block_heads = min(rows, common & -common)
    block_tokens = min(rows // block_heads, triton.next_power_of_2(tokens))
    block_heads = min(rows // block_tokens, triton.next_power_of_2(max(n_heads, n_kv_heads)))
    warps = max(1, min(32, block_tokens * block_heads * block // (256 if aligned or not backward else 128)))
    return {
        "BLOCK_TOKENS": block_tokens,
        "BLOCK_HEADS": block_heads,
        "BLOCK": block,
        "num_warps": warps,
        "maxnreg": min(registers, 65536 // (32 * warps)),
    }


class Norms(NamedTuple):
    """What a forward pass with norms is given beside q, k and the tables. A rstd of None is not saved."""

    q_weight: Tensor | None
    k_weight: Tensor | None
    q_rstd: Tensor | None
    k_rstd: Tensor | None
    eps: float
    weight_offset: float
    round_before_weight: bool


NO_NORMS = Norms(None, None, None, None, 0.0, 0.0, False)


def unit_stride(x: Tensor | None) -> Tensor | None:
    """x with a last stride of 1."""
    return x if x is None or x.stride(-1) == 1 else x.contiguous()


def launch_forward(
    q: Tensor | None,
    k: Tensor | None,
    q_out: Tensor,
    k_out: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    interleaved: bool,
    *,
    inverse: bool = False,
    norms: Norms = NO_NORMS,
) -> None:
    """Rotates q and k, whichever are given, into q_out and k_out: dense tensors that set the order of the work."""
    x, out = (q, q_out) if _has_elements(q) else (k, k_out)
    if not _has_elements(x):
        return
    assert x is not None
    tables = _Tables.of(cos, sin, positions)
    q, k = unit_stride(q), unit_stride(k)
    q_into, k_into = None if q is None else q_out, None if k is None else k_out
    strides = [*_strides(q, k, q_into, k_into), *tables.strides]
    launch = _config(x, q, k, cos, strides, heads_inner=out.stride(1) < out.stride(2), backward=False)
    chunks = sum(triton.cdiv(_n_heads(t), launch["BLOCK_HEADS"]) for t in (q, k))
    splits, items = _split(launch, x, chunks)
    rope_kernel[(items,)](
        q, k, norms.q_weight, norms.k_weight, q_into, k_into, norms.q_rstd, norms.k_rstd, *tables.tensors,
        x.shape[2], _n_heads(q), _n_heads(k), cos.shape[-2], splits, *strides, *tables.position_strides,
        -1.0 if inverse else 1.0, norms.eps, norms.weight_offset, NORM=norms is not NO_NORMS,
        ROUND_FIRST=norms.round_before_weight, D=x.shape[3], HALF=cos.shape[-1], INTERLEAVED=interleaved, **launch,
    )  # fmt: skip


def launch_backward(
    dq_out: Tensor | None,
    dk_out: Tensor | None,
    q: Tensor | None,
    k: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    q_rstd: Tensor | None,
    k_rstd: Tensor | None,
    weight_offset: float,
    round_before_weight: bool,
    interleaved: bool,
    positions: Tensor | None,
    dq: Tensor | None,
    dk: Tensor | None,
    dq_weight: Tensor | None,
    dk_weight: Tensor | None,
) -> None:
    """Fills the gradients that are given; of q and k, one has elements."""
    x = q if _has_elements(q) else k
    assert x is not None
    order = storage_order(x)
    tables = _Tables.of(cos, sin, positions)
    dq_out, dk_out, q, k = unit_stride(dq_out), unit_stride(dk_out), unit_stride(q), unit_stride(k)
    strides = [*_strides(dq_out, dk_out, q, k, dq, dk), *tables.strides]
    launch = _config(x, q, k, cos, strides, heads_inner=order.index(1) > order.index(2), backward=True)
    q_splits, q_items = _split(launch, x, triton.cdiv(_n_heads(q), launch["BLOCK_HEADS"]))
    k_splits, k_items = _split(launch, x, triton.cdiv(_n_heads(k), launch["BLOCK_HEADS"]))
    grid = min(max(q_items, k_items), programs(x.device))
    q_partial, k_partial = _partial(dq_weight, x, grid), _partial(dk_weight, x, grid)
    qk_norm_rope_bwd_kernel[(grid,)](
        dq_out, dk_out, q, k, unit_stride(q_weight), unit_stride(k_weight), q_rstd, k_rstd, *tables.tensors,
        dq, dk, q_partial, k_partial, x.shape[2], _n_heads(q), _n_heads(k), cos.shape[-2],
        q_items, k_items, q_splits, k_splits, *strides, *tables.position_strides, weight_offset,
        D=x.shape[3], HALF=cos.shape[-1], INTERLEAVED=interleaved, ROUND_FIRST=round_before_weight, **launch,
    )  # fmt: skip
    for partial, dw in ((q_partial, dq_weight), (k_partial, dk_weight)):
        if partial is not None and dw is not None:
            sum_partials(partial, dw)


class _Tables(NamedTuple):
    """cos, sin and positions as the kernels take them, with their strides over batch and rows (or tokens)."""

    tensors: tuple[Tensor | None, Tensor | None, Tensor | None]
    strides: tuple[int, ...]
    position_strides: tuple[int, int]

    @classmethod
    def of(cls, cos: Tensor, sin: Tensor, positions: Tensor | None) -> _Tables:
        tensors = unit_stride(cos), unit_stride(sin), positions
        strides = (*_table_strides(tensors[0]), *_table_strides(tensors[1]))
        if positions is None:
            return cls(tensors, strides, (0, 0))
        if positions.device.type == "cpu" and positions.numel() > 0:  # on a GPU the check would have to synchronize
            low, high = (int(x) for x in positions.aminmax())
            if low < 0 or high >= cos.shape[-2]:
                raise IndexError(
                    f"positions must lie in 0 .. {cos.shape[-2] - 1}, the table's rows; got {low} to {high}"
                )
        batch_stride = positions.stride(0) if positions.dim() == 2 else 0
        return cls(tensors, strides, (batch_stride, positions.stride(-1)))


def _table_strides(table: Tensor | None) -> tuple[int, int]:
    assert table is not None
    return table.stride(0) if table.dim() == 3 else 0, table.stride(-2)


def _config(
    x: Tensor,
    q: Tensor | None,
    k: Tensor | None,
    cos: Tensor,
    strides: list[int],
    *,
    heads_inner: bool,
    backward: bool,
) -> dict[str, Any]:
    aligned = all(s % 16 == 0 for s in strides)
    launch = config(
        x.shape[3], 2 * cos.shape[-1], x.shape[2], _n_heads(q), _n_heads(k),
        heads_inner=heads_inner, aligned=aligned, backward=backward,
    )  # fmt: skip
    return launch | {"COMPUTE": compute_dtype(x.dtype)}


def _split(launch: dict[str, Any], x: Tensor, chunks: int) -> tuple[int, int]:
    """How many programs share the `chunks` of heads of one tile of tokens, and how many items of work that makes. About
    4 chunks each, so that loading the angles pays; fewer where the device would not be full."""
    tiles = x.shape[0] * triton.cdiv(x.shape[2], launch["BLOCK_TOKENS"])
    splits = min(chunks, max(triton.cdiv(chunks, 4), triton.cdiv(4 * programs(x.device), tiles)))
    return splits, tiles * splits


def _partial(dw: Tensor | None, x: Tensor, grid: int) -> Tensor | None:
    """A row for each program's share of a weight's gradient."""
    if dw is None:
        return None
    accumulate = torch.float64 if x.dtype == torch.float64 else torch.float32
    return torch.empty((grid, x.shape[3]), dtype=accumulate, device=x.device)


def _strides(*tensors: Tensor | None) -> list[int]:
    """Of each over batch, heads and tokens."""
    return [s for x in tensors for s in ((0, 0, 0) if x is None else x.stride()[:3])]


def _n_heads(x: Tensor | None) -> int:
    return 0 if x is None else x.shape[1]


def _has_elements(x: Tensor | None) -> bool:
    return x is not None and x.numel() > 0
