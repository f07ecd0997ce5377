"""How operations grow: the exponents of theory, what passes them, and how work is divided among threads that a machine
need not have. No time decides a test."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import foundry_kernels as fk
from benchmarks import suite, tables, test_scaling, verdict
from benchmarks.test_scaling import Scaling
from foundry_kernels.core import extension
from foundry_kernels.testing import schedules

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
    assert verdict.lines(rows) == [
        "Exponents (and theory's): 1 of 3 grow faster:",
        "  swiglu forward over T: time 1.40 (1.00), memory 1.00 (1.00)",
        "  rope forward over T: time 1.02 (1.00), memory 0.40 (1.00)",
        "  attention forward over T: time 1.99 (2.00), memory 1.00 (1.00)",
    ]
    page = tables.scaling({"rows": rows})
    assert "| time | largest | theory | memory | largest | theory |" in page
    assert "| native | 0.90 | 1.02 | 1.00 | 0.90 | 0.40 | 1.00 |" in page
    assert "| native | 0.90 | **1.40** | 1.00 |" in page
    assert page.count("**") == 2


# --- threads that are not here ----------------------------------------------------------------------------------------


def test_rows_are_divided_as_at_parallel_for_divides_them() -> None:
    assert schedules.of_rows(8, 1, 4) == 1.0
    assert schedules.of_rows(9, 1, 4) == pytest.approx(3 * 4 / 9)
    assert schedules.of_rows(8, 4, 4) == 2.0  # two grains: two threads
    assert schedules.of_rows(3, 0, 64) == pytest.approx(64 / 3)
    assert schedules.of_rows(0, 1, 4) == 1.0
    assert schedules.of_tiles(8, 3 * schedules.TILE, 12) == 1.0
    assert schedules.of_tiles(4, 3 * schedules.TILE, 12) == 2.0  # two tiles are a grain


def test_products_are_divided_as_their_operators_divide_them() -> None:
    assert schedules.of_product(512, 512, 512, 2) == 1.0
    assert schedules.of_product(512, 3 * 512, 512, 2) == 1.0  # four tiles of 384 columns
    assert schedules.of_product(64, 192, 4096, 2) == pytest.approx(2 * 2 / 3)  # one of 128 columns and one of 64
    assert schedules.of_product(16, 64, 64, 2) == 2.0  # too little for two
    assert schedules.of_product(2048, 2048, 2048, 64) == 1.0
    assert schedules.of_one_pass([(1, 256)], 1 << 12, 4) == 1.0
    assert schedules.of_one_pass([(1, 256), (8, 64)], 1 << 12, 4) == pytest.approx(2 * 4 / 5)
    assert schedules.of_one_pass([(9, 64), (1, 64)], 1 << 12, 2) == pytest.approx(2 * 2 / 3)  # nine rows are two calls
    assert schedules.of_one_pass([(1, 256)], 64, 4) == 4.0


def test_the_rule_has_the_constants_of_the_kernels() -> None:
    common, tiles = ((ROOT / "csrc" / name).read_text() for name in ("torch/cpu_common.h", "cpu/tiles.h"))
    grain = re.search(r"kGrain = 1 << (\d+);", common)
    assert grain
    assert 1 << int(grain[1]) == schedules.GRAIN
    assert f"kExpGrain = kGrain / {schedules.GRAIN // schedules.EXP_GRAIN};" in common
    assert f"kTile = {schedules.TILE};" in tiles
    products = ("torch/products_cpu.cpp", "cpu/matmul.h", "torch/decode_linear_cpu.cpp", "cpu/decode_linear.h")
    product, matmul, one_pass, decode = ((ROOT / "csrc" / name).read_text() for name in products)
    assert 1 << int(re.findall(r"kGrainProducts = 1 << (\d+);", product)[0]) == schedules.PRODUCT_GRAIN
    assert f"kTileColumns = {schedules.MOST_COLUMNS};" in product
    assert f"kRowsTogether = {schedules.ROWS_TOGETHER}, kColumnsTogether = kMatmulColumns;" in product
    assert f"kMatmulRows = {schedules.MOST_ROWS};" in matmul
    assert f"kMatmulColumns = {schedules.COLUMNS_TOGETHER};" in matmul
    assert 1 << int(re.findall(r"kReadGrain = 1 << (\d+);", one_pass)[0]) == schedules.PASS_GRAIN
    assert f"kDecodeLinearBlock = {schedules.BLOCK};" in decode
    assert f"return {schedules.FEW_ROWS // 8} * kDecodeLinearRows;" in product
    parallel = Path(torch.__file__).parent / "include" / "ATen"
    assert "divup((end - begin), grain_size)" in (parallel / "ParallelOpenMP.h").read_text()
    assert "chunk_size = divup((end - begin), num_threads)" in (parallel / "ParallelOpenMP.h").read_text()


@pytest.mark.skipif(suite.DEVICE != "cpu", reason="threads of a CPU")
def test_the_largest_shapes_keep_64_threads_busy() -> None:
    of = {s.op.name: test_scaling.schedule(s).get("schedule", {}) for s in OF.values() if s.axis == "threads"}
    if not of:
        pytest.skip("there is one core")
    assert all(of.values()) or extension.MISSING is not None
    for op, found in of.items():
        assert all(1.0 <= value < 64 for value in found.values()), op
        assert found.get("1", 1.0) == 1.0
        assert found.get("2", 1.0) < 1.05, op
    if extension.MISSING is None:
        assert of["flash_attention"]["8"] < 1.1
    shown = tables.schedules({"rows": [row(1, 1, axis="threads", schedule=of["rms_norm"])]})
    assert "| operation | 1 threads | 2 threads | 4 threads | 8 threads |" in shown
    assert "| `rope` | 1.00 | 1.00 |" in shown
    said = verdict.growth([row(1, 1, axis="threads", theory={"time": -1.0}, schedule={"1": 1.0, "64": 1.25})])
    assert said == ["Divided among 64 threads (computed): at most 1.25 times an even share (rope)."]
