"""What the benchmarks of the losses share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from foundry_kernels.core.contract import Options, Sample, Tensors, Work, sample_rows
from foundry_kernels.ops.cross_entropy.cases import targets
from foundry_kernels.testing import Arg, Case, normal

#: The forward pass makes the gradients, or the backward pass makes the logits again, which peers keep.
DIRECTIONS = ("forward", "both")

#: Arguments with a row for each token.
_OF_TOKENS = ("target", "hidden", "teacher_hidden", "teacher_ids", "teacher_log_probs")


def bench_case(tokens: int, width: int, n_classes: int, name: str, **options: Any) -> Case:
    args = {
        "hidden": Arg((tokens, width)),
        "weight": Arg((n_classes, width), values=normal(width**-0.5)),
        "target": Arg((tokens,), values=targets(n_classes), dtype=torch.int64, grad=False),
    }
    return Case(f"{tokens}x{width}-{n_classes}-{name}", args, options)


def parity_case(case: Case) -> Case:
    """Returns the case with the first tokens alone: the reference makes all logits, in float64."""

    def cut(name: str, arg: Arg | None) -> Arg | None:
        return arg and (replace(arg, shape=(min(16, arg.shape[0]), *arg.shape[1:])) if name in _OF_TOKENS else arg)

    return replace(case, args={name: cut(name, arg) for name, arg in case.args.items()})


def sample(case: Case) -> Sample | None:
    """Targets outside of it are ignored ones."""
    dims = {name: 0 for name in _OF_TOKENS if case.args.get(name) is not None}
    return sample_rows(case, dims, {"target": -100} if "target" in dims else {})


def bytes_moved(args: Tensors) -> Work:
    """The least that must be read and written: forward all inputs but the targets, backward the student's and their
    gradients."""
    sizes = {n: x.numel() * x.element_size() for n, x in args.items() if x is not None and n != "target"}
    return sum(sizes.values()), 2 * (sizes["hidden"] + sizes["weight"])


def flops(args: Tensors, options: Options) -> Work:
    """Counts a matmul of each side forward, and two of the student's backward."""
    hidden, weight, teacher = args["hidden"], args["weight"], args.get("teacher_hidden")
    student, of_teacher = (0 if x is None else 2 * x.numel() * weight.shape[0] for x in (hidden, teacher))
    return student + of_teacher, 2 * student
