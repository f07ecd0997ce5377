"""What is timed, against what, and what it moves and computes."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from foundry_kernels.core.contract import Peers
from foundry_kernels.ops._linear_loss.bench import DIRECTIONS, bench_case, bytes_moved, flops, parity_case, sample
from foundry_kernels.ops.log_probs.bench import picked_of
from foundry_kernels.testing import Case

__all__ = ["BENCH_QUICK", "DIRECTIONS", "bench_cases", "bytes_moved", "flops", "parity_case", "peers", "sample"]

#: Shapes to time, by device: tokens, width, vocabulary, name.
_BENCH_SHAPES = {
    "cpu": ((2048, 512, 32768, "small-llama"), (512, 512, 32768, "few-tokens"), (256, 256, 8192, "tiny")),
    "cuda": ((8192, 4096, 128256, "llama-3-8b"), (8192, 2048, 128256, "llama-3-1b")),
}

BENCH_QUICK = ("tiny", "few-tokens", "few-tokens-entropy", "llama-3-8b")


def bench_cases(op: str, device: str) -> tuple[Case, ...]:
    return tuple(
        bench_case(tokens, width, n_classes, name + "-entropy" * entropy, return_entropy=entropy)
        for tokens, width, n_classes, name in _BENCH_SHAPES[device]
        for entropy in (False, True)
    )


def _eager(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, *, return_entropy: bool) -> Any:
    return picked_of(torch.log_softmax(linear(hidden, weight, bias).float(), -1), target, return_entropy)


def peers(op: str, case: Case, device: str) -> Peers:
    return {"eager": partial(_eager, return_entropy=case.options["return_entropy"])}
