"""What is timed, against what, and what it moves."""

from __future__ import annotations

import torch
from torch import Tensor

from foundry_kernels.core.contract import Peers
from foundry_kernels.ops.gated_rms_norm.cases import gated_case
from foundry_kernels.testing import Case

#: Rows and widths: heads of Qwen3-Next, a width of Mamba-2, one token.
_SHAPES = {
    "cpu": ((16384, 128, "heads"), (2048, 4096, "large"), (32, 128, "decode")),
    "cuda": ((524288, 128, "heads"), (16384, 8192, "large"), (32, 128, "decode")),
}
BENCH_QUICK = ("heads", "decode")


def bench_cases(op: str, device: str) -> tuple[Case, ...]:
    return tuple(gated_case((rows, width), name, round_before_weight=True) for rows, width, name in _SHAPES[device])


def _eager(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    """Computes it as transformers does for Qwen3-Next."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    y = weight * wide.to(x.dtype)
    return (y * torch.nn.functional.silu(gate.float())).to(x.dtype)


def peers(op: str, case: Case, device: str) -> Peers:
    return {"eager": _eager}
