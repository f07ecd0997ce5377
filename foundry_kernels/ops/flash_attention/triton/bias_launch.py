"""The launch of a bias gradient."""

from __future__ import annotations

import math
from typing import Any

import triton
from torch import Tensor

from foundry_kernels._triton.devices import device_of
from foundry_kernels._triton.launch import Plan, launch
from foundry_kernels._triton.plans import planned
from foundry_kernels.ops.flash_attention.triton.bias_gradient import flash_attention_dbias_kernel
from foundry_kernels.ops.flash_attention.triton.bundles import PairStrides
from foundry_kernels.ops.flash_attention.triton.problem import _Problem

#: BLOCK_M, BLOCK_N, warps and stages for 16-bit inputs by the head dimension, for GPUs with asynchronous matmuls and
#: for others. None of them spills registers.
_ASYNCHRONOUS = {64: (64, 64, 8, 2), 128: (64, 64, 8, 2), 256: (64, 32, 8, 1)}
_SYNCHRONOUS = {64: (32, 64, 8, 2), 128: (32, 64, 8, 2), 256: (16, 64, 8, 1)}
_CDNA = {64: (64, 64, 4, 1), 128: (64, 64, 4, 1), 256: (64, 32, 4, 1)}


def dbias_config(p: _Problem) -> dict[str, int]:
    width = max(64, p.constants["BLOCK_D"], p.constants["BLOCK_DV"])
    name = device_of(p.capability).name
    if p.capability == 0:
        m, n, warps, stages = 32, 32, 4, 1
    elif p.dtype.itemsize != 2:
        m, n, warps, stages = (32, 32, 8, 1) if width == 64 else (16, 32, 8, 1) if width == 128 else (16, 16, 8, 1)
    elif width > 256:
        return {"BLOCK_M": 16, "BLOCK_N": 16, "num_warps": 4, "num_stages": 1 if name == "cdna" else 2}
    elif name in ("hopper", "blackwell"):
        m, n, warps, stages = _ASYNCHRONOUS[width]
    elif name == "cdna":
        m, n, warps, stages = _CDNA[width]
    else:
        m, n, warps, stages = _SYNCHRONOUS[width]
        if name != "ampere":
            stages = 1
    row = {"BLOCK_M": m, "BLOCK_N": n, "num_warps": warps, "num_stages": stages}
    return row | ({"maxnreg": min(255, 65536 // (32 * warps))} if p.capability and name != "cdna" else {})


@planned
def _plan_dbias(p: _Problem, shape: tuple[int, ...], dout: tuple[int, ...], dbias: tuple[int, ...]) -> Plan:
    config = dbias_config(p)
    tiles = triton.cdiv(p.tokens_q, config["BLOCK_M"]), triton.cdiv(p.tokens_k, config["BLOCK_N"])
    every = (p.n_batch, p.n_heads, *tiles)
    own = [n if size > 1 else 1 for n, size in zip(every, shape, strict=True)]
    each = [n // m for n, m in zip(every, own, strict=True)]
    numbers = (
        None, None, *own[1:], *each, p.n_heads, p.group, p.tokens_q, p.tokens_k, *p.strides_qkv, *p.strides(dout),
        PairStrides(*dbias), p.stride_lseb,
    )  # fmt: skip
    flags = {"LSE_LOW": p.wide_lse, "OWN_Q": shape[2] > 1, "OWN_K": shape[3] > 1}
    return p.plan(math.prod(own), numbers, flags, p.score_functions(slope=0), config)


def launch_dbias(p: _Problem, inputs: tuple[Tensor | None, ...], others: tuple[Any, ...], dbias: Tensor) -> None:
    """`inputs` are q, k, v, dout and the tensors of `_Rows`; `others` are lengths, slopes, the results of
    `pair_tensors` and the captured tensors."""
    dout = inputs[3]
    assert dout is not None
    plan = _plan_dbias(p, tuple(dbias.shape), dout.stride(), dbias.stride())
    launch(flash_attention_dbias_kernel, plan, *inputs, dbias, *others)
