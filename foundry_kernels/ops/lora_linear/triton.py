"""The thin matmuls of lora_linear in Triton. Each reads or writes an activation once, with dropout inside.

16-bit activations are multiplied by matrix instructions. float32 factors (adapters, x A^T) are split into parts in
bfloat16, whose products are added: three parts are float32's 24 bits; two suffice where the result is rounded to 16
bits. The matmuls are thin, so they take the time of reading the activation. float32 activations are multiplied by fused
multiply-adds. `outer` sums over ranges of rows in several programs, then over these in order: there are no atomics.

Names: b_ is a block of values, p_ a block of pointers, m_ a mask.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from foundry_kernels._triton.devices import capability, programs
from foundry_kernels._triton.functions import dot, dropout_factors, round_to
from foundry_kernels._triton.launch import Plan, launch
from foundry_kernels._triton.operators import define
from foundry_kernels._triton.plans import planned
from foundry_kernels._triton.rows import compute_dtype, sum_partials
from foundry_kernels._triton.tuning import choose
from foundry_kernels.core.dropout import kernel_numbers
from foundry_kernels.core.registry import wide_dtype
from foundry_kernels.ops.lora_linear import autograd

_PLAIN = ("n_rows",)


@triton.jit
def _rest(x, part):
    """x without its bfloat16 part."""
    return x.to(tl.float32) - part.to(tl.float32)


@triton.jit
def _product(a, b, acc, EXACT: tl.constexpr, PARTS: tl.constexpr):
    """acc + a @ b. Unless EXACT, a float32 factor is split into so many parts in bfloat16 of 8 bits each, and a
    float16 one into two."""
    if EXACT:
        return dot(a.to(acc.dtype), b.to(acc.dtype), acc)
    if a.dtype == b.dtype and a.dtype != tl.float32:
        return dot(a, b, acc)
    b_a, b_b = round_to(a, tl.bfloat16), round_to(b, tl.bfloat16)
    acc = dot(b_a, b_b, acc)
    if a.dtype != tl.bfloat16:
        b_a2 = round_to(_rest(a, b_a), tl.bfloat16)
        acc = dot(b_a2, b_b, acc)
        if PARTS == 3 and a.dtype == tl.float32:
            acc = dot(round_to(_rest(_rest(a, b_a), b_a2), tl.bfloat16), b_b, acc)
    if b.dtype != tl.bfloat16:
        b_b2 = round_to(_rest(b, b_b), tl.bfloat16)
        acc = dot(b_a, b_b2, acc)
        if PARTS == 3 and b.dtype == tl.float32:
            acc = dot(b_a, round_to(_rest(_rest(b, b_b), b_b2), tl.bfloat16), acc)
        if PARTS == 3 and a.dtype != tl.bfloat16:
            acc = dot(b_a2, b_b2, acc)
    return acc


@triton.jit
def _kept(b_x, seed_ptr, rows, start, threshold, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr):
    """x with zeros where it is dropped; the rest is multiplied later, in float32."""
    shape: tl.constexpr = [BLOCK_ROWS, BLOCK_COLS]
    b_keep = dropout_factors(seed_ptr, rows[:, None], start, threshold, 1.0, shape, BLOCK_COLS)
    return (b_x * b_keep).to(b_x.dtype)


@triton.jit(do_not_specialize=_PLAIN)
def lora_down_kernel(
    x_ptr, a_ptr, t_ptr, seed_ptr,
    n_rows, n_in, rank, stride_xn, stride_ar, stride_ak, scale, threshold,
    DROPOUT: tl.constexpr, WHOLE: tl.constexpr, EXACT: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_RANK: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """t [n_rows, rank] = scale x a^T. WHOLE: n_in is a multiple of BLOCK_COLS."""
    n_across = tl.cdiv(rank, BLOCK_RANK)
    rows = (tl.program_id(0) // n_across).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    ranks = tl.program_id(0) % n_across * BLOCK_RANK + tl.arange(0, BLOCK_RANK)
    m_rows, m_ranks = (rows < n_rows)[:, None], (ranks < rank)[None, :]
    dims = tl.arange(0, BLOCK_COLS)
    p_x = x_ptr + rows[:, None] * stride_xn + dims[None, :]
    p_a = a_ptr + dims.to(tl.int64)[:, None] * stride_ak + ranks[None, :] * stride_ar
    b_t = tl.zeros([BLOCK_ROWS, BLOCK_RANK], COMPUTE)
    for first in range(0, n_in, BLOCK_COLS):
        if WHOLE:
            b_x = tl.load(p_x, mask=m_rows, other=0.0)
            b_a = tl.load(p_a, mask=m_ranks, other=0.0)
        else:
            m_dims = dims < n_in - first
            b_x = tl.load(p_x, mask=m_rows & m_dims[None, :], other=0.0)
            b_a = tl.load(p_a, mask=m_ranks & m_dims[:, None], other=0.0)
        if DROPOUT:
            b_x = _kept(b_x, seed_ptr, rows, first, threshold, BLOCK_ROWS, BLOCK_COLS)
        b_t = _product(b_x, b_a, b_t, EXACT, 3)
        p_x += BLOCK_COLS
        p_a += BLOCK_COLS * stride_ak
    tl.store(t_ptr + rows[:, None] * rank + ranks[None, :], b_t * scale, mask=m_rows & m_ranks)


@triton.jit(do_not_specialize=_PLAIN)
def lora_up_kernel(
    base_ptr, t_ptr, b_ptr, y_ptr, seed_ptr,
    n_rows, n_out, rank, stride_basen, stride_tn, stride_bm, stride_br, scale, threshold,
    DROPOUT: tl.constexpr, EXACT: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_RANK: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """y [n_rows, n_out] = base + scale t b^T."""
    n_across = tl.cdiv(n_out, BLOCK_COLS)
    rows = (tl.program_id(0) // n_across).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    start = tl.program_id(0) % n_across * BLOCK_COLS
    cols = start + tl.arange(0, BLOCK_COLS)
    m_rows, m_cols = (rows < n_rows)[:, None], (cols < n_out)[None, :]
    b_y = tl.zeros([BLOCK_ROWS, BLOCK_COLS], COMPUTE)
    for first in range(0, rank, BLOCK_RANK):
        ranks = first + tl.arange(0, BLOCK_RANK)
        m_ranks = ranks < rank
        p_b = b_ptr + ranks[:, None] * stride_br + cols.to(tl.int64)[None, :] * stride_bm
        b_t = tl.load(t_ptr + rows[:, None] * stride_tn + ranks[None, :], mask=m_rows & m_ranks[None, :], other=0.0)
        b_b = tl.load(p_b, mask=m_ranks[:, None] & m_cols, other=0.0)
        b_y = _product(b_t, b_b, b_y, EXACT, 2)
    b_y *= scale
    if DROPOUT:
        shape: tl.constexpr = [BLOCK_ROWS, BLOCK_COLS]
        b_y *= dropout_factors(seed_ptr, rows[:, None], start, threshold, 1.0, shape, BLOCK_COLS)
    mask = m_rows & m_cols
    b_y += tl.load(base_ptr + rows[:, None] * stride_basen + cols[None, :], mask=mask, other=0.0)
    tl.store(y_ptr + rows[:, None] * n_out + cols[None, :], round_to(b_y, y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=_PLAIN)
def lora_outer_kernel(
    t_ptr, x_ptr, out_ptr, seed_ptr,
    n_rows, n_cols, rank, n_parts, stride_tn, stride_xn, stride_or, stride_ok, scale, threshold,
    DROPOUT: tl.constexpr, EXACT: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_RANK: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """out [n_parts, rank, n_cols], of which each part sums scale t^T x over a range of rows."""
    n_across, n_down = tl.cdiv(n_cols, BLOCK_COLS), tl.cdiv(rank, BLOCK_RANK)
    part = tl.program_id(0) // (n_across * n_down)
    tile = tl.program_id(0) % (n_across * n_down)
    start = tile % n_across * BLOCK_COLS
    cols = start + tl.arange(0, BLOCK_COLS)
    ranks = tile // n_across * BLOCK_RANK + tl.arange(0, BLOCK_RANK)
    m_cols, m_ranks = cols < n_cols, ranks < rank
    n_blocks = tl.cdiv(tl.cdiv(n_rows, BLOCK_ROWS), n_parts)
    b_out = tl.zeros([BLOCK_RANK, BLOCK_COLS], COMPUTE)
    for block in range(part * n_blocks, (part + 1) * n_blocks):
        rows = tl.cast(block, tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        m_rows = rows < n_rows
        p_t = t_ptr + rows[None, :] * stride_tn + ranks[:, None]
        b_t = tl.load(p_t, mask=m_ranks[:, None] & m_rows[None, :], other=0.0)
        p_x = x_ptr + rows[:, None] * stride_xn + cols[None, :]
        b_x = tl.load(p_x, mask=m_rows[:, None] & m_cols[None, :], other=0.0)
        if DROPOUT:
            b_x = _kept(b_x, seed_ptr, rows, start, threshold, BLOCK_ROWS, BLOCK_COLS)
        b_out = _product(b_t, b_x, b_out, EXACT, 3)
    p_out = out_ptr + part.to(tl.int64) * rank * n_cols + ranks.to(tl.int64)[:, None] * stride_or
    mask = m_ranks[:, None] & m_cols[None, :]
    tl.store(p_out + cols.to(tl.int64)[None, :] * stride_ok, b_out * scale, mask=mask)


def _tile(kernel: str, dtype: torch.dtype, device: torch.device, rank: int) -> dict[str, int]:
    """Rows, ranks and columns of a block. None was measured: they are the largest of which no registers are spilled on
    any GPU, with any adapters. A block of fewer ranks than there are reads the activation again, from the cache."""
    ranks = max(16, triton.next_power_of_2(rank))
    few = min(ranks, 32)
    if capability(device) == 0:
        rows = [(16, 16, 32, 4, 1)]
    elif dtype.itemsize > 2:
        rows = [(32, few, 32, 4, 1), (64, 16, 32, 4, 1)]
    elif kernel == "up":
        rows = [(64, few, 128, 8, 1), (64, few, 64, 4, 1), (128, few, 64, 8, 1)]
    elif ranks == 16:
        rows = [(64, 16, 64, 4, 3), (32, 16, 64, 4, 3)]
    elif kernel == "outer":
        rows = [(32, min(ranks, 64), 64, 4, 3), (32, 32, 64, 4, 3)]
    elif ranks > 64 and capability(device) != 100:  # where it needs 8 bytes of stack
        rows = [(128, 64, 32, 8, 3), (64, 32, 64, 8, 3)]
    else:
        rows = [(64, 32, 64, 8, 3), (128, 32, 32, 8, 3)]
    names = ("BLOCK_ROWS", "BLOCK_RANK", "BLOCK_COLS", "num_warps", "num_stages")
    tag = f"{8 * dtype.itemsize}-bit rank {min(ranks, 128)}"
    return choose(f"lora_{kernel}_kernel", tag, [dict(zip(names, row, strict=True)) for row in rows], device)


def _common(dtype: torch.dtype, dropout_p: float | None) -> dict[str, Any]:
    return {"DROPOUT": dropout_p is not None, "EXACT": dtype.itemsize > 2, "COMPUTE": compute_dtype(dtype)}


def _rows(x: Tensor) -> Tensor:
    """x, or a copy if its rows are not contiguous."""
    return x if x.stride(1) == 1 else x.contiguous()


@planned
def _plan_down(
    shape: tuple[int, ...], stride: int, rank: int, a_strides: tuple[int, ...], scale: float, dropout_p: float | None,
    dtype: torch.dtype, device: torch.device,
) -> Plan:  # fmt: skip
    tile, (threshold, kept) = _tile("down", dtype, device, rank), kernel_numbers(dropout_p)
    grid = triton.cdiv(shape[0], tile["BLOCK_ROWS"]) * triton.cdiv(rank, tile["BLOCK_RANK"])
    numbers = (*shape, rank, stride, *a_strides, scale * (kept or 1.0), threshold)
    return Plan((grid,), numbers, _common(dtype, dropout_p) | {"WHOLE": shape[1] % tile["BLOCK_COLS"] == 0} | tile)


def _empty_down(x: Tensor, a: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], a.shape[0]), dtype=wide_dtype(x.dtype))


def _down(x: Tensor, a: Tensor, scale: float, dropout_p: float = 0.0, seed: Tensor | None = None) -> Tensor:
    t = _empty_down(x, a)
    if t.numel() == 0:
        return t
    x = _rows(x)
    options = x.stride(0), a.shape[0], a.stride(), scale, None if seed is None else dropout_p, x.dtype, x.device
    launch(lora_down_kernel, _plan_down(x.shape, *options), x, a, t, seed)
    return t


@planned
def _plan_up(
    shape: tuple[int, ...], rank: int, strides: tuple[int, ...], scale: float, dropout_p: float | None,
    dtype: torch.dtype, device: torch.device,
) -> Plan:  # fmt: skip
    tile, (threshold, kept) = _tile("up", dtype, device, rank), kernel_numbers(dropout_p)
    grid = triton.cdiv(shape[0], tile["BLOCK_ROWS"]) * triton.cdiv(shape[1], tile["BLOCK_COLS"])
    numbers = (*shape, rank, *strides, scale * (kept or 1.0), threshold)
    return Plan((grid,), numbers, _common(dtype, dropout_p) | tile)


def _up(base: Tensor, t: Tensor, b: Tensor, scale: float, dropout_p: float = 0.0, seed: Tensor | None = None) -> Tensor:
    y = base.new_empty(base.shape)
    if y.numel() == 0:
        return y
    base, t = _rows(base), _rows(t)
    strides = base.stride(0), t.stride(0), *b.stride()
    plan = _plan_up(y.shape, t.shape[1], strides, scale, None if seed is None else dropout_p, y.dtype, y.device)
    launch(lora_up_kernel, plan, base, t, b, y, seed)
    return y


@planned
def _plan_outer(
    shape: tuple[int, ...], rank: int, strides: tuple[int, ...], transposed: bool, scale: float,
    dropout_p: float | None, dtype: torch.dtype, device: torch.device,
) -> tuple[int, Plan]:  # fmt: skip
    """Also the number of parts."""
    tile, (threshold, kept) = _tile("outer", dtype, device, rank), kernel_numbers(dropout_p)
    tiles = triton.cdiv(rank, tile["BLOCK_RANK"]) * triton.cdiv(shape[1], tile["BLOCK_COLS"])
    blocks = triton.cdiv(shape[0], tile["BLOCK_ROWS"])
    parts = max(1, min(blocks // 2, programs(device) // tiles))
    along = (1, rank) if transposed else (shape[1], 1)
    numbers = (*shape, rank, parts, *strides, *along, scale * (kept or 1.0), threshold)
    return parts, Plan((parts * tiles,), numbers, _common(dtype, dropout_p) | tile)


def _empty_outer(t: Tensor, x: Tensor, transposed: bool) -> Tensor:
    return t.new_empty((x.shape[1], t.shape[1]) if transposed else (t.shape[1], x.shape[1]))


def _outer(
    t: Tensor, x: Tensor, scale: float, transposed: bool, dropout_p: float = 0.0, seed: Tensor | None = None
) -> Tensor:
    out = _empty_outer(t, x, transposed)
    if out.numel() == 0 or x.shape[0] == 0:
        return out.zero_()
    t, x = _rows(t), _rows(x)
    strides = t.stride(0), x.stride(0)
    options = transposed, scale, None if seed is None else dropout_p, x.dtype, x.device
    parts, plan = _plan_outer(x.shape, t.shape[1], strides, *options)
    into = out if parts == 1 else out.new_empty((parts, out.numel()))
    launch(lora_outer_kernel, plan, t, x, into, seed)
    if parts > 1:
        sum_partials(into, out.view(-1))
    return out


_DROPOUT = "float dropout_p=0.0, Tensor? dropout_seed=None)"
_THIN = f"Tensor t, Tensor b, float scale, {_DROPOUT}"

_PRODUCTS = autograd.Products(
    define(f"triton_lora_down(Tensor x, Tensor a, float scale, {_DROPOUT} -> Tensor down", _down, _empty_down),
    define(f"triton_lora_up(Tensor base, {_THIN} -> Tensor", _up, lambda base: base.new_empty(base.shape)),
    define(
        f"triton_lora_outer(Tensor t, Tensor x, float scale, bool transposed, {_DROPOUT} -> Tensor douter",
        _outer,
        _empty_outer,
    ),
)

lora_linear = partial(autograd.lora_linear, _PRODUCTS)
