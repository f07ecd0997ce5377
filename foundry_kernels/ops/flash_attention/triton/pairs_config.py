"""Changes of `config` for masks, biases and dropout, which keep more numbers for each score."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from foundry_kernels._triton import VERSION
from foundry_kernels._triton.devices import device_of

Launch = dict[str, Any]


class PairOptions(NamedTuple):
    """Which options decide about single pairs of a query and a key."""

    dense: bool
    tiles: bool
    dropout: bool


def with_pairs(
    launch: Launch, kernel: str, capability: int, head_dim: int, dtype: torch.dtype, options: PairOptions, needs: bool
) -> Launch:
    """Returns the config for a call with `options`; `launch` is the config without them. `needs` is `needs_registers`
    for the call's other options. The changes avoid spills that the compiler's report showed, each for a kernel and
    class of device. `maxnreg` is the maximum, see `config`."""
    if capability == 0 or not any(options) or kernel in ("preprocess", "sum_splits"):
        return launch
    name = device_of(capability).name
    m, n, stages = launch["BLOCK_M"], launch["BLOCK_N"], launch["num_stages"]
    launch = launch | {"maxnreg": min(255, 65536 // (32 * launch["num_warps"]))}
    if dtype.itemsize == 2 and name == "cdna":
        return launch | _cdna(kernel, head_dim, m, n, needs, sum(options) > 1)
    if dtype.itemsize == 2:
        synchronous = name in ("ampere", "small")
        dense_would_spill = head_dim == 128 and name == "hopper" and VERSION >= (3, 9)
        if kernel == "fwd" and n == 128:
            n, stages = 64, 3
        elif kernel == "fwd" and n == 64 and head_dim == 256:  # this is the config for Triton 3.9
            n = 32
        elif kernel == "dq" and ((synchronous and options.tiles) or (options.dense and dense_would_spill)):
            n = min(n, 32)
        elif kernel == "dkdv" and name == "small" and options.dense:
            n = min(n, 32 if head_dim <= 64 else 64)
        if (needs or sum(options) > 1) and head_dim <= 256:
            m, n = _crowded(kernel, name, max(64, head_dim), m, n, needs)
            if "AHEAD" in launch:
                launch["AHEAD"] = False
        if kernel == "dq" and name == "small" and 64 < head_dim <= 256:
            m = min(m, 64 if head_dim <= 128 else 32)
    return launch | {"BLOCK_M": m, "BLOCK_N": n, "num_stages": stages}


def _crowded(kernel: str, name: str, head_dim: int, m: int, n: int, needs: bool) -> tuple[int, int]:
    """Queries and keys of a tile for calls with several options."""
    if kernel == "fwd":
        return min(m, 64 if head_dim > 128 else m), min(n, 32 if needs or name != "hopper" else n)
    if head_dim == 256 and name == "hopper" and not needs and VERSION >= (3, 8):  # for which the tiles below spill
        if kernel == "dkdv":
            return m, min(n, 32)
        if kernel == "dq" and VERSION >= (3, 9):
            return m, 16
    if kernel == "dq":
        most = m if not needs else 64 if head_dim <= 128 or name in ("ampere", "small") else 32
        return min(m, most), min(n, 32)
    if kernel == "dkdv" and needs:
        return min(m, 16 if head_dim > 128 else 32), min(n, 32)
    return m, n


def _cdna(kernel: str, head_dim: int, m: int, n: int, needs: bool, several: bool) -> Launch:
    """The tile on AMD's GPUs, with the number of warps that leaves the most registers."""
    if head_dim > 256:
        return {}
    if kernel == "fwd" and head_dim <= 128 and not needs:
        return {"BLOCK_N": min(n, 32), "num_stages": 1}
    if kernel == "fwd":
        return {"BLOCK_M": min(m, 64), "BLOCK_N": 64 if head_dim <= 128 else 32, "num_warps": 4, "num_stages": 1}
    if kernel == "dq" and (needs or several):
        return {"BLOCK_M": min(m, 16), "BLOCK_N": min(n, 32)}
    if kernel == "dkdv" and needs and head_dim > 128:
        return {"BLOCK_M": min(m, 16), "BLOCK_N": min(n, 32)}
    return {}
