"""What is timed, against what, and what it moves."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from foundry_kernels.core.contract import Peers, Sample, sample_rows
from foundry_kernels.ops.cross_entropy.bench import parity_case
from foundry_kernels.testing import Arg, Case

__all__ = ["BENCH_QUICK", "bench_cases", "eager", "parity_case", "peers", "sample"]

#: Shapes to time, by device: tokens, vocabulary, name.
_BENCH_SHAPES = {
    "cpu": ((128, 2048, "cached"), (2048, 32768, "llama-2")),
    "cuda": ((8192, 32000, "llama-2"), (8192, 128256, "llama-3")),
}

BENCH_QUICK = ("cached-forward", "llama-2-forward", "llama-2-jsd")

DIVERGENCES = ("forward", "reverse", "jsd")


def _bench_case(tokens: int, n_classes: int, name: str, direction: str) -> Case:
    shape = (tokens, n_classes)
    args = {"logits": Arg(shape), "teacher_logits": Arg(shape, grad=False)}
    return Case(f"{tokens}x{n_classes}-{name}-{direction}", args, {"direction": direction})


def bench_cases(op: str, device: str) -> tuple[Case, ...]:
    return tuple(
        _bench_case(tokens, n_classes, name, direction)
        for tokens, n_classes, name in _BENCH_SHAPES[device]
        for direction in DIVERGENCES
    )


def sample(case: Case) -> Sample | None:
    return sample_rows(case, {"logits": 0, "teacher_logits": 0}, {})


def eager(logits: Tensor, teacher_logits: Tensor, direction: str) -> Tensor:
    """TRL's `GKDTrainer.generalized_jsd_loss`, with logits as they are."""
    log_q, log_p = (torch.log_softmax(x, -1) for x in (logits, teacher_logits))
    if direction == "jsd":
        half = torch.tensor(0.5, dtype=log_q.dtype, device=log_q.device)
        log_m = torch.logsumexp(torch.stack([log_q + torch.log1p(-half), log_p + torch.log(half)]), 0)
        each = half * _kl(log_m, log_p) + (1 - half) * _kl(log_m, log_q)
    else:
        each = _kl(log_q, log_p) if direction == "forward" else _kl(log_p, log_q)
    return each.sum() / logits.shape[0]


def _kl(log_b: Tensor, log_a: Tensor) -> Tensor:
    return F.kl_div(log_b, log_a, reduction="none", log_target=True)


def peers(op: str, case: Case, device: str) -> Peers:
    return {"eager": partial(eager, direction=case.options["direction"])}
