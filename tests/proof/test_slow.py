"""What `make test` leaves out: further points of a sweep, and never all of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import nvcc
import pytest
import slow
import torch
from table import Row, checked_rows, hopper_rows, is_twin, rows

from foundry_kernels.testing import Case
from foundry_kernels.tools.check import numel
from foundry_kernels.tools.inspect import aot

SETS = ["baseline", "avx2", "avx512", "avx512_bf16"]
ROWS = [pytest.param(row, id=row.id) for row in (*checked_rows(), *hopper_rows())]


def quick_cases(sweep: Row, dtype: torch.dtype, every_case: bool = False) -> list[Case]:
    parameters = {"row": sweep, "dtype": dtype}
    return [c for c in sweep.cases if slow.reason({**parameters, "case": c}, SETS, every_case) is None]


@pytest.mark.parametrize("sweep", ROWS)
def test_every_kernel_is_tried_in_every_dtype(sweep: Row) -> None:
    """In the first dtype with each two options and layouts that a small case combines; in bfloat16 with each of
    them; with some in the others."""
    emulated = sweep.cuda_on_cpu or (sweep.backend == "triton" and sweep.device == "cpu")
    interpreted = emulated and not sweep.cuda_on_cpu
    small = [c for c in sweep.cases if numel(c) <= (slow.MOST_INTERPRETED if interpreted else slow.MOST_ELEMENTS)]
    few = [c for c in small if numel(c) <= slow.FEW_ELEMENTS] if emulated else small
    first = slow.first_dtype(sweep)
    kept = {dtype: quick_cases(sweep, dtype) for dtype in sweep.dtypes}
    assert choices(kept[first]) == choices(small)
    assert pairs(kept[first]) >= pairs([c for c in small if not interpreted or slow.pairs_are_tried(sweep, c)])
    assert choices(kept[torch.bfloat16]) >= choices(few)
    others = [len(cases) for dtype, cases in kept.items() if dtype not in (first, torch.bfloat16)]
    assert all(others), "a dtype in which nothing is tried"
    assert len(kept[first]) >= len(kept[torch.bfloat16]) >= max(others)
    assert max(numel(c) for c in sweep.cases) <= slow.MOST_ELEMENTS or len(kept[first]) < len(sweep.cases)
    if not emulated:  # held to other instruction sets
        assert quick_cases(sweep, first, every_case=True) == small


def choices(cases: list[Case]) -> set[object]:
    """Each option's value; each argument's layout, or that it is absent."""
    found: set[object] = set()
    for case in cases:
        found |= {(name, str(value)) for name, value in case.options.items()}
        found |= {(name, arg and arg.layout.split("-")[0]) for name, arg in case.args.items()}
    return found


def pairs(cases: list[Case]) -> set[object]:
    return {frozenset(pair) for case in cases for pair in combinations(choices([case]), 2)}


def test_each_process_finds_the_same_cases_telling() -> None:
    """pytest-xdist asks that of its workers."""
    code = "import slow, table; print([[sorted(x) for x in slow.telling(r).values()] for r in table.checked_rows()])"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(["tests/support", "."]), "PYTHONHASHSEED": "1"}
    command, root = [sys.executable, "-c", code], Path(__file__).parents[2]
    said = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=True).stdout
    assert said == f"{[[sorted(names) for names in slow.telling(row).values()] for row in checked_rows()]}\n"


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"arch": 90}, None),
        ({"arch": 120}, "architecture 120"),
        ({"arch": "80"}, "architecture 80"),
        ({"name": "avx2"}, "instruction set avx2"),
        ({"name": "avx512"}, "instruction set avx512"),
        ({"name": "avx512_bf16"}, None),
        ({"name": "neither"}, None),
        ({}, None),
    ],
    ids=str,
)
def test_the_rules(parameters: dict[str, object], expected: str | None) -> None:
    assert slow.reason(parameters, SETS) == expected


@pytest.mark.parametrize("sweep", ROWS)
def test_a_sweep_within_one_test_keeps_its_small_cases(sweep: Row) -> None:
    interpreted = sweep.backend == "triton" and sweep.device == "cpu"
    emulated = sweep.cuda_on_cpu or interpreted
    assert (slow.reason({"row": sweep, "part": "few"}, SETS) is not None) == (interpreted and is_twin(sweep.op))
    for part in ("small", "others"):
        assert (slow.reason({"row": sweep, "part": part}, SETS) is not None) == emulated
    assert 0 < len({case.id for case in sweep.small_cases}) < len(sweep.cases)


def test_each_kind_of_kernel_is_interpreted_in_tests_without_a_case() -> None:
    """Of the operations in one folder, which share kernels, the first."""
    swept = [row for row in rows("triton") if slow.reason({"row": row}, SETS) is None]
    assert {row.op.package for row in swept} == {row.op.package for row in rows("triton")}
    for grad in (False, True):
        tried = {
            row.op.name
            for row in rows()
            if slow.reason({"row": row, "dtype": torch.float32, "requires_grad": grad}, SETS) is None
        }
        assert tried == {row.op.name for row in (*swept, *rows("native"))}


def test_nvcc_always_compiles_an_ordinary_kernel_and_one_for_hopper() -> None:
    kept = [(s, arch) for s, arch in nvcc.JOBS if slow.reason({"source": s, "arch": arch}, SETS) is None]
    assert {source in nvcc.HOPPER for source, _ in kept} == {True, False}


def test_one_architecture_is_always_compiled_for() -> None:
    assert set(slow.ARCHITECTURES) & set(aot.GPUS)


def test_each_slow_test_is_in_one_third() -> None:
    ids = [f"tests/proof/test_parity.py::test_parity[{n}]" for n in range(3000)]
    thirds = [slow.third_of(each) for each in ids]
    assert set(thirds) == {0, 1, 2}
    assert all(800 < thirds.count(third) < 1200 for third in range(3))
    assert thirds == [slow.third_of(each) for each in ids]


def test_ci_runs_both_parts_and_three_commits_all_of_the_second() -> None:
    """`make test` and `make test-slow` are two halves of the suite; .ci/run calls the first whole and of the second the
    third that follows the commit's, without leaving out any by name."""
    root = Path(__file__).parents[2]
    makefile, commands = (root / "Makefile").read_text(), (root / ".ci" / "run").read_text().splitlines()
    assert '-m "not slow"' in makefile
    assert "-m slow $(if $(THIRD),--third=$(THIRD))" in makefile
    assert [c for c in commands if re.match("make test( |$)", c)] == ["make test"]
    assert [c for c in commands if c.startswith("make test-slow")] == ["make test-slow THIRD=$((commit % 3))"]
    assert "commit=$(git rev-list --count HEAD)" in commands
    assert "make test-all" not in commands
