"""Tiles, warps and pipeline stages: a table keyed on kernel, class of device, head dimension and dtype.

BLOCK_M counts queries and BLOCK_N keys. For "decode", BLOCK_M is the maximum number of rows: queries of a group's
heads. A config must not spill registers and must fit the class's shared memory, with every option in use, according to
the compiler's report (`python -m foundry_kernels inspect flash_attention`). Among the configs that fit, the table has
tiles that were published for the same kernel shape. `_MEASURED` has configs that were faster on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch

from foundry_kernels._triton import VERSION
from foundry_kernels._triton.devices import device_of

Row = tuple[int, int, int, int]  # BLOCK_M, BLOCK_N, warps, stages

#: For the interpreter: small, so that small cases have several tiles.
_INTERPRETED: Row = (32, 32, 4, 1)
_INTERPRETED_DECODE: Row = (16, 32, 4, 1)

#: For 16-bit inputs, by class of device and by head dimension: the larger of D and Dv, as a power of two, at least 64.
_HALF: dict[str, dict[str, dict[int, Row]]] = {
    # 99 KB of shared memory (8.6, 8.9, 12.x): mma.sync keeps q and both accumulators in registers.
    "small": {
        "fwd": {64: (128, 64, 8, 2), 128: (128, 64, 8, 2), 256: (64, 32, 8, 1), 512: (32, 32, 8, 2)},
        "dkdv": {64: (32, 128, 8, 2), 128: (32, 64, 8, 2), 256: (32, 32, 8, 1)},
        "dk": {512: (16, 32, 8, 2)},
        "dv": {512: (32, 32, 8, 2)},
        "dq": {64: (128, 64, 8, 2), 128: (128, 32, 8, 2), 256: (64, 32, 8, 1), 512: (32, 16, 8, 2)},
        "decode": {64: (64, 64, 4, 3), 128: (64, 64, 4, 2), 256: (32, 32, 4, 2), 512: (16, 16, 8, 2)},
    },
    # 163 KB (8.0): the same tiles with one more stage.
    "ampere": {
        "fwd": {64: (128, 64, 8, 3), 128: (128, 64, 8, 3), 256: (64, 32, 8, 2), 512: (32, 32, 8, 2)},
        "dkdv": {64: (32, 128, 8, 3), 128: (32, 64, 8, 3), 256: (32, 32, 8, 2)},
        "dk": {512: (16, 32, 8, 2)},
        "dv": {512: (32, 32, 8, 1)},
        "dq": {64: (128, 64, 8, 3), 128: (128, 32, 8, 3), 256: (64, 32, 8, 2), 512: (32, 32, 8, 2)},
        "decode": {64: (64, 64, 4, 3), 128: (64, 64, 4, 3), 256: (32, 32, 4, 3), 512: (16, 32, 8, 2)},
    },
    # 227 KB, wgmma. Forward at 128: 128x64 with 3 stages and 8 warps, the default of PyTorch's FlexAttention on an
    # H100. dK, dV at 128: 64 queries in a tile would spill 96 bytes. Forward at 512: 32 keys would need 1 KB too much.
    "hopper": {
        "fwd": {64: (128, 128, 8, 2), 128: (128, 64, 8, 3), 256: (128, 32, 8, 2), 512: (64, 16, 8, 3)},
        "dkdv": {64: (64, 128, 8, 2), 128: (32, 128, 8, 3), 256: (16, 64, 8, 2)},
        "dk": {512: (16, 64, 8, 2)},
        "dv": {512: (32, 64, 8, 2)},
        "dq": {64: (128, 64, 8, 3), 128: (128, 64, 8, 2), 256: (128, 32, 8, 2), 512: (32, 32, 8, 2)},
        "decode": {64: (64, 64, 4, 3), 128: (64, 64, 4, 3), 256: (32, 32, 4, 3), 512: (16, 32, 8, 2)},
    },
}
# tcgen05 (10.x): as Hopper, but beyond 64 dK and dV would spill with Hopper's tiles.
_HALF["blackwell"] = {
    **_HALF["hopper"],
    "fwd": _HALF["hopper"]["fwd"] | {64: (128, 64, 8, 3), 512: (32, 32, 8, 2)},
    "dkdv": {64: (64, 128, 8, 2), 128: (32, 64, 8, 2), 256: (32, 32, 8, 2)},
    "dk": {512: (32, 32, 8, 2)},
    "dv": {512: (32, 32, 8, 2)},
}

# AMD's gfx942 and gfx950: 64 KB. The kernels were only compiled for them, not run. With 4 warps of 64 lanes a thread
# has 512 registers; with 8 warps it has 256, and dK, dV and dQ spill.
_HALF["cdna"] = {
    **_HALF["small"],
    "fwd": _HALF["small"]["fwd"]
    | {64: (128, 32, 8, 2), 512: (32, 32, 4, 1)},  # 64 keys spill with a window that has both edges
    "dkdv": {64: (32, 64, 4, 1), 128: (32, 64, 4, 1), 256: (32, 32, 4, 1)},
    "dk": {512: (16, 32, 4, 1)},
    "dv": {512: (16, 32, 4, 1)},
    "dq": {64: (64, 32, 4, 1), 128: (64, 32, 4, 1), 256: (64, 32, 4, 1), 512: (16, 16, 4, 1)},
    "decode": _HALF["small"]["decode"] | {512: (16, 16, 4, 1)},
}

#: float32 is multiplied exactly, by fused multiply-adds that hold whole rows in registers. So tiles are small, and the
#: same on all devices.
_SINGLE: dict[str, dict[int, Row]] = {
    "fwd": {64: (32, 32, 8, 1), 128: (32, 32, 8, 1), 256: (16, 16, 8, 1), 512: (16, 16, 8, 1)},
    "dkdv": {64: (32, 32, 8, 1), 128: (16, 32, 8, 1), 256: (16, 16, 8, 1), 512: (16, 16, 8, 1)},
    "dq": {64: (32, 32, 8, 1), 128: (16, 32, 8, 1), 256: (16, 16, 8, 1), 512: (16, 16, 8, 1)},
    "decode": {64: (16, 32, 4, 2), 128: (16, 32, 4, 2), 256: (16, 16, 4, 2), 512: (16, 16, 8, 1)},
}
_SINGLE_CDNA = {
    **_SINGLE,
    "fwd": {**_SINGLE["fwd"], 512: (16, 16, 4, 1)},
    "dkdv": {64: (32, 64, 4, 1), 128: (16, 32, 8, 1), 256: (16, 32, 4, 1), 512: (16, 16, 4, 1)},
    "dq": {**_SINGLE["dq"], 256: (16, 32, 4, 1), 512: (16, 16, 4, 1)},
}

#: Configs that were faster than the table's on an H100 with Triton 3.6, for calls without an option that takes
#: registers. The comments have TFLOP/s with and without the config, for 4096 tokens, causal, 32/8 heads: of the forward
#: pass, or of the whole backward pass with only this kernel's config replaced. Two faster ones are not used because
#: they spill registers: forward at 64 (128, 64, 4, 3) with 354, and dK, dV at 128 (64, 128, 8, 2) with 333 instead of
#: 291.
_MEASURED: dict[str, dict[str, dict[int, Row]]] = {
    "hopper": {
        "fwd": {64: (64, 64, 4, 3)},  # 344, 324
        "dkdv": {64: (64, 64, 4, 3)},  # 287, 249; 271 with 32 queries, which some calls use
        "dq": {64: (64, 64, 4, 3), 128: (128, 64, 8, 3)},  # 271, 249 and 308, 291
    },
}

#: Entries of `_MEASURED` that spill registers with Triton 3.9, which uses the table's config instead.
_NOT_SINCE_3_9 = {("hopper", "dq", 128)}

#: For 16-bit heads wider than 256 with `needs_registers` (see `config`), with which the table's config would spill.
_WIDE_WITH_OPTIONS: dict[tuple[str, str], Row] = {
    ("small", "fwd"): (32, 16, 8, 2),
    ("ampere", "fwd"): (32, 16, 8, 2),
    ("ampere", "dq"): (32, 16, 8, 2),
    ("blackwell", "dq"): (32, 16, 8, 2),
    ("hopper", "dk"): (32, 32, 8, 2),  # uses mma.sync: tiles wide enough for wgmma do not fit
    ("hopper", "dv"): (32, 32, 8, 2),
}

#: Their BLOCK_M and BLOCK_N by kernel if there is a mask, a bias or dropout: on GPUs of class "small", and on others.
_WIDE_PAIRS_SMALL: dict[str, tuple[int, int]] = dict.fromkeys(("dk", "dv", "dq"), (16, 16))
_WIDE_PAIRS: dict[str, tuple[int, int]] = dict.fromkeys(("dk", "dv"), (32, 16))

#: For Triton older than 3.7, these replace configs that spill with it. By class of device, kernel, head dimension and
#: `needs_registers` (see `config`).
_BEFORE_3_7: dict[tuple[str, str, int, bool], Row] = {
    ("ampere", "dkdv", 64, True): (32, 64, 8, 2),  # a stage less
    ("hopper", "fwd", 64, False): (128, 64, 8, 3),  # half the keys a tile
    ("hopper", "dkdv", 64, False): (32, 128, 8, 3),  # half the queries a tile: a narrower wgmma. 199 registers
    ("hopper", "dkdv", 64, True): (32, 128, 8, 2),
    ("hopper", "dkdv", 128, False): (32, 128, 8, 2),  # a stage less
    ("hopper", "dkdv", 128, True): (32, 64, 8, 2),
    # mma.sync: what is wide enough for wgmma spills 8 bytes or more.
    ("hopper", "dkdv", 256, False): (32, 32, 8, 2),
    ("hopper", "dk", 512, True): (32, 16, 8, 2),
    ("hopper", "dv", 512, True): (32, 16, 8, 2),
}

#: The same for Triton 3.8, and for 3.9 and newer. For masks, biases and dropout see also `pairs_config.py`.
_OF_3_8: dict[tuple[str, str, int, bool], Row] = {("hopper", "dq", 512, True): (32, 16, 8, 2)}
_SINCE_3_9: dict[tuple[str, str, int, bool], Row] = {
    **_OF_3_8,
    ("hopper", "fwd", 64, False): (128, 64, 8, 3),  # half the keys a tile
    ("hopper", "fwd", 256, False): (64, 64, 8, 2),  # half the queries
    # mma.sync: what is wide enough for wgmma spills.
    ("hopper", "fwd", 512, False): (32, 32, 8, 2),
    ("hopper", "fwd", 512, True): (32, 32, 8, 2),
    ("hopper", "dkdv", 128, False): (32, 128, 8, 2),  # a stage less
    ("hopper", "dk", 512, False): (32, 32, 8, 2),
    ("hopper", "dv", 512, False): (32, 32, 8, 2),
}


def config(
    kernel: str, capability: int, head_dim: int, dtype: torch.dtype, needs_registers: bool, pairs: bool = False
) -> dict[str, Any]:
    """The launch config of "fwd", "decode", "dkdv" ("dk" and "dv" if `apart`), "dq", "preprocess" or "sum_splits".
    `head_dim` is the larger of D and Dv, padded. Capability 0 is the interpreter.

    `needs_registers`: the call has a soft cap or ALiBi, or its heads do not fill their block and are masked. These keep
    more numbers for each score, so there are fewer keys or rows, or more warps. In such forward passes and in float32,
    `maxnreg` is the maximum for these warps: without it, ptxas spills a few registers for an occupancy that it guesses.
    `pairs`: `with_pairs` will change the config.
    """
    if kernel in ("preprocess", "sum_splits"):
        elements = 8192 // dtype.itemsize  # in a tile; twice as many would spill in float32
        return {"BLOCK_M": 32 if capability == 0 else elements // max(64, head_dim), "num_warps": 4}
    if capability == 0:
        row = _INTERPRETED_DECODE if kernel == "decode" else _INTERPRETED
    else:
        single = _SINGLE_CDNA if device_of(capability).name == "cdna" else _SINGLE
        table = _HALF[device_of(capability).name] if dtype.itemsize == 2 else single
        row = table[kernel][max(64, head_dim)]
    wide = capability != 0 and dtype.itemsize == 2 and head_dim > 256
    if needs_registers and wide:
        row = _WIDE_WITH_OPTIONS.get((device_of(capability).name, kernel), row)
    m, n, warps, stages = row
    if needs_registers and kernel == "dkdv" and n > 32:
        n //= 2
    if needs_registers and kernel == "decode" and m > 16:
        m //= 2
    if needs_registers and kernel == "fwd" and not wide:
        warps = 8
        if device_of(capability).name == "cdna":
            m, n = min(m, 64 if head_dim <= 128 else 32), 32
        elif head_dim > 128:
            m = min(m, 64)
        elif n == 128:
            n, stages = 64, 3
        elif head_dim == 128 and device_of(capability).name in ("ampere", "small"):
            m, n = min(m, 64), 32
        elif head_dim == 128 and device_of(capability).name == "blackwell":
            n = 32
    if capability and dtype.itemsize == 2:
        own = _SINCE_3_9 if VERSION >= (3, 9) else _OF_3_8 if VERSION >= (3, 8) else {}
        own = _BEFORE_3_7 if VERSION < (3, 7) else own
        key = (device_of(capability).name, kernel, max(64, head_dim), needs_registers)
        m, n, warps, stages = own.get(key, (m, n, warps, stages))
        if not (needs_registers or pairs or (VERSION >= (3, 9) and key[:3] in _NOT_SINCE_3_9)):
            faster = _MEASURED.get(device_of(capability).name, {}).get(kernel, {})
            m, n, warps, stages = faster.get(max(64, head_dim), (m, n, warps, stages))
    launch = {"BLOCK_M": m, "BLOCK_N": n, "num_warps": warps, "num_stages": stages}
    if kernel == "fwd":  # matmuls are asynchronous on Hopper; the interpreter tests both variants
        if capability == 0:
            launch["AHEAD"] = dtype in (torch.float32, torch.float16)
        else:
            launch["AHEAD"] = dtype.itemsize == 2 and device_of(capability).name == "hopper"
    guessed = ("fwd", "decode", "dq") if device_of(capability).name == "blackwell" else ("fwd", "decode")
    if (
        dtype.itemsize != 2
        or (needs_registers and kernel in guessed)
        or (wide and (needs_registers or kernel == "decode"))
    ):
        launch["maxnreg"] = min(255, 65536 // (32 * warps))
    return launch


def wide_pairs_tile(kernel: str, capability: int, dtype: torch.dtype) -> dict[str, int]:
    """The tile for heads wider than 256 with a mask, a bias or dropout; it replaces that of `config`."""
    if capability == 0 or dtype.itemsize != 2:
        return {}
    table = _WIDE_PAIRS_SMALL if device_of(capability).name == "small" else _WIDE_PAIRS
    return dict(zip(("BLOCK_M", "BLOCK_N"), table.get(kernel, ()), strict=False))


def apart(head_dim: int, dtype: torch.dtype) -> bool:
    """Whether "dk" and "dv" are launched instead of "dkdv", because two accumulators would leave too few registers for
    large tiles. The scores are then computed twice: five matmuls instead of four."""
    return head_dim > 256 and dtype.itemsize == 2


def shared_needed(kernel: str, block_d: int, block_dv: int, dtype: torch.dtype) -> int:
    """Bytes of shared memory for the tiles of "fwd", "dkdv" or "dq" in float32 and float64, which have no pipeline
    stages. (16-bit tiles fit everywhere.)"""
    m, n, _, _ = _SINGLE[kernel][max(64, block_d, block_dv)]
    columns = max(block_d, block_dv) if kernel == "fwd" else block_d + block_dv
    return (m + n) * columns * dtype.itemsize


#: The candidates of `python -m foundry_kernels tune` besides a 16-bit config of the table: tiles published for such
#: kernels, and the same with one step more or less in warps or stages. `tune` drops those that do not fit the GPU.
_TRIED: dict[str, tuple[Row, ...]] = {
    "fwd": ((128, 128, 8, 3), (128, 64, 8, 3), (128, 64, 4, 3), (128, 64, 8, 2), (64, 64, 4, 3), (128, 32, 8, 3)),
    "dkdv": ((64, 128, 8, 2), (64, 64, 8, 2), (64, 64, 4, 3), (32, 128, 8, 3), (32, 128, 8, 2), (32, 64, 4, 3)),
    "dq": ((128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 4, 3), (128, 32, 8, 3), (64, 128, 8, 2)),
    # BLOCK_M, the number of rows, stays. BLOCK_N must divide the keys of a split, which are at least 128.
    "decode": ((0, 64, 4, 2), (0, 64, 4, 4), (0, 64, 8, 3), (0, 128, 4, 2), (0, 128, 8, 2), (0, 32, 4, 4)),
}


def configs(
    kernel: str, capability: int, head_dim: int, dtype: torch.dtype, needs_registers: bool, pairs: bool = False
) -> list[dict[str, Any]]:
    """Returns `config` and the candidates that `tune` measures. In the interpreter, the only candidate is one other
    tile."""
    own = config(kernel, capability, head_dim, dtype, needs_registers, pairs)
    few = needs_registers or head_dim > 256 or (dtype.itemsize != 2 and capability != 0)
    if kernel in ("preprocess", "sum_splits") or few:
        return [own]
    tried = _TRIED[kernel] if capability != 0 else ((16, 16, 4, 1),)
    found = [own]
    if (before := config(kernel, capability, head_dim, dtype, needs_registers, True)) != own:
        found.append(before)  # the table's config, which the measured one replaced
    if "AHEAD" in own:
        found.append(own | {"AHEAD": not own["AHEAD"]})
    for m, n, warps, stages in tried:
        row = own | {"BLOCK_M": m, "BLOCK_N": n, "num_warps": warps, "num_stages": stages}
        if kernel == "decode":
            row["BLOCK_M"] = own["BLOCK_M"]
        if row not in found:
            found.append(row)
    return found


def combine_configs(block_dv: int, most: int) -> list[dict[str, int]]:
    """Returns launch configs of the kernel that adds up to `most` splits (splits at a time, and warps), the default
    first."""
    own = min(most, 4096 // block_dv)
    found: list[dict[str, int]] = []
    for splits, warps in ((own, 4), (own, 2), (own, 8), (own // 2, 4), (own // 2, 2), (min(most, 2 * own), 8)):
        row = {"BLOCK_SPLITS": splits, "num_warps": warps}
        if row not in found:
            found.append(row)
    return found
