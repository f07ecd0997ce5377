"""What is timed, against what, and what it moves and computes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import cross_entropy, linear

from foundry_kernels.core.contract import Peers
from foundry_kernels.ops._linear_loss.bench import DIRECTIONS, bench_case, bytes_moved, flops, parity_case, sample
from foundry_kernels.testing import Case

__all__ = [
    "BENCH_QUICK", "DIRECTIONS", "bench_cases", "bytes_moved", "flops", "parity_case", "peers", "sample",
    "scaling_cases",
]  # fmt: skip

#: Shapes to time, by device: tokens, width, vocabulary, name.
_BENCH_SHAPES = {
    "cpu": ((2048, 512, 32768, "small-llama"), (512, 512, 32768, "few-tokens"), (256, 256, 8192, "tiny")),
    "cuda": ((8192, 4096, 128256, "llama-3-8b"), (8192, 2048, 128256, "llama-3-1b"), (8192, 768, 50257, "gpt-2")),
}

BENCH_QUICK = ("tiny", "few-tokens", "llama-3-8b")


def bench_cases(op: str, device: str) -> tuple[Case, ...]:
    return tuple(bench_case(*each) for each in _BENCH_SHAPES[device])


def scaling_cases(op: str, device: str) -> dict[str, tuple[tuple[int, Case], ...]]:
    """Growing shapes: T is the tokens, N the width, V the vocabulary."""
    t, n, v, more = (256, 256, 8192, 0) if device == "cpu" else (2048, 2048, 32768, 2)
    return {
        "T": tuple((2**i, bench_case(2**i, n, v, "tokens")) for i in range(7 + more, 13 + more)),
        "N": tuple((2**i, bench_case(t, 2**i, v, "width")) for i in range(6 + more, 12 + more)),
        "V": tuple((2**i, bench_case(t, n, 2**i, "vocabulary")) for i in range(10 + more, 16 + more)),
    }


def _eager(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
) -> Tensor:
    return cross_entropy(linear(hidden, weight, bias), target, class_weight)


def peers(op: str, case: Case, device: str) -> Peers:
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
