"""What is timed, against what, and what it moves."""

from __future__ import annotations

import torch
from torch import Tensor

from foundry_kernels.core.contract import Peers, Sample, sample_rows
from foundry_kernels.ops.combine_experts.cases import slots
from foundry_kernels.testing import Arg, Case

#: Shapes to time, by device: tokens, experts of each, width, name.
_BENCH_SHAPES = {
    "cpu": (
        (256, 2, 512, "cached"),
        (4096, 2, 2048, "large"),
        (2048, 8, 2048, "qwen3-30b-a3b"),
        (1, 8, 2048, "decode"),
    ),
    "cuda": (
        (16384, 2, 4096, "mixtral-8x7b"),
        (16384, 8, 2048, "qwen3-30b-a3b"),
        (16384, 4, 2880, "gpt-oss-20b"),
        (64, 8, 2048, "decode"),
    ),
}

BENCH_QUICK = ("cached", "large", "mixtral-8x7b", "16384 k=8 D=2048-qwen3-30b-a3b", "decode")


def _bench(tokens: int, k: int, width: int, name: str) -> Case:
    args = {
        "x": Arg((tokens * k, width)),
        "weights": Arg((tokens, k), dtype=torch.float32),
        "slots": slots(tokens, k, tokens * k),
    }
    return Case(f"T={tokens} k={k} D={width}-{name}", args)


def bench_cases(op: str, device: str) -> tuple[Case, ...]:
    return tuple(_bench(*shape) for shape in _BENCH_SHAPES[device])


def scaling_cases(op: str, device: str) -> dict[str, tuple[tuple[int, Case], ...]]:
    """Growing shapes: T is the tokens, N the width."""
    tokens = range(5, 13) if device == "cpu" else range(7, 16, 2)
    return {
        "T": tuple((2**i, _bench(2**i, 4, 2048, "tokens")) for i in tokens),
        "N": tuple((2**i, _bench(512, 4, 2**i, "width")) for i in range(7, 14, 2)),
    }


def parity_case(case: Case) -> Case:
    """`case`: sums of few terms need no smaller one."""
    return case


def sample(case: Case) -> Sample | None:
    """Tokens; x has a row for each expert of one, and is taken whole."""
    return sample_rows(case, {"weights": 0, "slots": 0})


def _eager(x: Tensor, weights: Tensor, slots: Tensor) -> Tensor:
    """Combines the outputs of experts as models in Hugging Face's transformers do, but without their loop over
    experts."""
    n_tokens, k = slots.shape
    tokens = torch.arange(n_tokens, device=x.device).repeat_interleave(k)
    rows = x[slots.flatten()] * weights.flatten().unsqueeze(-1)
    return x.new_zeros(n_tokens, x.shape[1]).index_add_(0, tokens, rows.to(x.dtype))


def _gather(x: Tensor, weights: Tensor, slots: Tensor) -> Tensor:
    return (x[slots] * weights.unsqueeze(-1)).sum(1).to(x.dtype)


def peers(op: str, case: Case, device: str) -> Peers:
    return {"eager": _eager, "gather and sum": _gather}
