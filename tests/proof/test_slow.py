"""What `make test` leaves out: further points of a sweep, and never all of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import slow
import torch
from table import Row, checked_rows, hopper_rows

from foundry_kernels.tools.check import numel
from foundry_kernels.tools.inspect import aot

SETS = ["baseline", "avx2", "avx512", "avx512_bf16"]
ROWS = [pytest.param(row, id=row.id) for row in (*checked_rows(), *hopper_rows())]


@pytest.mark.parametrize("sweep", ROWS)
def test_every_kernel_is_tried_in_every_dtype(sweep: Row) -> None:
    """Most of the cases in float32, or where kernels are for 16 bits in bfloat16, and in both where they are not
    emulated; some in each other dtype."""
    emulated = sweep.cuda_on_cpu or (sweep.backend == "triton" and sweep.device == "cpu")
    most = (slow.first_dtype(sweep),) if emulated else (torch.float32, torch.bfloat16)
    for dtype in sweep.dtypes:
        kept = [c for c in sweep.cases if slow.reason({"row": sweep, "case": c, "dtype": dtype}, SETS) is None]
        assert len(kept) >= (0.8 if dtype in most else 0.05) * len(sweep.cases), dtype
        assert max(numel(c) for c in sweep.cases) <= slow.MOST_ELEMENTS or len(kept) < len(sweep.cases)


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"arch": 90}, None),
        ({"arch": 120}, "architecture 120"),
        ({"arch": "80"}, "architecture 80"),
        ({"name": "avx2"}, None),
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
    emulated = sweep.cuda_on_cpu or (sweep.backend == "triton" and sweep.device == "cpu")
    assert slow.reason({"row": sweep, "part": "few"}, SETS) is None
    for part in ("small", "others"):
        assert (slow.reason({"row": sweep, "part": part}, SETS) is not None) == emulated
    assert 0 < len({case.id for case in sweep.small_cases}) < len(sweep.cases)


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
