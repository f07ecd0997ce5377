"""What is timed, against what, and what it moves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from foundry_kernels.core.contract import Sample, sample_rows
from foundry_kernels.ops.cross_entropy.cases import targets
from foundry_kernels.testing import Arg, Case
from foundry_kernels.testing.schedules import EXP_GRAIN, of_rows

#: Shapes to time, by device: tokens, vocabulary, name.
_BENCH_SHAPES = {
    "cpu": ((128, 2048, "cached"), (2048, 32768, "llama-2"), (512, 128256, "llama-3")),
    "cuda": ((8192, 32000, "llama-2"), (8192, 50257, "gpt-2"), (8192, 128256, "llama-3")),
}

#: Endings of the cases that are timed without --full.
BENCH_QUICK = ("cached", "llama-2", "8192x128256-llama-3")


def _bench_case(tokens: int, n_classes: int, name: str) -> Case:
    target = Arg((tokens,), values=targets(n_classes), dtype=torch.int64, grad=False)
    return Case(f"{tokens}x{n_classes}-{name}", {"logits": Arg((tokens, n_classes)), "target": target})


def bench_cases(op: str, device: str) -> tuple[Case, ...]:
    return tuple(_bench_case(*each) for each in _BENCH_SHAPES[device])


def parity_case(case: Case) -> Case:
    """The first 256 tokens."""

    def cut(arg: Arg | None) -> Arg | None:
        return arg and replace(arg, shape=(min(arg.shape[0], 256), *arg.shape[1:]))

    return replace(case, args={name: cut(arg) for name, arg in case.args.items()})


def sample(case: Case) -> Sample | None:
    """Targets outside of it are ignored ones."""
    return sample_rows(case, {"logits": 0, "target": 0}, {"target": -100})


def scaling_cases(op: str, device: str) -> dict[str, tuple[tuple[int, Case], ...]]:
    """Growing shapes: V is the vocabulary, T the tokens."""
    tokens, top = (256, 17) if device == "cpu" else (8192, 17)
    return {
        "V": tuple((2**i, _bench_case(tokens, 2**i, "vocabulary")) for i in range(9, top + 1, 2)),
        "T": tuple((2**i, _bench_case(2**i, 8192, "tokens")) for i in range(6, 15, 2)),
    }


def load_imbalance(op: str, case: Case, threads: int) -> float:
    """Of rows, as the forward pass divides them."""
    logits = case.args["logits"]
    assert logits is not None
    rows, n_classes = logits.shape
    return of_rows(rows, EXP_GRAIN // n_classes, threads)


def bytes_moved(args: Mapping[str, Tensor | None], direction: str) -> int:
    """The least that must be read and written: forward the logits, backward the logits and their gradient."""
    logits = args["logits"]
    assert logits is not None
    return {"forward": 1, "backward": 2, "both": 3}[direction] * logits.numel() * logits.element_size()


def _eager(logits: Tensor, target: Tensor, weight: Tensor | None = None) -> Tensor:
    return torch.nn.functional.cross_entropy(logits, target, weight)


def peers(op: str, case: Case, device: str) -> dict[str, Callable[..., Any]]:
    """What else computes this, by name; "eager" is also what torch.compile is given."""
    return {"eager": _eager}
