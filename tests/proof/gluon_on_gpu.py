"""The Gluon forward of attention against the reference, on an H100 or H200.

test_gluon.py runs this in a process of its own, which it ends if the GPU hangs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gluon_cases import case, hold

import foundry_kernels as fk
from foundry_kernels.ops.flash_attention.triton import gluon_launch
from foundry_kernels.testing import Expected

OP = fk.OPS["flash_attention"]
CASES = {
    "causal": case(2, (8, 2), (512, 512), 128, layout="swapped", causal=True),
    "full": case(2, (8, 2), (512, 512), 64, layout="swapped"),
    "odd": case(1, (4, 1), (193, 321), 64, causal=True),
    "rows-without-keys": case(1, (4, 4), (300, 131), 128, causal=True),
    "top-left": case(1, (4, 4), (300, 131), 128, causal=True, align="top_left"),
    "one-tile": case(1, (2, 2), (129, 7), 64),
    "long": case(1, (2, 1), (1025, 4099), 128, causal=True),
}


BF16, FP16 = torch.bfloat16, torch.float16
RUNS = [*((name, BF16) for name in CASES), *((name, FP16) for name in ("causal", "full"))]


@pytest.mark.parametrize(("name", "dtype"), RUNS, ids=str)
@torch.no_grad()
def test_results(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    own = gluon_launch.launch_gluon
    monkeypatch.setattr(gluon_launch, "launch_gluon", lambda *args: (made.append(args), own(*args)))
    case = CASES[name]
    with torch.enable_grad():
        expected = Expected.of(OP, case, dtype, "cuda")
    runs = [OP.public(**expected.args, **case.options, backend="triton") for _ in range(20)]
    assert len(made) == 20
    hold(expected, runs[0])
    for run in runs:
        assert all(map(torch.equal, run, runs[0]))
