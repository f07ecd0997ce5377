"""Instructions of compute capability 9.0 under the checker: their layouts, in right kernels.

The layouts are held to what two sketches' tests found on an H100: wgmma's descriptors and fragments, the swizzle of
tensor maps, zeros outside of a tensor, stmatrix, bulk additions. Each kernel runs under several schedules and, where
there is a GPU of compute capability 9.0 and an nvcc, on that.
"""

from __future__ import annotations

import ctypes
import functools
import subprocess
from pathlib import Path

import nvcc
import pytest
import torch
from hopper_units import HAS_GPU, MISTAKES, NONE, ON_GPU, SAMPLES, SEEDS, library, line_of, pointers, random, run


@pytest.fixture(params=(*SEEDS, *([ON_GPU] if HAS_GPU else [])), ids=lambda seed: str(seed or "on_gpu"))
def seed(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(autouse=True)
def _guarded(request: pytest.FixtureRequest) -> None:
    """The checker, which takes long to compile, is not loaded for tests on a GPU."""
    if "seed" not in request.fixturenames or request.getfixturevalue("seed") != ON_GPU:
        request.getfixturevalue("guarded_memory")


# --- copies ---


@pytest.mark.parametrize("columns", [128, 104])
@pytest.mark.parametrize(
    ("column", "token", "head", "batch"),
    [(0, 0, 0, 0), (0, 16, 1, 1), (32, 48, 1, 0), (-16, -8, 0, 1), (0, 100, 0, 0), (0, 0, 2, 0), (0, 0, 0, -1)],
)
def test_a_box_is_swizzled_and_zero_outside_of_the_tensor(
    columns: int, column: int, token: int, head: int, batch: int, seed: int
) -> None:
    tensor = torch.arange(2 * 2 * 100 * columns).remainder(251).add(1).to(torch.bfloat16).view(2, 2, 100, columns)
    out = torch.empty(2, 64, 64, dtype=torch.bfloat16)
    assert run("box", tensor, NONE, out, seed, (2, 2, 100, columns, column, token, head, batch)) == ""
    found = torch.empty_like(out)
    for row in range(64):
        for chunk in range(8):
            found[:, row, 8 * chunk : 8 * chunk + 8] = out[:, row, 8 * (chunk ^ row % 8) :][:, :8]
    expected = torch.zeros(64, 128, dtype=torch.bfloat16)
    if 0 <= head < 2 and 0 <= batch < 2:
        rows, cols = torch.arange(64) + token, torch.arange(128) + column
        inside_r, inside_c = (rows >= 0) & (rows < 100), (cols >= 0) & (cols < columns)
        inside = tensor[batch, head][rows[inside_r]][:, cols[inside_c]]
        expected[inside_r.nonzero(), inside_c.nonzero().T] = inside
    assert torch.equal(found, expected.view(64, 2, 64).transpose(0, 1))


def test_a_ring_of_stages_passes_each_tile_once(seed: int) -> None:
    floats, tiles, out = torch.arange(16.0 * 64).view(16, 64) % 97, random(128, 64), torch.empty(16, 2)
    assert run("ring", floats, tiles, out, seed) == ""
    assert torch.equal(out, torch.stack([tiles.float().view(16, -1).sum(1), floats.sum(1)], 1))


@pytest.mark.parametrize("how", ["bulk", "four"])
@pytest.mark.parametrize("what", ["add", "store"])
def test_blocks_add_and_store_floats(what: str, how: str, seed: int) -> None:
    out = torch.ones(4096)
    assert run(f"{what}_{how}", NONE, NONE, out, seed) == ""
    once = torch.arange(4096) * 0.5
    assert torch.equal(out, 1 + 24 * once if what == "add" else once)


ENCODED = {
    "batches": 2,
    "heads": 2,
    "tokens": 100,
    "columns": 64,
    "token": 64,
    "head": 6400,
    "batch": 12800,
    "rows": 64,
}


@pytest.mark.parametrize(
    ("change", "right"),
    [
        ({}, True),
        ({"rows": 256}, True),
        ({"rows": 257}, False),
        ({"rows": 0}, False),
        ({"columns": 40}, True),
        ({"columns": 0}, False),
        ({"tokens": 0}, False),
        ({"tokens": 1 << 32}, True),
        ({"tokens": (1 << 32) + 1}, False),
        ({"token": 68}, False),
        ({"token": 0}, False),
        ({"token": 0, "tokens": 1}, True),
        ({"head": -64}, False),
        ({"head": 1 << 39}, False),
        ({"batch": (1 << 39) - 8}, True),
        ({"batch": 12804}, False),
        ({"batch": 12804, "batches": 1}, True),
    ],
)
def test_what_the_driver_refuses_is_refused(change: dict[str, int], right: bool) -> None:
    values = (ctypes.c_int64 * 8)(*{**ENCODED, **change}.values())
    assert (library(SAMPLES).encode(*pointers(NONE), 1, values) == 0) == right


def test_addresses_and_types_that_the_driver_refuses() -> None:
    values = (ctypes.c_int64 * 8)(*ENCODED.values())
    data = NONE.data_ptr()
    assert library(SAMPLES).encode(ctypes.c_void_p(data + 8), 1, values) != 0
    assert library(SAMPLES).encode(None, 1, values) != 0
    assert library(SAMPLES).encode(ctypes.c_void_p(data), 0, values) != 0, "float32"


# --- products ---


@pytest.mark.parametrize("columns", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("a", ["", "registers_"])
def test_products_along_rows(a: str, columns: int, seed: int) -> None:
    dtype = torch.float16 if a else torch.bfloat16
    left, right, out = random(64, 128, dtype=dtype), random(256, 128, dtype=dtype), torch.empty(64, columns)
    assert run(f"along_{a}{columns}", left, right, out, seed) == ""
    assert torch.equal(out, left.float() @ right[:columns].float().T)


@pytest.mark.parametrize("columns", [64, 80, 96, 128, 256])
def test_products_across_rows(columns: int, seed: int) -> None:
    depth = 80 if columns == 256 else 128
    left, right, out = random(64, depth), random(depth, columns), torch.empty(64, columns)
    assert run(f"across_{columns}", left, right, out, seed) == ""
    assert torch.equal(out, left.float() @ right.float() + 1)


@pytest.mark.parametrize("columns", [80, 96, 128, 256])
def test_leading_and_stride_offset_are_not_the_same(columns: int) -> None:
    """Exchanged, they gave an H100 other numbers."""
    depth = 80 if columns == 256 else 128
    left, right, out = random(64, depth), random(depth, columns), torch.empty(64, columns)
    assert run(f"exchanged_{columns}", left, right, out, 1) == ""
    assert not torch.equal(out, left.float() @ right.float() + 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_across_rows_of_both(dtype: torch.dtype, seed: int) -> None:
    left, right, out = random(128, 64, dtype=dtype), random(128, 128, dtype=dtype), torch.empty(64, 64)
    name = "both_across" if dtype == torch.bfloat16 else "both_across_f16"
    assert run(name, left, right, out, seed) == ""
    assert torch.equal(out, left.float().T @ right[:, 64:].float())


def test_nan_and_infinity_travel_as_in_a_product() -> None:
    left, right, out = torch.ones(64, 128).bfloat16(), torch.ones(256, 128).bfloat16(), torch.empty(64, 128)
    left[3, 5], left[40, 0], right[7, 127], right[100, 0] = torch.nan, torch.inf, -torch.inf, 0
    assert run("along_128", left, right, out, 1) == ""
    expected = left.float() @ right[:128].float().T
    assert expected.isnan().any()
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


# --- registers, and blocks at the same time ---


@pytest.mark.parametrize("groups", [2, 3])
def test_registers_move_from_one_warpgroup_to_others(groups: int, seed: int) -> None:
    out = torch.zeros(128 * (groups + 1))
    assert run(f"registers_{groups}", NONE, NONE, out, seed) == ""
    thread = torch.arange(len(out))
    assert torch.equal(out, torch.where(thread < 128, 7, 3 * thread).float())


@pytest.mark.parametrize("resident", [1, 3, 16])
def test_blocks_take_turns(resident: int, seed: int) -> None:
    out = torch.zeros(8)
    assert run("turns", NONE, NONE, out, seed, resident=resident) == ""
    assert out[1] == functools.reduce(lambda sum, ticket: 2 * sum + ticket, range(24), 0)


def test_blocks_that_wait_for_each_other_run_at_the_same_time(seed: int) -> None:
    assert run("all_at_once", NONE, NONE, torch.zeros(8), seed) == ""
    if seed == ON_GPU:
        return
    report = run("all_at_once", NONE, NONE, torch.zeros(8), seed, resident=3)
    line = line_of(SAMPLES, "wait_until(arrived")
    assert f"wait_until at line {line} never ends: it waits for 4 where 3 is, block (0,0,0) thread 0" in report


# --- the instructions themselves ---


@pytest.mark.skipif(nvcc.nvcc() is None, reason="nvcc is neither in CUDA_HOME/bin nor on the PATH")
@pytest.mark.parametrize("source", [SAMPLES, MISTAKES], ids=lambda path: path.stem)
def test_the_samples_compile_for_a_gpu(source: Path, tmp_path: Path) -> None:
    program = nvcc.nvcc()
    assert program is not None
    target = tmp_path / "samples.ptx"
    command = [program, "-std=c++17", "-O3", "-gencode", "arch=compute_90a,code=sm_90a"]
    kept = ["--keep", "--keep-dir", str(tmp_path)]
    subprocess.run([*command, *kept, "-cubin", "-o", str(tmp_path / "samples.cubin"), str(source)], check=True)
    (target,) = tmp_path.glob("*.ptx")
    text = target.read_text()
    for instruction in (
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16",
        "wgmma.fence.sync.aligned",
        "wgmma.commit_group.sync.aligned",
        "wgmma.wait_group.sync.aligned 0",
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes",
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes",
        "cp.async.bulk.global.shared::cta.bulk_group",
        "mbarrier.init.shared::cta.b64",
        "fence.mbarrier_init.release.cluster",
        "mbarrier.try_wait.parity.shared::cta.b64",
        "fence.proxy.async.shared::cta",
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16",
        "setmaxnreg.inc.sync.aligned.u32 240",
        "ld.acquire.gpu.global.s32",
        "red.release.gpu.global.add.s32",
    ):
        assert instruction in text, instruction
