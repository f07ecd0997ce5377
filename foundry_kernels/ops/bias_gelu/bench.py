"""What is timed, against what, and what it moves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foundry_kernels.core.contract import Peers
from foundry_kernels.testing import Arg, Case

#: Shapes to time, by device: rows, width of the feed-forward layer, name.
_BENCH_SHAPES = {
    "cpu": ((512, 2048, "cached"), (4096, 4096, "large"), (1024, 3072, "gpt2"), (1, 3072, "decode")),
    "cuda": ((16384, 3072, "gpt2"), (16384, 6400, "gpt2-xl"), (16384, 18176, "falcon-7b"), (1, 3072, "decode")),
}

#: The one with dropout inside, by device.
_DROPOUT_SHAPE = {"cpu": (512, 2048, "dropout-cached"), "cuda": (16384, 4096, "dropout-large")}

BENCH_QUICK = ("cached", "large", "16384x6400-gpt2-xl", "decode")


def _bench(op: str, rows: int, width: int, name: str, **dropout: Any) -> Case:
    options = {"approximate": "tanh"} if op == "bias_gelu" else {}
    return Case(f"{rows}x{width}-{name}", {"x": Arg((rows, width)), "bias": Arg((width,))}, options | dropout)


def bench_cases(op: str, device: str) -> tuple[Case, ...]:
    shapes = _BENCH_SHAPES[device]
    plain = (_bench(op, *shape) for shape in (shapes if op == "bias_gelu" else shapes[:2]))
    return (*plain, _bench(op, *_DROPOUT_SHAPE[device], dropout_p=0.1, dropout_seed=0))


def scaling_cases(op: str, device: str) -> dict[str, tuple[tuple[int, Case], ...]]:
    """Growing shapes: N is the width, T the rows."""
    rows, top = (512, 13) if device == "cpu" else (16384, 15)
    return {
        "N": tuple((2**i, _bench(op, rows, 2**i, "width")) for i in range(7, top + 1, 2)),
        "T": tuple((2**i, _bench(op, 2**i, 2048, "rows")) for i in range(6, 15, 2)),
    }


# What a linear layer and its activation do after the product:


def _eager(x: Tensor, bias: Tensor) -> Tensor:
    return torch.nn.functional.gelu(x + bias, approximate="tanh")


def _eager_silu(x: Tensor, bias: Tensor) -> Tensor:
    return torch.nn.functional.silu(x + bias)


def _eager_relu(x: Tensor, bias: Tensor) -> Tensor:
    return torch.relu(x + bias)


_EAGER = {"bias_gelu": _eager, "bias_silu": _eager_silu, "bias_relu": _eager_relu}


def peers(op: str, case: Case, device: str) -> Peers:
    p, eager = case.options.get("dropout_p", 0.0), _EAGER[op]
    return {"eager": (lambda x, bias: torch.nn.functional.dropout(eager(x, bias), p)) if p else eager}
