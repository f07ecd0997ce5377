"""Which calls the kernel in `gluon_forward` supports, its launch configs, and its launch."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from foundry_kernels._triton import VERSION
from foundry_kernels._triton.launch import Plan, compiler_options
from foundry_kernels._triton.plans import planned
from foundry_kernels.ops.flash_attention.triton.problem import _Problem

#: Releases of Triton that compile the kernel correctly (tests/proof/gluon_compiled.py); with 3.6, it ran on an H100.
#: Gluon is an experimental part of Triton, so with any other release the default kernel takes all calls.
RELEASES = ((3, 6), (3, 7), (3, 9))

MISSING: str | None = None
try:
    if VERSION not in RELEASES:
        raise ImportError(f"Gluon is untested with Triton {'.'.join(map(str, VERSION))}")
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from foundry_kernels.ops.flash_attention.triton.gluon_forward import CONSUMERS, flash_attention_fwd_gluon_kernel
except ImportError as error:
    MISSING = f"Gluon does not import ({error})"

Row = dict[str, Any]

#: Constants of the default kernel that may be set: sizes, the mask's right edge, and lse, which is always computed.
_SUPPORTED = frozenset({"COMPUTE", "D", "DV", "BLOCK_D", "BLOCK_DV", "BOTTOM_RIGHT", "HAS_RIGHT", "SAVE_LSE"})

#: By head dimension: queries of a consumer, keys of a tile and tiles in shared memory. With more keys, there are too
#: few registers for two tiles of scores, so matmuls do not overlap with the softmax.
_TILES = {64: (64, 64, 4), 128: (64, 64, 4)}
#: The copy engine's limit for the bytes from one row, head or sequence to the next.
_FARTHEST = 1 << 40


def configs(p: _Problem, flags: dict[str, bool], out: tuple[int, ...]) -> list[Row]:
    """Returns launch configs that are preferred to the default kernel's, or none if this kernel does not support the
    call. `flags` are the default kernel's flags besides the problem's; `out` are the strides of the result. GLUON: see
    `tuning.ANOTHER`. Its speed on an H100 is 1.21 (4096 tokens), 1.14 (16384 tokens) and 1.09 times (full attention)
    the default kernel's for heads of 128, and 1.12 times for heads of 64; all but one are causal."""
    if not supports(p, flags, out):
        return []
    m, n, stages = _TILES[p.head_dim]
    return [{"GLUON": True, "BLOCK_M": m, "BLOCK_N": n, "STAGES": stages, "num_warps": 4}]


def supports(p: _Problem, flags: dict[str, bool], out: tuple[int, ...]) -> bool:
    """Dense 16-bit heads of 64 or 128, full or causal, on compute capability 9.0. The default kernel takes calls that
    set anything besides `_SUPPORTED`."""
    on = {name for name, value in (p.constants | flags).items() if value is not False}
    return (
        MISSING is None
        and p.capability == 90
        and p.dtype in (torch.bfloat16, torch.float16)
        and p.head_dim in _TILES
        and p.head_dim_v == p.head_dim
        and on <= _SUPPORTED
        and p.numbers["scale"] > 0
        and p.tokens_k > 0
        and addressable(p, out)
    )


def addressable(p: _Problem, out: tuple[int, ...]) -> bool:
    """Whether all strides of rows are multiples of 16 bytes and not 0, as in an expanded tensor."""
    step = 16 // p.dtype.itemsize
    q, k, v = p.layouts
    for shape, strides in (q, k, v, (q[0], out)):
        for size, stride in zip(shape[:3], strides[:3], strict=True):
            if size > 1 and not (0 < stride * p.dtype.itemsize < _FARTHEST and stride % step == 0):
                return False
        if strides[3] != 1:
            return False
    return True


@planned
def plan(p: _Problem, row: tuple[tuple[str, Any], ...]) -> Plan:
    config = {name: value for name, value in row if name != "GLUON"}
    tiles = triton.cdiv(p.tokens_q, CONSUMERS.value * config["BLOCK_M"])
    numbers = (p.n_batch, p.n_heads, p.group, p.group * p.section(p.tokens_k), p.tokens_q, p.tokens_k)
    names = ("scale", "right", "BOTTOM_RIGHT", "HAS_RIGHT", "D")
    named = {name: (p.numbers | p.constants)[name] for name in names}
    return Plan((tiles * p.n_batch * p.n_heads,), numbers, named | config)


def launch_gluon(made: Plan, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None) -> None:
    """Uses Triton's own launch path, because each call needs new descriptors for the addresses of its tensors."""
    if lse is None:  # it is small; without it, there would be one more kernel to compile
        lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    m, n = made.constants["BLOCK_M"], made.constants["BLOCK_N"]
    tensors = (*(descriptor(x, rows) for x, rows in ((q, m), (k, n), (v, n), (out, m))), lse)
    flash_attention_fwd_gluon_kernel[made.grid](*tensors, *made.numbers, **made.constants, **compiler_options())


def descriptor(x: Tensor, rows: int) -> Any:
    """Returns the descriptor of x [B, H, T, D], for blocks of `rows` rows of a head. The stride of a dimension of size
    1 is not used, but must be valid."""
    block = [1, 1, rows, x.shape[3]]
    dtype = gl.bfloat16 if x.dtype == torch.bfloat16 else gl.float16
    strides = [s if size > 1 else x.shape[3] for size, s in zip(x.shape[:3], x.stride()[:3], strict=True)]
    layout = gl.NVMMASharedLayout.get_default_for(block, dtype)
    return TensorDescriptor(x, list(x.shape), [*strides, 1], block, layout)
