"""What is timed, against what, and what it moves."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from foundry_kernels.core.contract import Peers, Sample, sample_rows
from foundry_kernels.ops.cross_entropy.cases import targets
from foundry_kernels.testing import Arg, Case

#: Shapes to time, by device: tokens, vocabulary, name.
_BENCH_SHAPES = {
    "cpu": ((128, 2048, "cached"), (2048, 32768, "llama-2"), (512, 128256, "llama-3")),
    "cuda": ((8192, 32000, "llama-2"), (8192, 50257, "gpt-2"), (8192, 128256, "llama-3")),
}

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


def _eager(logits: Tensor, target: Tensor, weight: Tensor | None = None) -> Tensor:
    return torch.nn.functional.cross_entropy(logits, target, weight)


def peers(op: str, case: Case, device: str) -> Peers:
    return {"eager": _eager}
