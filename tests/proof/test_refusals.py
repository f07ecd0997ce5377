"""What no operation takes, over the registry: arguments of another kind, dtype, device or shape, and options of another
type or unknown. What single operations refuse is in tests/ops/test_refusals.py, and numbers in test_numbers.py."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import foundry_kernels as fk
from foundry_kernels.core.registry import OpSpec
from foundry_kernels.testing import Case
from foundry_kernels.tools.check import numel

#: What some operations take: a head dimension of its own, any number of taps or columns, a mask that is broadcast, and
#: what is added or multiplied in float64.
TAKEN = {
    *((op, "v", "one more") for op in ("flash_attention", "flash_attention_varlen")),
    *((op, "weight", "one more") for op in ("grouped_mm", "short_conv1d")),
    *(("flash_attention", "attn_mask", what) for what in ("no dimensions", "a dimension more")),
    ("flash_attention_varlen", "alibi_slopes", "a dimension more"),
    ("flash_attention_varlen", "block_table", "one more"),
    ("cross_entropy", "weight", "float64"),
    ("linear_cross_entropy", "class_weight", "float64"),
    *((op, "residual", "float64") for op in ("add_rms_norm", "add_layer_norm")),
}


def of_tensor(x: torch.Tensor, first: bool) -> Iterator[tuple[str, Any]]:
    """What is no tensor like x; of others than the first, also what does not fit to the first."""
    plain = x.detach()
    yield "a list", [1.0]
    yield "a number", 1.5
    yield "another dtype", plain.int() if x.is_floating_point() else plain.double()
    yield "complex", plain.to(torch.complex64)
    yield "no dimensions", plain.new_zeros(())
    if not first:
        yield "another device", plain.to("meta")
        if x.dtype == torch.float32:
            yield "float64", plain.double()
        if x.dim():
            yield "one more", plain.new_zeros((*x.shape[:-1], x.shape[-1] + 1))
            yield "a dimension more", plain.new_zeros((2, *x.shape))


def of_option(parameter: inspect.Parameter) -> Iterator[tuple[str, Any]]:
    kinds = set(str(parameter.annotation).split(" | "))
    if "bool" in kinds:
        yield from (("text", "yes"), ("an int", 1))
    if "float" in kinds:
        yield from (("text", "1"), ("a flag", True), ("NaN", math.nan))
    if "int" in kinds and "Tensor" not in kinds:
        yield "a float", 1.5
    if "str" in kinds:
        yield "another word", "made up"


def changes(op: OpSpec, name: str) -> tuple[Case, Iterator[tuple[str, Any]]]:
    """The smallest case with the argument, or of all for an option; and what the argument is not to be."""
    parameters = inspect.signature(op.public).parameters
    cases = sorted((c for c in op.cases.CASES[op.name] if numel(c)), key=numel)
    own = next((c for c in cases if c.args.get(name) is not None), None)
    if own is None:
        return cases[0], of_option(parameters[name])
    return own, of_tensor(own.make(torch.float32)[name], name == next(iter(parameters)))  # type: ignore[arg-type]


ARGUMENTS = [(op, name) for op in fk.OPS.values() for name in inspect.signature(op.public).parameters]


@pytest.mark.parametrize(("op", "name"), [pytest.param(op, name, id=f"{op.name}-{name}") for op, name in ARGUMENTS])
def test_what_no_operation_takes(op: OpSpec, name: str) -> None:
    """The error begins with the argument's name, or, where two do not fit each other, with either's."""
    case, changed = changes(op, name)
    taken, named_otherwise = set(), []
    for what, value in changed:
        given: dict[str, Any] = case.make(torch.float32) | dict(case.options) | {name: value}
        other = what in ("float64", "one more", "a dimension more", "no dimensions", "another dtype", "complex")
        names = "|".join(inspect.signature(op.public).parameters) if other else name
        try:
            op.public(**given)
            taken.add((op.name, name, what))
        except (TypeError, ValueError, IndexError) as error:
            if not re.match(rf"({names})\b", str(error)):
                named_otherwise.append(f"{what}: {error}")
    assert taken == {each for each in TAKEN if each[:2] == (op.name, name)}
    assert not named_otherwise
