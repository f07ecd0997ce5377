"""What is timed, against what, and what it moves and computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import cross_entropy, linear

from foundry_kernels.core.contract import Sample, sample_rows
from foundry_kernels.ops.cross_entropy.cases import targets
from foundry_kernels.testing import Arg, Case, normal

#: Shapes to time, by device: tokens, width, vocabulary, name.
_BENCH_SHAPES = {
    "cpu": ((2048, 512, 32768, "small-llama"), (512, 512, 32768, "few-tokens"), (256, 256, 8192, "tiny")),
    "cuda": ((8192, 4096, 128256, "llama-3-8b"), (8192, 2048, 128256, "llama-3-1b"), (8192, 768, 50257, "gpt-2")),
}

BENCH_QUICK = ("tiny", "few-tokens", "llama-3-8b")

#: The forward pass makes the gradients.
DIRECTIONS = ("forward", "both")


def _bench_case(tokens: int, width: int, n_classes: int, name: str) -> Case:
    args = {
        "hidden": Arg((tokens, width)),
        "weight": Arg((n_classes, width), values=normal(width**-0.5)),
        "target": Arg((tokens,), values=targets(n_classes), dtype=torch.int64, grad=False),
    }
    return Case(f"{tokens}x{width}-{n_classes}-{name}", args)


def bench_cases(op: str, device: str) -> tuple[Case, ...]:
    return tuple(_bench_case(*each) for each in _BENCH_SHAPES[device])


def scaling_cases(op: str, device: str) -> dict[str, tuple[tuple[int, Case], ...]]:
    """Growing shapes: T is the tokens, N the width, V the vocabulary."""
    t, n, v, more = (256, 256, 8192, 0) if device == "cpu" else (2048, 2048, 32768, 2)
    return {
        "T": tuple((2**i, _bench_case(2**i, n, v, "tokens")) for i in range(7 + more, 13 + more)),
        "N": tuple((2**i, _bench_case(t, 2**i, v, "width")) for i in range(6 + more, 12 + more)),
        "V": tuple((2**i, _bench_case(t, n, 2**i, "vocabulary")) for i in range(10 + more, 16 + more)),
    }


def parity_case(case: Case) -> Case:
    """Returns the case with the first tokens alone: the reference makes all logits, in float64."""
    hidden, target = case.args["hidden"], case.args["target"]
    assert hidden is not None
    assert target is not None
    n = min(16, hidden.shape[0])
    shorter = {"hidden": replace(hidden, shape=(n, hidden.shape[1])), "target": replace(target, shape=(n,))}
    return replace(case, args=dict(case.args) | shorter)


def sample(case: Case) -> Sample | None:
    """Targets outside of it are ignored ones."""
    return sample_rows(case, {"hidden": 0, "target": 0}, {"target": -100})


def bytes_moved(args: Mapping[str, Tensor | None], direction: str) -> int:
    """The least that must be read and written: forward hidden and weight, backward these and their gradients."""
    hidden, weight = args["hidden"], args["weight"]
    assert hidden is not None
    assert weight is not None
    once = (hidden.numel() + weight.numel()) * hidden.element_size()
    return {"forward": 1, "backward": 2, "both": 3}[direction] * once


def flops(args: Mapping[str, Tensor | None], options: Mapping[str, Any], direction: str) -> int:
    """Counts one matmul forward and two backward."""
    hidden, weight = args["hidden"], args["weight"]
    assert hidden is not None
    assert weight is not None
    return {"forward": 2, "backward": 4, "both": 6}[direction] * hidden.numel() * weight.shape[0]


def _eager(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
) -> Tensor:
    return cross_entropy(linear(hidden, weight, bias), target, class_weight)


def peers(op: str, case: Case, device: str) -> dict[str, Callable[..., Any] | str]:
    """What else computes this, by name; "eager" is also what torch.compile is given."""
    if not hasattr(functional, "linear_cross_entropy"):
        return {"eager": _eager, "torch chunked": "needs torch 2.13"}
    return {"eager": _eager, "torch chunked": _torch_chunked}


def _torch_chunked(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
) -> Tensor:
    """PyTorch's own, with its default options for chunks."""
    options = torch.nn.LinearCrossEntropyOptions()
    return functional.linear_cross_entropy(
        hidden, weight, target, linear_bias=bias, weight=class_weight, options=options
    )
