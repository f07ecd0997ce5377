"""Marks the tests that `make test` leaves to `make test-slow`: additional points of long sweeps.

`make test` keeps every operation, backend, dtype and kind of test. From the parity table, it runs the selected cases
(`telling`). Of a test with several parameters it runs each value, and not each combination (`telling_combinations`).
Other long tests are marked with `@pytest.mark.slow`, and those that need few values of a parameter with `rest_slow`.
Slow tests leave out emulated repetitions (`representative`). Each commit's CI runs a sixth of the slow tests, so six
consecutive commits run all of them; `make test-all` runs all at once.
"""

from __future__ import annotations

import functools
import subprocess
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

from foundry_kernels.testing import Case

#: `make test` compiles kernels ahead of time only for these; each architecture takes minutes.
ARCHITECTURES = (90, "90a")
#: Its tests compile copies of the CUDA sources: with mistakes, by themselves, or with nvcc. `make test` compiles the
#: kernels once and runs them in the parity suite.
COMPILING = Path(__file__).parents[1] / "proof" / "cuda"
#: Larger cases (elements of all arguments) only repeat with more tiles or chunks what smaller ones test.
MOST_ELEMENTS = 100_000
#: The same limit in emulation.
MOST_EMULATED = 20_000
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
    row, case, dtype = (parameters.get(name) for name in ("row", "case", "dtype"))  # type: Any, Any, Any
    interpreted = isinstance(row, Row) and _is_interpreted(row)
    emulated = isinstance(row, Row) and _is_emulated(row)
    if emulated and parameters.get("part") in ("small", "others"):
        return "all but a few cases, emulated"
    if isinstance(row, Row) and case is not None and numel(case) > MOST_ELEMENTS:
        return f"more than {MOST_ELEMENTS} elements"
    if emulated and case is not None and numel(case) > MOST_EMULATED:
        return f"emulated, more than {MOST_EMULATED} elements"
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
def kernels_changed() -> bool:
    """Whether the last commit, or what is not committed, changes Triton's kernels or the tool that compiles them."""
    of_kernels = ("foundry_kernels/_triton", "foundry_kernels/ops/**/triton", "foundry_kernels/tools/inspect")
    command = ["git", "diff", "--quiet", "HEAD~1", "--", *(f":(top,glob){p}/**" for p in of_kernels)]
    try:
        return subprocess.run(command, cwd=COMPILING, capture_output=True).returncode == 1
    except OSError:  # without git
        return False


#: Of tests that compile kernels for GPUs, which takes seconds a kernel.
ahead_of_time = pytest.mark.usefixtures() if kernels_changed() else pytest.mark.slow


@functools.cache
def telling(row: Any) -> dict[torch.dtype, frozenset[str]]:
    """The names of a row's cases in `make test`, by dtype.

    In the first dtype, they cover every choice (an option's value, the layout or the values of an argument, its
    absence), every size and every pair of choices that some case combines; in bfloat16 every choice; the other dtypes
    have a third of these cases. In emulation a case takes as long as its elements are many, and the code is the same
    for all dtypes. There, small cases cover choices and sizes, and larger ones options and widths that are in no small
    case; bfloat16 has a quarter of the choices, and the other dtypes have one case. An operation with the kernels of
    another covers no pairs and, in emulation, no sizes and widths.
    """
    from table import is_twin

    from foundry_kernels.tools.check import numel

    emulated, twin = _is_emulated(row), is_twin(row.op)
    cases = [case for case in row.cases if numel(case) <= (MOST_EMULATED if emulated else MOST_ELEMENTS)]

    def with_sizes(case: Case) -> set[Any]:
        return _choices(case) if twin and emulated else {*_choices(case), *_sizes(case)}

    def with_pairs(case: Case) -> set[Any]:
        return with_sizes(case) if twin else {*with_sizes(case), *combinations(sorted(_choices(case)), 2)}

    if emulated:
        small = [case for case in cases if numel(case) <= FEW_ELEMENTS]
        known = set().union(*(options_of(case) if twin else {*options_of(case), *_widths(case)} for case in small))
        larger = [case for case in cases if numel(case) > FEW_ELEMENTS]
        first = cover(small, with_sizes)
        first += cover(larger, lambda c: (options_of(c) if twin else {*options_of(c), *_widths(c)}) - known)
        singles = cover(small, _choices)
        few, low = singles[:1], singles[::4]
    else:
        first, singles = cover(cases, with_pairs), cover(cases, _choices)
        few, low = singles[::3], singles
    chosen = dict.fromkeys(row.dtypes, few) | {torch.bfloat16: low, first_dtype(row): first}
    assert all(chosen.values()), f"{row.id}: a dtype in which nothing is tried"
    return {dtype: frozenset(chosen[dtype]) for dtype in row.dtypes}


def representative(row: Any, dtype: torch.dtype, case: Case) -> bool:
    """Whether the slow tests need this case. Emulated code is the same for all dtypes and for operations with the same
    kernels: other dtypes than the first have telling cases only, and the others of such operations no large ones."""
    from table import is_twin

    from foundry_kernels.tools.check import numel

    same = dtype == first_dtype(row) and (not is_twin(row.op) or numel(case) <= MOST_EMULATED)
    return not _is_emulated(row) or same or case.id in telling(row)[dtype]


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
    found = {*options_of(case), f"cotangent: {case.cotangent}"}
    for name, arg in case.args.items():
        if arg is None:
            continue
        values = getattr(arg.values, "__qualname__", arg.values)  # a function's repr differs between processes
        found |= {f"{name}: {arg.layout.partition('-')[0]}", f"{name}: {len(arg.shape)} dimensions"}
        found.add(f"{name}: {values} {arg.dtype} {arg.grad}")
    return found


def options_of(case: Case) -> set[str]:
    """The options of a case, and the arguments that it has not."""
    absent = {f"no {name}" for name, arg in case.args.items() if arg is None}
    return absent | {f"{name}={value}" for name, value in case.options.items()}


def _widths(case: Case) -> set[Any]:
    """The powers of 2 around the last dimension of each argument."""
    return {(name, arg.shape[-1].bit_length()) for name, arg in case.args.items() if arg is not None and arg.shape}


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


def sixth_of(nodeid: str) -> int:
    """The sixth of a test, 0 to 5. It depends only on the test's name, so that a new test does not move others."""
    return zlib.crc32(nodeid.encode()) % 6


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
    combined: dict[str, dict[str, list[str]]] = {}
    by_name = {item.nodeid: item for item in items}
    for item in items:
        call = getattr(item, "callspec", None)
        if COMPILING in item.path.parents:
            item.add_marker(pytest.mark.slow)
        if call is None or is_slow(item):
            continue
        if reason(call.params, usable, every_case) is not None:
            item.add_marker(pytest.mark.slow)
        elif len(call._idlist) > 1:
            combined.setdefault(item.nodeid.partition("[")[0], {})[item.nodeid] = call._idlist
    for combinations_of in combined.values():
        for name in combinations_of.keys() - telling_combinations(combinations_of):
            by_name[name].add_marker(pytest.mark.slow)


def telling_combinations(values: Mapping[str, Sequence[str]], times: int = 2) -> set[str]:
    """Of tests, by name, each with its values of several parameters: those in which each value occurs `times` times, or
    as often as it does, and each value together with each backend that is not emulated. All of up to four."""
    if len(values) <= 4:
        return {*values}
    points: dict[str, set[Any]] = {}
    for name, chosen in values.items():
        points[name] = {*enumerate(chosen)}
        for own in {"reference", "native"} & {*chosen}:
            points[name] |= {(own, point) for point in enumerate(chosen)}
    missing = Counter(point for found in points.values() for point in found)
    for point, count in missing.items():
        missing[point] = min(count, times if isinstance(point[0], int) else 1)
    kept: set[str] = set()
    while +missing:
        # Of equally telling ones any, but the same in each process; neighbours in the list are too much alike.
        best = max(points, key=lambda name: (sum(missing[p] > 0 for p in points[name]), zlib.crc32(name.encode())))
        missing -= Counter(points.pop(best))
        kept.add(best)
    return kept
