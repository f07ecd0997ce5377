"""What is timed, against what, and what it moves and computes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from foundry_kernels.core.contract import Options, Peers, Tensors, Work
from foundry_kernels.ops.decode_linear.cases import WEIGHTS, make_case
from foundry_kernels.testing import Case

#: Shapes to time: rows, K, N of each weight, name. The projections of a token in Llama 3.2 1B.
_BENCH_SHAPES = (
    (1, 2048, (2048, 512, 512), "qkv-decode"),
    (1, 2048, (8192, 8192), "gate-and-up-decode"),
    (4, 2048, (2048, 512, 512), "qkv-decode"),
)

BENCH_QUICK = ("1x2048-2048+512+512-qkv-decode",)

#: There is no gradient.
DIRECTIONS = ("forward",)


def bench_cases(op: str, device: str) -> tuple[Case, ...]:
    return tuple(make_case((rows,), k, n, name) for rows, k, n, name in _BENCH_SHAPES) if device == "cpu" else ()


def scaling_cases(op: str, device: str) -> dict[str, tuple[tuple[int, Case], ...]]:
    """Growing shapes: N is the rows of the weight, B the rows of x."""
    if device != "cpu":
        return {}
    return {
        "N": tuple((2**i, make_case((1,), 2048, (2**i,), "rows-decode")) for i in range(9, 16)),
        "B": tuple((2**i, make_case((2**i,), 2048, (4096,), "batch-decode")) for i in range(4)),
    }


def parity_case(case: Case) -> Case:
    """`case`: its rows are few."""
    return case


def bytes_moved(args: Tensors) -> Work:
    """The least that must be read and written: the weights, x and y."""
    x, weights = args["x"], [w for n in WEIGHTS if (w := args[n]) is not None]
    rows = x.numel() // x.shape[-1]
    return (x.numel() + sum(w.numel() + rows * w.shape[0] for w in weights)) * x.element_size(), 0


def flops(args: Tensors, options: Options) -> Work:
    x = args["x"]
    return 2 * x.numel() * sum(w.shape[0] for n in WEIGHTS if (w := args[n]) is not None), 0


def _eager(**args: Any) -> Tensor:
    """A call of each layer."""
    x = args["x"]
    return torch.cat([linear(x, w) for n in WEIGHTS if (w := args.get(n)) is not None], -1)


def peers(op: str, case: Case, device: str) -> Peers:
    return {"eager": _eager}
