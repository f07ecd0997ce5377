"""Random shapes, layouts, dtypes and options against the reference: the CPU kernels under every instruction set.

Bounded, and the same in every run, so that a commit passes or fails by what it changes. `make fuzz` tries others for as
long as it is told, and keeps what it finds in .hypothesis.
"""

from __future__ import annotations

import os
import secrets
import time

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from hypothesis.database import DirectoryBasedExampleDatabase
from table import Row, cpu_setting, rows

from foundry_kernels.core import extension
from foundry_kernels.core.registry import OpSpec
from foundry_kernels.testing import Case, assert_parity, call, make_cotangents, run

NATIVE = [pytest.param(r, id=r.id) for r in rows("native") if r.device == "cpu" and r.op.fuzz is not None]
ISAS = extension.build_info().get("usable_instruction_sets", [])
THREADS = (1, 1, 2, (os.cpu_count() or 1) + 3)

BOUNDED = settings(
    max_examples=120,
    derandomize=True,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)


#: Operations over PyTorch's matrix products, which promise nothing for another number of threads.
TORCH_PRODUCTS = {"linear_cross_entropy", "linear_log_probs", "linear_kl_div", "grouped_mm", "lora_linear"}


def check(op: OpSpec, case: Case, dtype: torch.dtype, instruction_set: str, threads: int) -> None:
    """Kernels are as exact as the reference (some 16-bit gradients: for the rounded output), with its strides; bitwise
    equal on one thread; inputs are not modified in place."""
    with cpu_setting(instruction_set, threads):
        result = assert_parity(op, case, backend="native", dtype=dtype, of_its_output=True)
    expected = call(op, case.make(dtype), case.options, backend="reference")
    for a, e in zip(result.outputs, expected, strict=True):
        strides = [(s, t) for n, s, t in zip(e.shape, a.stride(), e.stride(), strict=True) if n > 1]
        assert e.numel() == 0 or all(s == t for s, t in strides), f"strides {a.stride()}, expected {e.stride()}"
    if threads > 1 and op.name not in TORCH_PRODUCTS:
        with cpu_setting(instruction_set, 1):
            cotangents = make_cotangents(expected, case.cotangent)
            alone = run(op, case.make(dtype), case.options, cotangents, backend="native")
        for name, tensor in alone.items().items():
            a, b = (t.detach().reshape(-1).view(torch.uint8) for t in (tensor, result.items()[name]))  # NaN equals NaN
            assert torch.equal(a, b), f"{name} depends on the number of threads"


@pytest.mark.parametrize("most", [10, pytest.param(BOUNDED.max_examples, marks=pytest.mark.slow)])
@pytest.mark.parametrize("row", NATIVE)
@pytest.mark.usefixtures("poisoned")
def test_random_cases(row: Row, most: int, fuzz_seconds: float | None) -> None:
    assert row.op.fuzz is not None
    drawn = [row.op.fuzz.random_case(row.op.name), *map(st.sampled_from, (row.dtypes, ISAS, THREADS))]

    def attempt(case: Case, dtype: torch.dtype, instruction_set: str, threads: int) -> None:
        check(row.op, case, dtype, instruction_set, threads)

    if fuzz_seconds is None:
        settings(BOUNDED, max_examples=most)(given(*drawn)(attempt))()
        return
    if most < BOUNDED.max_examples:
        pytest.skip("there is time for more")
    database = DirectoryBasedExampleDatabase(f".hypothesis/fuzz/{row.op.name}")
    end = time.monotonic() + fuzz_seconds / len(NATIVE)
    rounds = 0
    while time.monotonic() < end:
        number = secrets.randbits(64)
        print(f"{row.id}: seed {number}")
        seed(number)(settings(BOUNDED, derandomize=False, database=database)(given(*drawn)(attempt)))()
        rounds += 1
    print(f"{row.id}: {rounds} x {BOUNDED.max_examples} cases")
