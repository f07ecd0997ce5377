"""What is timed, against what, and what it moves."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from foundry_kernels.core.contract import Peers, Sample, sample_rows
from foundry_kernels.ops.cross_entropy.bench import parity_case
from foundry_kernels.ops.cross_entropy.cases import targets
from foundry_kernels.testing import Arg, Case

__all__ = ["BENCH_QUICK", "bench_cases", "parity_case", "peers", "picked_of", "sample"]

#: Shapes to time, by device: tokens, vocabulary, name.
_BENCH_SHAPES = {
    "cpu": ((128, 2048, "cached"), (2048, 32768, "llama-2"), (512, 128256, "llama-3")),
    "cuda": ((8192, 32000, "llama-2"), (8192, 128256, "llama-3")),
}

BENCH_QUICK = ("cached", "llama-2", "llama-2-entropy")


def _bench_case(tokens: int, n_classes: int, name: str, **options: Any) -> Case:
    target = Arg((tokens,), values=targets(n_classes), dtype=torch.int64, grad=False)
    return Case(f"{tokens}x{n_classes}-{name}", {"logits": Arg((tokens, n_classes)), "target": target}, options)


def bench_cases(op: str, device: str) -> tuple[Case, ...]:
    return tuple(
        _bench_case(tokens, n_classes, name + "-entropy" * entropy, return_entropy=entropy)
        for tokens, n_classes, name in _BENCH_SHAPES[device]
        for entropy in (False, True)
    )


def sample(case: Case) -> Sample | None:
    return sample_rows(case, {"target": 0, "logits": 0}, {"target": -100})


def picked_of(log_p: Tensor, target: Tensor, return_entropy: bool) -> Any:
    """The log-probabilities of the targets, 0 where they are ignored, and the entropies."""
    ignored = target < 0
    picked = log_p.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1).float().masked_fill(ignored, 0.0)
    if not return_entropy:
        return picked
    return picked, -(log_p.exp() * log_p).sum(-1).float().masked_fill(ignored, 0.0)


def _eager(logits: Tensor, target: Tensor, return_entropy: bool) -> Any:
    return picked_of(torch.log_softmax(logits, -1), target, return_entropy)


def peers(op: str, case: Case, device: str) -> Peers:
    return {"eager": partial(_eager, return_entropy=case.options["return_entropy"])}
