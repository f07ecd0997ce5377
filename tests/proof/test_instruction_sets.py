"""Every CPU kernel with each instruction set that this processor and this build have, but for the best one, with which
test_parity.py runs."""

from __future__ import annotations

import pytest
import slow
import torch
from table import Row, cpu_setting, rows

from foundry_kernels.core import extension
from foundry_kernels.testing import assert_parity
from foundry_kernels.tools.check import numel

LOWER = extension.build_info().get("usable_instruction_sets", [])[:-1]
NATIVE = [pytest.param(row, id=row.id) for row in rows("native") if row.device == "cpu"]


@pytest.mark.slow
@pytest.mark.parametrize("name", LOWER)
@pytest.mark.parametrize("sweep", NATIVE)
@pytest.mark.usefixtures("poisoned")
def test_every_instruction_set(sweep: Row, name: str) -> None:
    """All but the largest cases, in float32, bfloat16 and float16."""
    with cpu_setting(name, 2):
        assert extension.build_info()["instruction_set"] == name
        for case in (case for case in sweep.cases if numel(case) <= slow.MOST_ELEMENTS):
            for dtype in (d for d in sweep.dtypes if d != torch.float64):
                assert_parity(sweep.op, case, backend="native", dtype=dtype)
