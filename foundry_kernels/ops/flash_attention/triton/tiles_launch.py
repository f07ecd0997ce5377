"""The lists of the tiles that a kernel visits, for masks by tiles."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from foundry_kernels._triton import INTERPRET
from foundry_kernels._triton.launch import Plan, launch
from foundry_kernels._triton.plans import planned
from foundry_kernels.ops.flash_attention.triton.bundles import ListStrides
from foundry_kernels.ops.flash_attention.triton.problem import _Problem
from foundry_kernels.ops.flash_attention.triton.tiles import flash_attention_tiles_kernel


def _list_shape(p: _Problem, block_rows: int, block_cols: int, by_keys: bool) -> tuple[int, int, int, int]:
    """[b, h, row tiles, column tiles + 2]. `by_keys`: the rows are keys and the columns queries."""
    assert p.mask_tiles is not None
    b, h, _, _ = p.mask_tiles[0]
    n_rows, n_cols = (p.tokens_k, p.tokens_q) if by_keys else (p.tokens_q, p.tokens_k)
    return b, h, triton.cdiv(n_rows, block_rows), triton.cdiv(n_cols, block_cols) + 2


def list_strides(p: _Problem, block_rows: int, block_cols: int, by_keys: bool) -> dict[str, ListStrides]:
    """The strides of the lists, by the name of the kernels' parameter."""
    if p.mask_tiles is None:
        return {"list_strides": ListStrides(None, None, None)}
    b, h, rows, width = _list_shape(p, block_rows, block_cols, by_keys)
    return {"list_strides": ListStrides(h * rows * width if b > 1 else 0, rows * width if h > 1 else 0, width)}


@planned
def _plan_lists(p: _Problem, block_rows: int, block_cols: int, by_keys: bool) -> tuple[tuple[int, ...], Plan]:
    b, h, rows, width = shape = _list_shape(p, block_rows, block_cols, by_keys)
    sizes, sides, order = (p.tokens_q, p.tokens_k), ("left", "right"), "ts"
    if by_keys:  # for keys, the window is mirrored
        sizes, sides, order = (p.tokens_k, p.tokens_q), ("right", "left"), "st"
    left, right = sides
    numbers = (
        h, rows, width - 2, *sizes, *(p.numbers[f"stride_tile{dim}"] for dim in f"bh{order}"), p.numbers[left],
        p.numbers[right],
    )  # fmt: skip
    constants = {
        "ALIGN_ENDS": p.constants["BOTTOM_RIGHT"],
        "HAS_LEFT": p.constants[f"HAS_{left.upper()}"],
        "HAS_RIGHT": p.constants[f"HAS_{right.upper()}"],
        "BLOCK_ROWS": block_rows,
        "BLOCK_COLS": block_cols,
        "CHUNK": 4 if INTERPRET else 128,
        "num_warps": 1,
    }
    return shape, Plan((b * h * rows,), numbers, constants)


def launch_lists(p: _Problem, plan: Plan, mask_tiles: Tensor | None, by_keys: bool) -> Tensor | None:
    """Returns the lists that the attention kernel launched by `plan` reads; see `flash_attention_tiles_kernel`."""
    if mask_tiles is None:
        return None
    blocks = plan.constants["BLOCK_M"], plan.constants["BLOCK_N"]
    shape, made = _plan_lists(p, *(blocks[::-1] if by_keys else blocks), by_keys)
    lists = torch.empty(shape, dtype=torch.int32, device=mask_tiles.device)
    launch(flash_attention_tiles_kernel, made, mask_tiles, lists)
    return lists
