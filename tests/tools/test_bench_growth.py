"""How operations grow: the exponents of theory, and what passes them. No time decides a test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import foundry_kernels as fk
from benchmarks import suite, tables, test_scaling
from benchmarks.test_scaling import Scaling

ROOT = Path(__file__).parents[2]
OF = {s.id: s for full in (True, False) for s in test_scaling.scalings(full)}


def scaling(op: str, axis: str, direction: str = "forward") -> Scaling:
    spec = fk.OPS[op]
    assert spec.bench is not None
    return Scaling(spec, axis, direction, torch.float32, spec.bench.scaling_cases(op, "cpu")[axis])


@pytest.mark.parametrize(
    ("op", "axis", "direction", "time", "memory"),
    [
        ("flash_attention", "T", "forward", 2.0, 1.0),
        ("flash_attention", "B", "forward", 1.0, 1.0),
        ("flash_attention", "D", "forward", 1.0, 1.0),
        ("flash_attention", "S", "forward", 1.0, 0.0),
        ("rms_norm", "N", "backward", 1.0, 1.0),
        ("rope", "T", "forward", 1.0, 1.0),
        ("cross_entropy", "V", "forward", 1.0, 0.0),
        ("cross_entropy", "V", "backward", 1.0, 1.0),
        ("linear_cross_entropy", "V", "both", 1.0, 1.0),  # the weight's gradient, no logits
        ("linear_cross_entropy", "T", "both", 1.0, 0.2),
        ("grouped_mm", "T", "forward", 1.0, 1.0),
        ("grouped_mm", "T", "backward", 1.0, 0.1),
        ("decode_linear", "B", "forward", 1.0, 1.0),
    ],
)
def test_theory_is_what_a_call_computes_or_moves_and_what_it_makes(
    op: str, axis: str, direction: str, time: float, memory: float
) -> None:
    found = test_scaling.theory(scaling(op, axis, direction))["theory"]
    assert found == pytest.approx({"time": time, "memory": memory}, abs=0.06)


def test_no_peer_makes_all_scores_of_long_sequences() -> None:
    """Eager attention over 16,384 tokens took 24 GB."""
    longest = scaling("flash_attention", "T").points[-1][1]
    group = suite.Group(fk.OPS["flash_attention"], longest, torch.float32, "forward")
    named = "materializes the matrix of scores, left out beyond 4096 tokens"
    assert {name: why for name, why in group.peers.items() if isinstance(why, str)}.items() >= {
        ("eager", named),
        ("torch.compile", named),
        ("SDPA math", named),
    }
    assert suite.group_bytes(group) < 4e9


def test_every_size_is_a_valid_call() -> None:
    for s in OF.values():
        for _, case in s.points:
            assert suite.Group(s.op, case, s.dtype, s.direction).bytes_made > 0


@pytest.mark.skipif(suite.DEVICE != "cpu", reason="the axes of a CPU")
def test_growth_is_over_tokens_width_vocabulary_batch_and_threads() -> None:
    full, quick = ({(s.op.name, s.axis) for s in test_scaling.scalings(full)} for full in (True, False))
    assert quick < full
    assert {axis for _, axis in full} >= {"T", "N", "V", "B", "D", "S"}
    longest = scaling("flash_attention", "T").points
    assert (longest[0][0], longest[-1][0]) == (128, 16384)
    for s in test_scaling.scalings(False):  # short, but enough of them for an exponent
        assert len(s.points) >= 3 or s.axis == "threads"
        for _, case in s.points:
            assert (suite.Group(s.op, case, s.dtype, s.direction).flops or 0) <= 3 * test_scaling._QUICK_FLOPS


def row(time: float, memory: float, **changes: Any) -> dict[str, Any]:
    line = {"time_exponent": 0.9, "last_time_exponent": time, "memory_exponent": 0.9, "last_memory_exponent": memory}
    known = {"kind": "scaling", "op": "rope", "row": "native", "direction": "forward", "dtype": "float32"}
    known |= {"axis": "T", "sizes": [1, 2, 4], "lines": {"native": line}, "theory": {"time": 1.0, "memory": 1.0}}
    return known | changes


def test_what_grows_faster_than_theory_is_said() -> None:
    square = {"time": 2.0, "memory": 1.0}
    rows = [row(1.02, 0.4), row(1.4, 1.0, op="swiglu"), row(1.99, 1.0, op="attention", theory=square)]
    page = tables.scaling({"rows": rows})
    assert "| time | largest | theory | memory | largest | theory |" in page
    assert "| native | 0.90 | 1.02 | 1.00 | 0.90 | 0.40 | 1.00 |" in page
    assert "| native | 0.90 | **1.40** | 1.00 |" in page
    assert page.count("**") == 2
