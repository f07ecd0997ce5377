"""The gradients of the tensors that a score function reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from foundry_kernels._triton.launch import Plan, launch
from foundry_kernels._triton.plans import planned
from foundry_kernels.core.registry import BackendUnavailable
from foundry_kernels.ops.flash_attention.options import AttentionOptions
from foundry_kernels.ops.flash_attention.score_program.differentiable import _gathered, _indices
from foundry_kernels.ops.flash_attention.score_program.program import ON_K, ON_Q, ON_SCORE, Program
from foundry_kernels.ops.flash_attention.triton.bias_gradient import flash_attention_dbias_kernel
from foundry_kernels.ops.flash_attention.triton.bias_launch import dbias_config
from foundry_kernels.ops.flash_attention.triton.bundles import PairStrides
from foundry_kernels.ops.flash_attention.triton.problem import _Problem

#: The most sums that are in memory at a time.
_AT_ONCE = 1 << 24


@planned
def _plan_dscore(
    p: _Problem, dout: tuple[int, ...], load: int, own_q: bool, own_k: bool, first: int, units: int
) -> tuple[Plan, int, int]:
    """The launch for `units` units from the first one on, the number of all units, and the rows of a unit."""
    config = dbias_config(p)
    tiles = [triton.cdiv(p.max_seqlen_q, config["BLOCK_M"]), triton.cdiv(p.max_seqlen_k, config["BLOCK_N"])]
    own = [n if mine else 1 for n, mine in zip(tiles, (own_q, own_k), strict=True)]
    each = [n // m for n, m in zip(tiles, own, strict=True)]
    numbers = (
        first, p.max_seqlen_k if own_k else 1, p.n_heads, *own, 1, 1, *each, p.n_heads, p.group, p.tokens_q, p.tokens_k,
        *p.strides_qkv, *p.strides(dout), PairStrides(0, 0, 0, 0), p.stride_lseb,
    )  # fmt: skip
    flags = {"LSE_LOW": p.wide_lse, "OWN_Q": own_q, "OWN_K": own_k}
    plan = p.plan(units * own[1], numbers, flags, p.score_functions(slope=1 + load), config)
    return plan, p.n_batch * p.n_heads * own[0], config["BLOCK_M"] if own_q else 1


def launch_dscore(
    p: _Problem,
    inputs: tuple[Any, ...],
    others: tuple[Any, ...],
    options: AttentionOptions,
    slots: Sequence[int],
    dscore: Tensor,
) -> None:
    """Writes the gradients of these slots' tensors. A kernel sums each load's gradient over the queries, the keys or
    both that its indices do not depend on, in float32; PyTorch adds the sums to the elements in a fixed order, in
    float64. If the indices depend on both, there is a number for each pair, of `_AT_ONCE` pairs at a time."""
    program, tensors = Program.decode(options.score_mod or ()), options.score_tensors or ()
    begin = 0
    for slot in slots:
        x = tensors[slot]
        total = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
        if x.numel() > 0:
            for number, at in enumerate(program.loads()):
                if program.instructions[at].slot == slot:
                    total += _of_load(p, inputs, others, options, program, number, at)
        dscore[begin : begin + x.numel()] = total.view(-1)
        begin += x.numel()


def _of_load(
    p: _Problem,
    inputs: tuple[Any, ...],
    others: tuple[Any, ...],
    options: AttentionOptions,
    program: Program,
    number: int,
    at: int,
) -> Tensor:
    load = program.instructions[at]
    tensors = options.score_tensors or ()
    x, device = tensors[load.slot], p.device
    if load.depends & ON_SCORE:
        raise BackendUnavailable(
            "flash_attention: backend 'triton': score_mod reads a tensor that requires a gradient at an index which "
            "depends on the score. Use backend 'reference'"
        )
    own_k = bool(load.depends & ON_K)
    own_q = bool(load.depends & ON_Q) or not own_k
    shape = (p, inputs[3].stride(), number, own_q, own_k)
    _, n_units, rows = _plan_dscore(*shape, 0, 1)
    width = p.max_seqlen_k if own_k else 1
    step = max(1, _AT_ONCE // (rows * width))
    total = torch.zeros(x.shape, dtype=torch.float64, device=device)
    dtype = torch.float64 if p.dtype == torch.float64 else torch.float32
    heads = torch.arange(p.n_batch * p.n_heads, device=device)
    b, h = heads // p.n_heads, heads % p.n_heads
    if options.dropout_heads is not None:
        b, h = (y.flatten() for y in (options.dropout_heads >> 32, options.dropout_heads & 0xFFFFFFFF))
    for first in range(0, n_units, step):
        units = min(step, n_units - first)
        plan = _plan_dscore(*shape, first, units)[0]
        sums = torch.empty((units, rows, width), dtype=dtype, device=device)
        launch(flash_attention_dbias_kernel, plan, *inputs, sums, *others)
        unit = torch.arange(first, first + units, device=device)[:, None, None]
        tiles = n_units // heads.shape[0]
        queries = unit % tiles * rows + torch.arange(rows, device=device)[:, None]
        places = (b[unit // tiles], h[unit // tiles], queries, torch.arange(width, device=device))
        total += _gathered(sums, _indices(program, at, sums.new_zeros(1), places, tensors), x)
    return total
