"""Tiles, warps and pipeline stages: a table keyed on kernel, class of device, head dimension and dtype.

BLOCK_M counts queries, BLOCK_N keys. The compiler's report (`python -m foundry_kernels inspect flash_attention`) bounds
each row: no spilled register and the class's shared memory, with every option in use. Where that left a choice, a row
starts from tiles published for the same kernel shape; none has been measured here, since no GPU has run it yet.
"""

from __future__ import annotations

from typing import Any

import torch

from foundry_kernels._triton import VERSION

Row = tuple[int, int, int, int]  # BLOCK_M, BLOCK_N, warps, stages

#: The interpreter: small, so that small cases have several tiles.
_INTERPRETED: Row = (32, 32, 4, 1)

#: 16-bit inputs, by class of device and by the head dimension (a power of two, at least 64), the wider of D and Dv.
_HALF: dict[str, dict[str, dict[int, Row]]] = {
    # 99 KB of shared memory (8.6, 8.9, 12.x): mma.sync keeps q and both accumulators in registers.
    "small": {
        "fwd": {64: (128, 64, 8, 2), 128: (64, 32, 4, 2), 256: (64, 32, 8, 1)},
        "dkdv": {64: (32, 128, 8, 2), 128: (32, 64, 8, 2), 256: (32, 32, 8, 1)},
        "dq": {64: (128, 64, 8, 2), 128: (128, 32, 8, 2), 256: (64, 32, 8, 1)},
    },
    # 163 KB (8.0): the same tiles, one more stage in flight.
    "ampere": {
        "fwd": {64: (128, 64, 8, 3), 128: (64, 32, 4, 3), 256: (64, 32, 8, 2)},
        "dkdv": {64: (32, 128, 8, 3), 128: (32, 64, 8, 3), 256: (32, 32, 8, 2)},
        "dq": {64: (128, 64, 8, 3), 128: (128, 32, 8, 3), 256: (64, 32, 8, 2)},
    },
    # 227 KB, wgmma. Forward at 128: 128x64 with 3 stages and 8 warps, PyTorch's FlexAttention default on an H100.
    # dK, dV at 128: 64 queries a tile would spill 96 bytes.
    "hopper": {
        "fwd": {64: (128, 64, 8, 3), 128: (128, 64, 8, 3), 256: (128, 32, 8, 2)},
        "dkdv": {64: (64, 128, 8, 2), 128: (32, 128, 8, 3), 256: (16, 64, 8, 2)},
        "dq": {64: (128, 64, 8, 3), 128: (128, 64, 8, 2), 256: (128, 32, 8, 2)},
    },
}
# tcgen05 (10.x): as Hopper, but dK and dV would spill at its tiles beyond 64.
_HALF["blackwell"] = {
    **_HALF["hopper"],
    "dkdv": {64: (64, 128, 8, 2), 128: (32, 64, 8, 2), 256: (32, 32, 8, 2)},
}

#: float32 is multiplied exactly, by fused multiply-adds with whole rows in flight: small tiles, the same everywhere.
_SINGLE: dict[str, dict[int, Row]] = {
    "fwd": {64: (32, 32, 8, 1), 128: (32, 32, 8, 1), 256: (16, 16, 8, 1)},
    "dkdv": {64: (32, 32, 8, 1), 128: (16, 32, 8, 1), 256: (16, 16, 8, 1)},
    "dq": {64: (32, 32, 8, 1), 128: (16, 32, 8, 1), 256: (16, 16, 8, 1)},
}

#: Where Triton is older than 3.7, in place of a row with which it would spill: by class of device, kernel, head
#: dimension and `needs_registers` (see `config`).
_BEFORE_3_7: dict[tuple[str, str, int, bool], Row] = {
    ("ampere", "dkdv", 64, True): (32, 64, 8, 2),  # a stage less
    ("hopper", "dkdv", 64, False): (32, 128, 8, 3),  # half the queries a tile: a narrower wgmma. 199 registers
    ("hopper", "dkdv", 128, True): (32, 64, 8, 2),  # a stage less
    ("hopper", "dkdv", 256, False): (
        32,
        32,
        8,
        2,
    ),  # mma.sync: what is wide enough for wgmma spills 8 bytes or more
}


def device_class(capability: int) -> str:
    """What devices of a compute capability (90 for 9.0) have in common."""
    if capability in (80, 87):
        return "ampere"
    return {9: "hopper", 10: "blackwell"}.get(capability // 10, "small")


def config(kernel: str, capability: int, head_dim: int, dtype: torch.dtype, needs_registers: bool) -> dict[str, Any]:
    """The launch of "fwd", "dkdv", "dq" or "preprocess" for the padded `head_dim`, the wider of D and Dv. Capability 0
    is the interpreter.

    `needs_registers`: a soft cap or ALiBi, which keep more numbers for each score, or heads that do not fill their
    block, whose masks do. Fewer keys or queries, or more warps, make room. There, forward, and in float32 `maxnreg` is
    all that the warps can have: without it ptxas spills a few for the sake of an occupancy that it guesses at.
    """
    if kernel == "preprocess":
        elements = 8192 // dtype.itemsize  # of a tile; twice as many would spill in float32
        return {"BLOCK_M": 32 if capability == 0 else elements // max(64, head_dim), "num_warps": 4}
    if capability == 0:
        row = _INTERPRETED
    else:
        table = _HALF[device_class(capability)] if dtype.itemsize == 2 else _SINGLE
        row = table[kernel][max(64, head_dim)]
    m, n, warps, stages = row
    if needs_registers and kernel == "dkdv" and n > 32:
        n //= 2
    if needs_registers and kernel == "fwd":
        warps = 8
        if head_dim > 128:
            m = min(m, 64)
    if VERSION < (3, 7) and capability and dtype.itemsize == 2:
        key = (device_class(capability), kernel, max(64, head_dim), needs_registers)
        m, n, warps, stages = _BEFORE_3_7.get(key, (m, n, warps, stages))
    launch = {"BLOCK_M": m, "BLOCK_N": n, "num_warps": warps, "num_stages": stages}
    if dtype.itemsize != 2 or (needs_registers and kernel == "fwd"):
        launch["maxnreg"] = min(255, 65536 // (32 * warps))
    return launch
