"""What is timed, against what, and what it moves and computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn.functional import linear

from foundry_kernels.core.contract import Sample, sample_rows
from foundry_kernels.ops.kl_div.bench import DIVERGENCES, eager
from foundry_kernels.testing import Arg, Case, normal

#: Shapes to time, by device: tokens, width, the teacher's width, vocabulary, name.
_BENCH_SHAPES = {
    "cpu": (
        (2048, 512, 512, 32768, "small-llama"),
        (512, 512, 512, 32768, "few-tokens"),
        (256, 256, 512, 8192, "tiny"),
    ),
    "cuda": ((8192, 2048, 4096, 32000, "llama-2"),),
}

BENCH_QUICK = ("tiny-forward", "tiny-jsd", "llama-2-forward")

#: The forward pass makes the gradients.
DIRECTIONS = ("forward", "both")


def _bench_case(tokens: int, width: int, teacher_width: int, n_classes: int, name: str, direction: str) -> Case:
    args = {
        "hidden": Arg((tokens, width)),
        "weight": Arg((n_classes, width), values=normal(width**-0.5)),
        "teacher_hidden": Arg((tokens, teacher_width), grad=False),
        "teacher_weight": Arg((n_classes, teacher_width), values=normal(teacher_width**-0.5), grad=False),
    }
    return Case(f"{tokens}x{width}-{n_classes}-{name}-{direction}", args, {"direction": direction})


def bench_cases(op: str, device: str) -> tuple[Case, ...]:
    return tuple(_bench_case(*each, direction) for each in _BENCH_SHAPES[device] for direction in DIVERGENCES)


def parity_case(case: Case) -> Case:
    """Returns the case with the first tokens alone: the reference makes all logits, in float64."""

    def cut(name: str, arg: Arg | None) -> Arg | None:
        return arg and (replace(arg, shape=(min(16, arg.shape[0]), *arg.shape[1:])) if name in _OF_TOKENS else arg)

    return replace(case, args={name: cut(name, arg) for name, arg in case.args.items()})


_OF_TOKENS = ("hidden", "teacher_hidden")


def sample(case: Case) -> Sample | None:
    return None if case.args["hidden"] is None else sample_rows(case, dict.fromkeys(_OF_TOKENS, 0), {})


def bytes_moved(args: Mapping[str, Tensor | None], direction: str) -> int:
    """The least that must be read and written: forward all inputs, backward the student's and their gradients."""
    student, all_inputs = (
        sum(x.numel() * x.element_size() for n, x in args.items() if x is not None and n in names)
        for names in (("hidden", "weight"), tuple(args))
    )
    return {"forward": all_inputs, "backward": 2 * student, "both": all_inputs + 2 * student}[direction]


def flops(args: Mapping[str, Tensor | None], options: Mapping[str, Any], direction: str) -> int:
    """Counts a matmul of each side forward, and two of the student's backward."""
    hidden, weight, teacher = args["hidden"], args["weight"], args["teacher_hidden"]
    assert hidden is not None
    assert weight is not None
    assert teacher is not None
    student, of_teacher = (2 * x.numel() * weight.shape[0] for x in (hidden, teacher))
    forward = student + of_teacher
    return {"forward": forward, "backward": 2 * student, "both": forward + 2 * student}[direction]


def _eager(hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor, direction: str) -> Tensor:
    return eager(linear(hidden, weight), linear(teacher_hidden, teacher_weight), direction)


def peers(op: str, case: Case, device: str) -> Mapping[str, Callable[..., Any]]:
    """What else computes this, by name; "eager" is also what torch.compile is given."""
    return {"eager": partial(_eager, direction=case.options["direction"])}
