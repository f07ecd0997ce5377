"""Marks the tests that `make test` leaves to `make test-slow`: additional points of long sweeps.

`make test` keeps every operation, backend, dtype and kind of test. From the parity table, it runs the selected cases
(`telling`). Other long tests are marked with `@pytest.mark.slow`, and those that need few values of a parameter with
`rest_slow`. Slow tests of many cases at once leave out emulated repetitions (`representative`). Each commit's CI runs a
third of the slow tests, so three consecutive commits run all of them; `make test-all` runs all at once.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

from foundry_kernels.testing import Case

#: `make test` compiles kernels ahead of time only for these; each architecture takes minutes.
ARCHITECTURES = (90, "90a")
#: `make test` compiles only these CUDA sources with nvcc, an ordinary one and one for Hopper; others take up to minutes
#: each.
NVCC_SOURCES = ("rope", "attention_forward")
#: Larger cases (elements of all arguments) only repeat with more tiles or chunks what smaller ones test.
MOST_ELEMENTS = 100_000
#: The same limit in the interpreter.
MOST_INTERPRETED = 20_000
#: In the interpreter, pairs of choices are only covered by cases of at most this many elements, and not for twins.
MOST_PAIRED = 2_000
#: In emulation (Triton's interpreter, CUDA on the CPU), every element takes a thousand times as long.
FEW_ELEMENTS = 2_000
#: Tests of several cases at once, or of an instruction set, use these dtypes; in emulation only the first one.
SWEPT_DTYPES = (torch.float32, torch.bfloat16)


def reason(parameters: dict[str, Any], instruction_sets: list[str], every_case: bool = False) -> str | None:
    """The reason why a test with these parameters is slow, or None. every_case: no case of the CPU kernels is slow."""
    from table import Row, is_twin

    from foundry_kernels.tools.check import numel

    if (arch := parameters.get("arch")) is not None and arch not in ARCHITECTURES:
        return f"architecture {arch}"
    source = parameters.get("source")
    if isinstance(source, Path) and "csrc" in source.parts and source.stem not in NVCC_SOURCES:
        return f"{source.name} by nvcc"
    row, case, dtype = (parameters.get(name) for name in ("row", "case", "dtype"))
    interpreted = isinstance(row, Row) and _is_interpreted(row)
    emulated = isinstance(row, Row) and _is_emulated(row)
    if emulated and parameters.get("part") in ("small", "others"):
        return "all but a few cases, emulated"
    if isinstance(row, Row) and case is not None and numel(case) > MOST_ELEMENTS:
        return f"more than {MOST_ELEMENTS} elements"
    if interpreted and case is not None and numel(case) > MOST_INTERPRETED:
        return f"interpreted, more than {MOST_INTERPRETED} elements"
    if interpreted and case is None and is_twin(row.op):
        return "interpreted, the kernels of another operation"
    if dtype is not None and "requires_grad" in parameters and dtype != first_dtype(row):
        return f"operators in {dtype}"
    if dtype is not None and case is None and isinstance(row, Row):
        if dtype not in SWEPT_DTYPES[: 1 if emulated else None]:
            return f"several cases in {dtype}"
    elif (
        isinstance(row, Row)
        and dtype is not None
        and (emulated or not every_case)
        and case.id not in telling(row)[dtype]
    ):
        return f"not a telling case in {dtype}"
    name = instruction_set_in(parameters)
    if name in instruction_sets:
        if name != instruction_sets[-1]:  # `make test` compiles only for this processor
            return f"instruction set {name}"
        if dtype not in (None, *SWEPT_DTYPES):
            return f"instruction sets in {dtype}"
    return None


def first_dtype(row: Any) -> torch.dtype:
    """The dtype in which most cases are tested."""
    return torch.bfloat16 if row.hopper else torch.float32


@functools.cache
def telling(row: Any) -> dict[torch.dtype, frozenset[str]]:
    """The names of a row's cases in `make test`, by dtype.

    In the first dtype, they cover every pair of choices (an option's value, the layout or the values of an argument,
    its absence) that some case combines, and every size. If cases take long in the interpreter, or it interprets the
    kernels of another operation, they cover every single choice. In bfloat16 they cover every choice; the other dtypes
    have a third of these cases. Emulated code is the same for all dtypes, so its cases are small.
    """
    from foundry_kernels.tools.check import numel

    most = MOST_INTERPRETED if _is_interpreted(row) else MOST_ELEMENTS
    cases = [case for case in row.cases if numel(case) <= most]

    def all_of(case: Case) -> set[Any]:
        if _is_interpreted(row) and not pairs_are_tried(row, case):
            return _choices(case)
        return {*_choices(case), *_sizes(case), *combinations(sorted(_choices(case)), 2)}

    few = [case for case in cases if numel(case) <= FEW_ELEMENTS] if _is_emulated(row) else cases
    singles = cover(few, _choices)
    first, pairs = first_dtype(row), cover(cases, all_of)
    chosen = dict.fromkeys(row.dtypes, singles[::3]) | {torch.bfloat16: singles, first: pairs}
    return {dtype: frozenset(chosen[dtype]) for dtype in row.dtypes}


def representative(row: Any, dtype: torch.dtype, case: Case) -> bool:
    """Whether a test of several cases needs this one. Emulated code is the same for all dtypes and for operations with
    the same kernels: all but one of these have telling cases only."""
    from table import is_twin

    every = not _is_emulated(row) or (dtype == first_dtype(row) and not is_twin(row.op))
    return every or case.id in telling(row)[dtype]


def pairs_are_tried(row: Any, case: Case) -> bool:
    """Whether an interpreted case counts towards pairs of choices."""
    from table import is_twin

    from foundry_kernels.tools.check import numel

    return numel(case) <= MOST_PAIRED and not is_twin(row.op)


def cover(cases: Sequence[Case], points_of: Callable[[Case], set[Any]]) -> list[str]:
    """The names of cases that together cover all points, by a greedy search: cases with the most new points for their
    size come first."""
    from foundry_kernels.tools.check import numel

    cost = {case.id: 200 + numel(case) for case in cases}  # an empty case takes time too
    points = {case.id: points_of(case) for case in cases}
    missing, found = set().union(*points.values()), []
    while missing:
        best = max(points, key=lambda name: len(points[name] & missing) / cost[name])
        found.append(best)
        missing -= points[best]
    return found


def _choices(case: Case) -> set[str]:
    """The choices of a case: options, and the layout and values of each argument."""
    found = {f"{name}={value}" for name, value in case.options.items()} | {f"cotangent: {case.cotangent}"}
    for name, arg in case.args.items():
        if arg is None:
            found.add(f"no {name}")
            continue
        values = getattr(arg.values, "__qualname__", arg.values)  # a function's repr differs between processes
        found |= {f"{name}: {arg.layout.partition('-')[0]}", f"{name}: {len(arg.shape)} dimensions"}
        found.add(f"{name}: {values} {arg.dtype} {arg.grad}")
    return found


def _sizes(case: Case) -> set[Any]:
    """The powers of 2 around each dimension of each argument, and whether it is a multiple of vectors."""
    return {
        (name, i - len(arg.shape), n.bit_length(), n % 8 == 0)
        for name, arg in case.args.items()
        if arg is not None
        for i, n in enumerate(arg.shape)
    }


def _is_emulated(row: Any) -> bool:
    return row.cuda_on_cpu or _is_interpreted(row)


def _is_interpreted(row: Any) -> bool:
    return row.backend == "triton" and row.device == "cpu"


def instruction_set_in(parameters: dict[str, Any]) -> Any:
    """The parameter `name` or `instruction_set` of a test; `name` may also be the name of something else."""
    return parameters.get("name", parameters.get("instruction_set"))


def instruction_set_of(item: pytest.Item) -> Any:
    call = getattr(item, "callspec", None)
    return None if call is None else instruction_set_in(call.params)


def third_of(nodeid: str) -> int:
    """The third of a test, 0 to 2. It depends only on the test's name, so that a new test does not move others."""
    return zlib.crc32(nodeid.encode()) % 3


def is_slow(item: pytest.Item) -> bool:
    return item.get_closest_marker("slow") is not None


def rest_slow(values: Sequence[Any], quick: int = 1) -> list[Any]:
    """Values of a parameter. `make test` uses only the first `quick` of them."""
    return [*values[:quick], *(pytest.param(value, marks=pytest.mark.slow) for value in values[quick:])]


def mark(items: list[pytest.Item], every_case: bool = False) -> None:
    """Marks slow tests, and moves long single tests to the beginning."""
    from foundry_kernels.core import extension

    usable = extension.build_info().get("usable_instruction_sets", [])
    items.sort(key=lambda item: not is_slow(item))
    for item in items:
        call = getattr(item, "callspec", None)
        if call is not None and reason(call.params, usable, every_case) is not None:
            item.add_marker(pytest.mark.slow)
