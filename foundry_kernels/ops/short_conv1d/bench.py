"""What is timed, against what, and what it moves."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from foundry_kernels.core.contract import Peers
from foundry_kernels.ops.short_conv1d.cases import make_case
from foundry_kernels.testing import Case

#: Shapes to time, by device: rows, tokens, channels, name. Qwen3-Next-80B-A3B's convolution has 8192 channels.
_BENCH_SHAPES = {
    "cpu": ((1, 256, 512, "cached"), (2, 2048, 2048, "large"), (1, 512, 8192, "qwen3-next")),
    "cuda": ((8, 2048, 2048, "large"), (4, 4096, 8192, "qwen3-next")),
}

BENCH_QUICK = ("cached", "large", "4x4096x8192-W=4-qwen3-next")


def bench_cases(op: str, device: str) -> tuple[Case, ...]:
    """The last one adds its input, as Canon layers do."""
    shapes = _BENCH_SHAPES[device]
    added = make_case(*shapes[-1][:3], "residual", bias=None, residual=True, activation=None)
    return (*(make_case(b, t, c, name, bias=None) for b, t, c, name in shapes), added)


def scaling_cases(op: str, device: str) -> dict[str, tuple[tuple[int, Case], ...]]:
    """Growing shapes: T is the tokens, N the channels."""
    tokens = range(6, 13, 2) if device == "cpu" else range(8, 17, 2)
    return {
        "T": tuple((2**i, make_case(1, 2**i, 2048, "tokens", bias=None)) for i in tokens),
        "N": tuple((2**i, make_case(1, 1024, 2**i, "channels", bias=None)) for i in range(7, 14, 2)),
    }


def parity_case(case: Case) -> Case:
    """`case`: sums of a few taps need no smaller one."""
    return case


def workspace_bytes(case: Case) -> int:
    """The reference keeps shifted copies of x, in float64."""
    x = case.args["x"]
    return 0 if x is None else 3 * 8 * math.prod(x.shape)


def peers(op: str, case: Case, device: str) -> Peers:
    def eager(
        x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None, **absent: None
    ) -> Tensor:
        """Computes it as Hugging Face's transformers do without the causal_conv1d package."""
        filters = weight.unsqueeze(1)
        y = torch.nn.functional.conv1d(x.transpose(1, 2), filters, bias, padding=weight.shape[1] - 1, groups=x.shape[2])
        y = y[..., : x.shape[1]].transpose(1, 2)
        y = y if case.options["activation"] is None else torch.nn.functional.silu(y)
        return y if residual is None else y + residual

    return {"eager": eager}
