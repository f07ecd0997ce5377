"""Tiles, warps and pipeline stages of each kernel: a table keyed on device class, head dimension, dtype, causal mask."""

from __future__ import annotations

from typing import Any

import torch

INTERPRETED = {"BLOCK_M": 32, "BLOCK_N": 32, "num_warps": 4, "num_stages": 1}


def config(kernel: str, capability: int, width: int, dtype: torch.dtype, causal: bool) -> dict[str, Any]:
    if capability == 0:
        return dict(INTERPRETED)
    return {"BLOCK_M": 64, "BLOCK_N": 32, "num_warps": 4, "num_stages": 1}
