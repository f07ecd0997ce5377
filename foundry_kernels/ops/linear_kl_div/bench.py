"""What is timed, against what, and what it moves and computes."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear

from foundry_kernels.core.contract import Peers
from foundry_kernels.ops._linear_loss.bench import DIRECTIONS, bytes_moved, flops, parity_case, sample
from foundry_kernels.ops.kl_div.bench import DIVERGENCES, eager
from foundry_kernels.ops.linear_kl_div.cases import listed
from foundry_kernels.testing import Arg, Case, normal

__all__ = ["BENCH_QUICK", "DIRECTIONS", "bench_cases", "bytes_moved", "flops", "parity_case", "peers", "sample"]

#: Shapes to time, by device: tokens, width, the teacher's width, vocabulary, name.
_BENCH_SHAPES = {
    "cpu": (
        (2048, 512, 512, 32768, "small-llama"),
        (512, 512, 512, 32768, "few-tokens"),
        (256, 256, 512, 8192, "tiny"),
    ),
    "cuda": ((8192, 2048, 4096, 32000, "llama-2"),),
}

BENCH_QUICK = ("tiny-forward", "tiny-jsd", "tiny-listed", "llama-2-forward")

#: How many classes a teacher lists.
_LISTED = 20


def _bench_case(tokens: int, width: int, teacher_width: int, n_classes: int, name: str, direction: str) -> Case:
    args = {
        "hidden": Arg((tokens, width)),
        "weight": Arg((n_classes, width), values=normal(width**-0.5)),
        "teacher_hidden": Arg((tokens, teacher_width), grad=False),
        "teacher_weight": Arg((n_classes, teacher_width), values=normal(teacher_width**-0.5), grad=False),
    }
    options = {"direction": direction}
    if direction == "listed":
        del args["teacher_hidden"], args["teacher_weight"]
        args, options = args | listed((tokens,), n_classes, _LISTED), {"direction": "forward"}
    return Case(f"{tokens}x{width}-{n_classes}-{name}-{direction}", args, options)


def bench_cases(op: str, device: str) -> tuple[Case, ...]:
    kinds = (*DIVERGENCES, "listed")
    return tuple(_bench_case(*each, kind) for each in _BENCH_SHAPES[device] for kind in kinds)


def _eager(hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor, direction: str) -> Tensor:
    return eager(linear(hidden, weight), linear(teacher_hidden, teacher_weight), direction)


def _eager_listed(hidden: Tensor, weight: Tensor, teacher_ids: Tensor, teacher_log_probs: Tensor) -> Tensor:
    """The classes of TRL's server distillation, with their tail."""
    log_q = torch.log_softmax(linear(hidden, weight), -1).gather(-1, teacher_ids)
    log_q, log_p = (
        torch.cat([x, torch.log1p(-x.exp().sum(-1, keepdim=True).clamp(max=1.0 - 1e-7))], -1)
        for x in (log_q.float(), teacher_log_probs)
    )
    return torch.nn.functional.kl_div(log_q, log_p, reduction="batchmean", log_target=True)


def peers(op: str, case: Case, device: str) -> Peers:
    if "teacher_ids" in case.args:
        return {"eager": _eager_listed}
    return {"eager": partial(_eager, direction=case.options["direction"])}
