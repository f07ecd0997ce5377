"""Attention's kernels with score functions, compiled ahead of time for GPUs that are not here."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import fresh
import pytest
from compiled import needs_triton
from score_functions import EXAMPLES
from slow import ahead_of_time

SUPPORT = Path(__file__).parents[2] / "support"


class Compiled(NamedTuple):
    kernel: str
    case: str
    dtype: str
    registers: int
    stack: int
    instructions: int


def compiled(arch: int, width: int, *names: str) -> list[Compiled]:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([str(SUPPORT), env.get("PYTHONPATH", "")])
    done = fresh.python(str(SUPPORT / "score_kernels.py"), str(arch), str(width), *names, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("flash_attention")]
    return [Compiled(*line[:3], *map(int, line[3:])) for line in lines]


@needs_triton
@ahead_of_time
def test_alibi_by_a_function_costs_what_the_option_costs() -> None:
    found = compiled(90, 64, "built-in", "alibi")
    assert all(each.stack == 0 for each in found)
    for kernel in ("fwd", "dkdv", "dq"):
        own, option = (
            [x.instructions for x in found if x.case == case and x.kernel == f"flash_attention_{kernel}_kernel"]
            for case in ("alibi", "built-in")
        )
        assert len(own) == len(option) > 0
        for a, b in zip(own, option, strict=True):
            assert a <= 1.1 * b, (kernel, a, b)


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("arch", [80, 90])
def test_no_example_spills(arch: int, width: int) -> None:
    found = compiled(arch, width, *EXAMPLES)
    assert {each.case for each in found} == set(EXAMPLES)
    assert not [each for each in found if each.stack > 0]
