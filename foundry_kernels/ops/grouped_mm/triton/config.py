"""Tiles, warps and pipeline stages by kernel, class of device, dtype and the average number of rows in a group.

The compiler's report (`python -m foundry_kernels inspect grouped_mm`) limits the tiles: they must not spill registers,
and must fit the class's shared memory. Among the remaining tiles, these are the ones that Triton publishes for its own
matmul on such a device. None has been measured here.
"""

from __future__ import annotations

import torch

from foundry_kernels._triton.devices import device_of

Tile = tuple[int, int, int, int, int]  # the two sides of the result, the inner dimension, warps, stages

#: For the interpreter: small, so that small cases have several tiles.
_INTERPRETED: list[Tile] = [(16, 32, 32, 4, 1), (32, 16, 16, 4, 1)]

#: For 16-bit inputs, by class of device: the matmul's tiles by the largest average number of rows in a group, then the
#: tiles for the gradient of the matrices. The first of each list is the default; `tune` tries the others.
_HALF: dict[str, tuple[dict[int, list[Tile]], list[Tile]]] = {
    # 99 KB of shared memory (8.6, 8.9, 12.x)
    "small": (
        {
            16: [(16, 128, 64, 4, 4), (16, 64, 128, 4, 4), (16, 256, 64, 8, 2)],
            48: [(32, 128, 64, 4, 3), (64, 128, 64, 4, 3), (32, 64, 128, 4, 3)],
            96: [(64, 128, 64, 4, 3), (32, 128, 64, 4, 3), (128, 128, 64, 8, 3)],
            1 << 31: [(128, 128, 64, 8, 3), (128, 128, 32, 8, 4), (64, 128, 64, 4, 3), (128, 64, 64, 4, 3)],
        },
        [(128, 128, 64, 8, 3), (128, 128, 32, 8, 4), (64, 128, 64, 4, 3)],
    ),
    # 163 KB (8.0). 128 x 256 x 64 would spill.
    "ampere": (
        {
            16: [(16, 128, 64, 4, 5), (16, 64, 128, 4, 5), (16, 256, 64, 8, 4)],
            48: [(32, 128, 64, 4, 4), (64, 128, 64, 4, 4), (32, 256, 64, 8, 3)],
            96: [(64, 128, 64, 4, 4), (64, 256, 64, 8, 3), (32, 128, 64, 4, 4), (128, 128, 64, 8, 3)],
            1 << 31: [(128, 256, 32, 8, 4), (128, 128, 64, 8, 4), (128, 128, 32, 4, 4), (64, 256, 64, 8, 3)],
        },
        [(128, 256, 32, 8, 4), (128, 128, 64, 8, 4), (128, 128, 32, 4, 4)],
    ),
    # 227 KB, wgmma: two groups of four warps, with 64 rows each
    "hopper": (
        {
            16: [(16, 128, 64, 4, 5), (16, 64, 128, 4, 5), (16, 256, 64, 8, 4)],
            48: [(64, 128, 64, 4, 4), (32, 128, 64, 4, 4), (64, 256, 64, 4, 4)],
            96: [(64, 256, 64, 4, 4), (64, 128, 64, 4, 4), (128, 128, 64, 8, 4)],
            1 << 31: [(128, 256, 64, 8, 3), (128, 128, 64, 4, 4), (128, 256, 64, 8, 4), (128, 128, 64, 8, 4)],
        },
        [(128, 256, 64, 8, 3), (128, 128, 64, 4, 4), (128, 128, 64, 8, 4)],
    ),
}
# tcgen05 (10.x): tiles of 128 rows; the sums are in tensor memory
_HALF["blackwell"] = (
    {
        **_HALF["hopper"][0],
        1 << 31: [(128, 256, 64, 8, 4), (128, 128, 64, 4, 4), (128, 256, 64, 4, 3), (128, 128, 128, 4, 3)],
    },
    [(128, 256, 64, 8, 4), (128, 128, 64, 4, 4), (128, 256, 64, 8, 3)],
)
# AMD's gfx942 and gfx950: 64 KB. The kernels were only compiled for them, not run.
_HALF["cdna"] = (
    {
        16: [(16, 128, 64, 4, 2), (16, 64, 128, 4, 2)],
        48: [(32, 128, 64, 4, 2), (64, 128, 64, 4, 2)],
        96: [(64, 128, 64, 4, 2), (32, 128, 64, 4, 2)],
        1 << 31: [(128, 128, 64, 8, 2), (256, 128, 64, 8, 2), (128, 128, 32, 4, 2)],
    },
    [(128, 128, 64, 8, 2), (128, 128, 32, 4, 2)],
)
#: For 16-bit inputs and groups of any size: enough rows for wgmma, and few columns, so that a decoding step has many
#: programs.
_ANY_ROWS = (64, 128, 64)
#: For 16-bit inputs whose rows are not aligned, and are loaded one element at a time: larger tiles would spill
#: addresses.
_UNALIGNED: list[Tile] = [(64, 64, 32, 4, 2), (32, 64, 32, 4, 2), (64, 32, 32, 4, 2)]
#: For float32, which is multiplied exactly by fused multiply-adds with operands in registers.
_SINGLE: list[Tile] = [(64, 64, 16, 4, 1), (32, 64, 16, 4, 1)]
_SINGLE_FEW: list[Tile] = [(16, 64, 16, 4, 1), (16, 64, 32, 4, 1), (32, 64, 16, 4, 1)]
#: Enough for three programs of 4 warps on a multiprocessor. By default, ptxas makes room for a fourth and spills some.
_SINGLE_REGISTERS = 168


def tiles(dtype: torch.dtype, arch: int, rows_a_group: int | None, aligned: bool) -> list[dict[str, int]]:
    """Returns the matmul's launch configs: the default, then those that `tune` tries. Arch 0 is the interpreter.
    `aligned`: all rows are aligned to 16 elements, which the compiler uses. `rows_a_group`: None for the tile for
    groups of any size, with which a row has the same bits in any group."""
    if arch == 0:
        found = _INTERPRETED
    elif dtype.itemsize == 2 and not aligned:
        found = _UNALIGNED
    elif rows_a_group is None:
        half = dtype.itemsize == 2
        found = [next(t for t in _HALF[device_of(arch).name][0][96] if t[:3] == _ANY_ROWS)] if half else _SINGLE
    elif dtype.itemsize == 2:
        found = next(t for most, t in _HALF[device_of(arch).name][0].items() if rows_a_group <= most)
    else:
        found = _SINGLE_FEW if rows_a_group <= 16 else _SINGLE
    return _configs(("BLOCK_M", "BLOCK_N", "BLOCK_K"), found, dtype, arch)


def dweight_tiles(dtype: torch.dtype, arch: int, aligned: bool) -> list[dict[str, int]]:
    """Returns the launch configs of the matrices' gradient, the default first."""
    if arch == 0:
        found = _INTERPRETED
    elif dtype.itemsize == 2:
        found = _HALF[device_of(arch).name][1] if aligned else _UNALIGNED
    else:
        found = _SINGLE
    return _configs(("BLOCK_A", "BLOCK_B", "BLOCK_ROWS"), found, dtype, arch)


def _configs(names: tuple[str, ...], found: list[Tile], dtype: torch.dtype, arch: int) -> list[dict[str, int]]:
    has_limit = dtype.itemsize == 4 and device_of(arch).name not in ("interpreter", "cdna")  # AMD has no limit
    limit = {"maxnreg": _SINGLE_REGISTERS} if has_limit else {}
    return [dict(zip((*names, "num_warps", "num_stages"), tile, strict=True)) | limit for tile in found]
