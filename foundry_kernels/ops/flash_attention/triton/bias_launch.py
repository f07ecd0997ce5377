"""What the gradient of a bias launches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
from torch import Tensor

from foundry_kernels._triton.devices import device_of
from foundry_kernels._triton.launch import Plan, launch, planned
from foundry_kernels.ops.flash_attention.triton.bias_gradient import flash_attention_dbias_kernel

if TYPE_CHECKING:
    from foundry_kernels.ops.flash_attention.triton.launch import _Problem

#: The constants of a problem that the kernel has no parameter for: a bias is there, and sequences are not packed.
_IMPLIED = ("VARLEN", "HAS_BIAS", "HAS_MASK")


def _config(p: _Problem) -> dict[str, int]:
    """Tiles that fit the shared memory twice, for one to be copied while another is used, or else once."""
    width = max(64, p.constants["BLOCK_D"], p.constants["BLOCK_DV"])
    if p.capability == 0:
        m, n = 32, 32
    elif width > 256 and p.dtype.itemsize == 2:
        return {
            "BLOCK_M": 16,
            "BLOCK_N": 16,
            "num_warps": 4,
            "num_stages": 2 if device_of(p.capability).name != "cdna" else 1,
        }
    elif p.dtype.itemsize == 2:
        m, n = (64, 64) if width <= 128 else (32, 32)
    else:
        m, n = (32, 32) if width <= 128 else (16, 16)
    stage = 2 * (m + n) * width * p.dtype.itemsize
    stages = 2 if p.capability and 2 * stage <= device_of(p.capability).block_shared * 9 // 10 else 1
    return {"BLOCK_M": m, "BLOCK_N": n, "num_warps": 4 if m * n < 4096 else 8, "num_stages": stages}


@planned
def _plan_dbias(p: _Problem, shape: tuple[int, ...], dout: tuple[int, ...], dbias: tuple[int, ...]) -> Plan:
    config = _config(p)
    tiles = triton.cdiv(p.tokens_q, config["BLOCK_M"]), triton.cdiv(p.tokens_k, config["BLOCK_N"])
    every = (p.n_batch, p.n_heads, *tiles)
    own = [n if size > 1 else 1 for n, size in zip(every, shape, strict=True)]
    each = [n // m for n, m in zip(every, own, strict=True)]
    numbers = (
        *own[1:], *each, p.n_heads, p.group, p.tokens_q, p.tokens_k, *p.strides_qkv, *p.strides(dout), *dbias,
        p.stride_lseb,
    )  # fmt: skip
    constants: dict[str, Any] = {name: x for name, x in p.constants.items() if name not in _IMPLIED}
    flags = {"LSE_LOW": p.dtype.itemsize == 4}
    grid = (own[0] * own[1] * own[2] * own[3],)
    return Plan(grid, numbers, p.numbers | constants | flags | config)


def launch_dbias(
    p: _Problem, inputs: tuple[Tensor | None, ...], others: tuple[Tensor | None, ...], dbias: Tensor
) -> None:
    """`inputs` are q, k, v, dout and what the backward kernels read of each row, `others` the slopes and those of
    `pair_tensors`."""
    dout = inputs[3]
    assert dout is not None
    plan = _plan_dbias(p, tuple(dbias.shape), dout.stride(), dbias.stride())
    launch(flash_attention_dbias_kernel, plan, *inputs, dbias, *others)
