"""Blocks, warps and pipeline stages: a table keyed on kernel, dtype and width of the heads.

A config must not spill registers and must fit the class's shared memory, according to the compiler's report
(`python -m foundry_kernels inspect gated_delta_rule`), which `make test-slow` reads for its shapes on every
architecture. In float32, heads wider than 64 would spill in the kernels that visit chunks one after another, where
every warp has a copy of the operands: BLOCK_D is smaller there. None has been measured on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch

from foundry_kernels._triton.devices import device_of

#: The most tokens of a chunk by the bytes of an element, then by the width of the heads: more would take more registers
#: than a program has. In the interpreter, cases are small.
_MOST = {2: {128: 64, 256: 32}, 4: {64: 32, 256: 16}}
_INTERPRETED_CHUNK = 32

#: BLOCK_D, BLOCK_V, warps, stages; 0 is the whole width. A state is as high as the heads are wide in "states" and
#: "dstates", and BLOCK_D is a part of the sums over it.
Row = tuple[int, int, int, int]

_INTERPRETED: dict[str, list[Row]] = {
    "prepare": [(32, 32, 4, 1)],
    "states": [(32, 32, 4, 1), (0, 16, 4, 1)],
    "outputs": [(32, 32, 4, 1), (16, 32, 4, 1)],
    "dstates": [(32, 32, 4, 1), (0, 16, 4, 1)],
    "pairs": [(32, 32, 4, 1), (16, 16, 4, 1)],
    "dqk": [(32, 32, 4, 1), (16, 16, 4, 1)],
    "channel_rows": [(64, 64, 4, 1), (16, 64, 4, 1)],
    "channel_scores": [(64, 64, 4, 1), (16, 64, 4, 1)],
    "channel_solve": [(64, 64, 4, 1), (64, 16, 4, 1)],
    "channel_outputs": [(64, 64, 4, 1), (16, 16, 4, 1)],
    "channel_pairs": [(64, 64, 4, 1), (16, 16, 4, 1)],
    "channel_dqk": [(64, 64, 4, 1), (16, 16, 4, 1)],
    "channel_finish": [(64, 64, 4, 1), (16, 16, 4, 1)],
}
#: With a decay for each dimension of a key, for all dtypes and devices.
_CHANNELS: dict[str, list[Row]] = {
    "channel_rows": [(32, 32, 4, 1), (32, 32, 8, 1)],
    "channel_scores": [(32, 32, 4, 1), (64, 32, 4, 1)],
    "channel_solve": [(32, 32, 4, 1), (32, 32, 8, 1)],
    "channel_outputs": [(32, 32, 4, 1), (32, 64, 4, 1)],
    "channel_pairs": [(32, 32, 4, 1), (32, 32, 8, 1)],
    "channel_dqk": [(32, 32, 4, 1), (64, 32, 4, 1)],
    "channel_finish": [(32, 32, 4, 1), (64, 32, 4, 1)],
}

#: For 16-bit inputs, by class of device and by the width of the heads.
_HALF: dict[str, dict[str, dict[int, list[Row]]]] = {
    # wgmma, for which 4 warps have 64 rows together
    "hopper": {
        "prepare": {256: [(64, 64, 4, 2), (64, 64, 4, 1)]},
        "states": {128: [(0, 32, 4, 2), (0, 16, 4, 2)], 256: [(0, 16, 4, 2)]},
        "outputs": {256: [(64, 64, 4, 2), (64, 32, 4, 2)]},
        "dstates": {64: [(0, 32, 4, 2), (0, 16, 4, 2)], 128: [(0, 16, 4, 2)], 256: [(0, 16, 8, 1)]},
        "pairs": {256: [(64, 32, 4, 2), (32, 16, 4, 1)]},
        "dqk": {128: [(64, 16, 4, 2), (32, 16, 4, 1)], 256: [(64, 16, 4, 2), (32, 16, 4, 1)]},
    },
    # tcgen05, whose results are not in registers until they are read
    "blackwell": {
        "prepare": {128: [(64, 64, 8, 2), (64, 64, 8, 1)], 256: [(64, 64, 4, 2), (64, 64, 4, 1)]},
        "states": {64: [(0, 32, 4, 2), (0, 16, 4, 2)], 128: [(0, 16, 8, 2), (0, 32, 8, 2)], 256: [(0, 16, 4, 2)]},
        "outputs": {256: [(64, 64, 4, 2), (64, 32, 4, 2)]},
        "dstates": {64: [(0, 32, 8, 2), (0, 16, 4, 2)], 128: [(0, 16, 8, 2), (0, 16, 8, 1)], 256: [(0, 16, 8, 1)]},
        "pairs": {128: [(64, 32, 8, 2), (32, 16, 4, 1)], 256: [(64, 32, 4, 2), (32, 16, 4, 1)]},
        "dqk": {128: [(64, 32, 8, 2), (32, 16, 4, 1)], 256: [(64, 16, 4, 2), (32, 16, 4, 1)]},
    },
    # mma.sync
    "ampere": {
        "prepare": {256: [(32, 32, 4, 1)]},
        "states": {128: [(0, 16, 4, 2), (0, 16, 4, 1)], 256: [(0, 16, 4, 1)]},
        "outputs": {256: [(32, 32, 4, 1)]},
        "dstates": {64: [(0, 16, 4, 2)], 128: [(0, 16, 8, 2)], 256: [(0, 16, 4, 1)]},
        "pairs": {128: [(32, 16, 4, 2), (32, 16, 8, 1)], 256: [(32, 16, 4, 1)]},
        "dqk": {256: [(32, 16, 4, 1)]},
    },
}
#: For float32.
_SINGLE: dict[str, dict[int, list[Row]]] = {
    "prepare": {256: [(32, 32, 4, 1)]},
    "states": {64: [(0, 16, 4, 1)], 256: [(32, 16, 4, 1)]},
    "outputs": {256: [(32, 32, 4, 1)]},
    "dstates": {64: [(0, 16, 4, 1)], 256: [(32, 16, 4, 1)]},
    "pairs": {256: [(32, 16, 4, 1)]},
    "dqk": {256: [(32, 16, 4, 1)]},
}


def chunk_length(
    chunk_size: int | None, head_dim: int, dtype: torch.dtype, capability: int, channels: bool = False
) -> int:
    """The number of tokens of a chunk, for the option of this name. `head_dim` is the larger of D_k and D_v, and
    capability 0 is the interpreter. channels: with a decay for each dimension of a key, for which rows of q and k are
    in float32."""
    if capability == 0:
        return min(chunk_size or _INTERPRETED_CHUNK, 64)
    most = 32 if channels else 64
    fit = next(tokens for width, tokens in _MOST[dtype.itemsize].items() if head_dim <= width)
    return min(chunk_size or most, most, fit)


def configs(kernel: str, capability: int, head_dim: int, dtype: torch.dtype) -> list[dict[str, Any]]:
    """The launch configs of a kernel, the default first; `head_dim` as for `chunk_length`."""
    if capability == 0:
        rows = _INTERPRETED[kernel]
    else:
        table = _HALF.get(device_of(capability).name, _HALF["ampere"]) if dtype.itemsize == 2 else _SINGLE
        rows = _CHANNELS.get(kernel) or next(rows for width, rows in table[kernel].items() if head_dim <= width)
        if kernel in ("states", "dstates") and device_of(capability).name == "cdna":
            # AMD's barrier need not wait until a state is stored, so it is not read back; there are 512 registers.
            rows = list(dict.fromkeys((0, row[1], 4, 1) for row in rows))
    names = ("BLOCK_D", "BLOCK_V", "num_warps", "num_stages")
    found = [dict(zip(names, row, strict=True)) for row in rows]
    if capability != 0 and device_of(capability).name != "cdna":
        # Otherwise ptxas spills some of fewer registers, for an occupancy that it guesses.
        found = [config | {"maxnreg": min(255, 65536 // (32 * config["num_warps"]))} for config in found]
    return found


def kind(dtype: torch.dtype, capability: int) -> str:
    """How operands of float32 are multiplied, see `products`."""
    if capability != 0 and device_of(capability).name == "cdna":
        return "bf16" if dtype == torch.bfloat16 else "ieee"
    return "bf16" if dtype == torch.bfloat16 else "tf32"
