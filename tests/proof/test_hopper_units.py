"""Instructions of compute capability 9.0 under the checker: their layouts, and mistakes.

The layouts are held to what two sketches' tests found on an H100: wgmma's descriptors and fragments, the swizzle of
tensor maps, zeros outside of a tensor, stmatrix, bulk additions. Each kernel runs under several schedules.
"""

from __future__ import annotations

import ctypes
import functools
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import nvcc
import pytest
import torch
from cuda_on_cpu.build import HERE, LIBRARY, load_operators, load_plain
from torch import Tensor

SAMPLES, MISTAKES = HERE / "hopper_samples.cu", HERE / "hopper_mistakes.cu"
#: Copies arrive when nothing else can move, often, or now and then (hopper_scheduler.h); warps in another order.
SEEDS = (1, 2, 3)


@pytest.fixture(autouse=True)
def _guarded() -> Iterator[None]:
    load_operators()
    getattr(torch.ops, LIBRARY).guard(True)
    yield
    getattr(torch.ops, LIBRARY).guard(False)


@pytest.fixture(params=SEEDS)
def seed(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@functools.cache
def library(source: Path) -> ctypes.CDLL:
    loaded = load_plain(source, source.read_text())
    loaded.run_sample.restype = ctypes.c_char_p
    return loaded


def pointers(*tensors: Tensor) -> list[ctypes.c_void_p]:
    return [ctypes.c_void_p(x.data_ptr()) for x in tensors]


def run(name: str, a: Tensor, b: Tensor, out: Tensor, seed: int, sizes: tuple[int, ...] = (), resident: int = 4) -> str:
    samples = library(SAMPLES)
    samples.cuda_on_cpu_schedule(seed, resident)
    report: bytes = samples.run_sample(name.encode(), *pointers(a, b, out), (ctypes.c_int * 8)(*sizes))
    return report.decode()


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Small integers: their products and sums are exact."""
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


NONE = torch.empty(8, dtype=torch.bfloat16)


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
    report = run("all_at_once", NONE, NONE, torch.zeros(8), seed, resident=3)
    line = line_of(SAMPLES, "wait_until(arrived")
    assert f"wait_until at line {line} never ends: it waits for 4 where 3 is, block (0,0,0) thread 0" in report


# --- mistakes ---


RIGHT = ("nothing", "operand_in_registers", "overlapped")
#: Kernels of their own.
ALONE = (
    "registers_too_many",
    "registers_odd",
    "registers_wrong_way",
    "old_shared",
    "early_without_wait",
    "not_launched_by_launch_hopper",
    "too_much_shared_memory",
)


def enumerator(name: str) -> str:
    return "k" + "".join(word.capitalize() for word in name.split("_"))


def run_pipeline(name: str, seed: int) -> tuple[str, bool]:
    """What the checker says, and whether the numbers are right."""
    tiles, weights, out, turn = random(6, 64, 64), random(64, 64), torch.zeros(4096), torch.zeros(1, dtype=torch.int32)
    mistakes = library(MISTAKES)
    mistakes.cuda_on_cpu_schedule(seed, 4)
    known = name if name in (*ALONE, "registers", "early") else enumerator(name)
    report = mistakes.run_sample(known.encode(), *pointers(tiles, weights, out, turn)).decode()
    i = torch.arange(4096)
    register, thread = i // 512 * 4 + i % 4, i // 4 % 128  # each thread's four at a time
    row = thread // 32 * 16 + thread % 32 // 4 + register // 2 % 2 * 8
    column = register // 4 * 8 + thread % 4 * 2 + register % 2
    expected = tiles.float().sum(0) @ weights.float().T
    return report, torch.equal(out, expected[row, column])


@pytest.mark.parametrize("name", RIGHT)
def test_the_pipeline_without_mistakes(name: str, seed: int) -> None:
    assert run_pipeline(name, seed) == ("", True)


@pytest.mark.parametrize("name", ["registers", "early"])
def test_the_others_without_mistakes(name: str, seed: int) -> None:
    assert run_pipeline(name, seed)[0] == ""


EARLY = r"read while the copy of line \d+ fills it: its mbarrier has not been waited for|read before it is written"
UNSEEN = r"race: shared memory is read without a barrier after a copy \(whose mbarrier has to be waited for\) wrote it"
RELEASED = (
    r"written while products of warpgroup 1 read it|without a barrier after warp \d waited for the product of line"
)
REPORTED = {
    # mbarriers
    "no_init": "before mbarrier_init of address",
    "init_twice": "mbarrier_init of what is an mbarrier",
    "no_init_fence": "mbarrier_wait of an mbarrier that no mbarrier_init_fence made visible, line",
    "no_sync_after_init": "without a barrier after thread 0 initialized the mbarrier|before mbarrier_init of address",
    "no_arrivals_at_all": r"mbarrier_wait at line \d+ never ends: it waits for parity 0 .* with 4 of 4 arrivals",
    "too_many_expected": r"mbarrier_wait at line \d+ never ends: it waits for parity 0 .* with 4 of 8 arrivals",
    "one_warp_arrives": r"without a barrier after warp 5 waited for the product of line \d+ .*\(a stage released early",
    "arrives_twice": "more arrivals than the 1 of the mbarrier at",
    "full_not_waited_for": f"{EARLY}|{UNSEEN}",
    "full_of_wrong_phase": rf"{EARLY}|{UNSEEN}|mbarrier_wait at line \d+ never ends: it waits for parity 1",
    "empty_not_waited_for": "more arrivals than the 1 of the mbarrier at",
    "empty_of_wrong_phase": r"mbarrier_wait at line \d+ never ends: it waits for parity 0 .* in phase 0",
    "tried_for_ever": r"mbarrier_try at line \d+ never ends: it waits for parity 0",
    "mbarrier_as_memory": "an mbarrier is read as ordinary memory, line",
    "mbarrier_misaligned": r"shared address \d+ is not a multiple of 8, line",
    "init_of_nothing": "mbarrier_init with 0 arrivals, line",
    "too_many_bytes": r"more than 2\^20 - 1 bytes are announced to an mbarrier, line",
    # copies
    "fewer_bytes_announced": "more bytes come to the mbarrier at .* than were announced: 1024, line",
    "more_bytes_announced": r"mbarrier_wait at line \d+ never ends: .* with 0 of 1 arrivals and 16 bytes to come",
    "load_too_many": "the kernel ends though nobody has waited for the copy of line",
    "box_misplaced": r"shared address \d+ is not a multiple of 1024, line",
    "box_outside": r"shared address \d+ is outside of 1024..66559, line",
    "map_not_made": "tma_load by a tensor map that encode_map has not made, line",
    "source_misaligned": "misaligned access of 16 bytes, line",
    "bytes_not_of_16": "bulk_load of 8200 bytes, not a multiple of 16, line",
    "source_outside": "access outside of an allocation at .*, line",
    "touched_in_flight": r"shared memory is read while the copy of line \d+ fills it",
    "prefetches_no_map": "tma_prefetch_map of a tensor map that encode_map has not made",
    # products
    "no_fence": "wgmma without wgmma_fence since the last wgmma_wait, line",
    "no_commit": "settle of the result of a product that has not been waited for, line",
    "no_wait": "settle of the result of a product that has not been waited for, line",
    "short_wait": RELEASED,
    "read_early": "the result of a product is read before wgmma_wait",
    "maximum_early": "the result of a product is read before wgmma_wait",
    "shuffled_early": "the result of a product is read before wgmma_wait",
    "stored_early": "the result of a product is read before wgmma_wait, line",
    "forgotten_early": "forget of the result of a product that has not been waited for, line",
    "written_early": r"register 5 of the result of thread 137 was written while the product of line \d+ ran",
    "released_early": RELEASED,
    "operand_changed": r"register 2 of an operand of thread 137 was changed while the product of line \d+ ran",
    "weights_without_proxy_fence": r"wgmma reads what thread \d+ wrote by ordinary stores without fence_proxy_async",
    "proxy_fence_after_barrier": r"wgmma reads what thread \d+ wrote by ordinary stores without fence_proxy_async",
    "weights_without_barrier": "race: shared memory is read without a barrier after thread|read before it is written",
    "weights_missing": "shared memory is read before it is written",
    "weights_overwritten": "shared memory is written while products of warpgroup 1 read it",
    "stride_of_512": "wgmma by a descriptor of a stride of 512 bytes, not of a multiple of 1024, line",
    "no_swizzle": "wgmma by a descriptor of swizzle mode 0",
    "begins_in_a_row": "wgmma by a descriptor that begins in row 1 of 8",
    "leaves_the_row": "wgmma by a descriptor of a K-major matrix whose 16 of k leave the row",
    "base_offset": "wgmma by a descriptor with a base offset",
    "across_in_a_row": "wgmma by a descriptor of an MN-major matrix that begins within a row",
    "part_of_a_result": r"wgmma into part of the result of the product of line \d+, which still runs",
    "address_too_large": "wgmma by a descriptor with bits that mean nothing",
    "leading_of_112": "wgmma by a descriptor of a leading offset of 112 bytes, not of a multiple of 1024",
    "three_warps": r"wgmma at line \d+ never completes",
    "two_matrices": "wgmma of other operands in thread 165 than in thread 128",
    "adds_to_forgotten": "wgmma adds to values that were forgotten",
    "reads_forgotten": "a result is read that was forgotten",
    "needs_negative": "needed_before_wait of a negative number, which would be stored, line",
    "never_waited": r"the kernel ends before the product of line \d+ was waited for",
    "leaves_before_products": r"wgmma_wait of a warpgroup whose thread \d+ has left",
    # stores
    "store_without_proxy_fence": r"a bulk copy reads what thread \d+ wrote by ordinary stores without",
    "store_without_barrier": "race: shared memory is read without a barrier after thread|read before it is written",
    "store_not_committed": r"the kernel ends before the bulk copy of line \d+ was committed",
    "store_not_read": "the kernel ends before bulk_wait_read of the bulk copy of line",
    "store_source_touched": r"shared memory is written before the bulk copy of line \d+ has read it: bulk_wait_read",
    "store_outside": "access outside of an allocation at .*, line",
    "turn_given_early": "add_release while this thread's bulk copies are not in global memory: bulk_wait",
    "acquired_without_fence": "bulk_store after load_acquire or wait_until without fence_proxy_async_global, line",
    # the rest
    "turn_never_comes": r"wait_until at line \d+ never ends: it waits for 7 where 0 is",
    "spins_for_ever": r"load_acquire at line \d+ never ends",
    "word_without_barrier": "race: shared memory is read without a barrier after thread|read before it is written",
    "word_of_a_stage": f"{EARLY}|{UNSEEN}|written without a barrier after thread .* read it",
    "outside": r"shared address \d+ is outside of 1024..66559, line",
    "misaligned": r"shared address \d+ is not a multiple of 4, line",
    "lane_without_syncwarp": "race: shared memory is written without a barrier after thread .* read it",
    "barrier_of_31": "a barrier of 31 threads, line",
    "barrier_16": "barrier 16 is none of 1..15, line",
    "barrier_missing": "divergent barrier: 32 threads have left before line",
    "registers_too_many": r"more_registers at line \d+ never ends: it waits for 9216 registers more, of which 7168 are",
    "registers_odd": "fewer_registers of 100: not a multiple of 8 from 24 to 256, line",
    "registers_wrong_way": "fewer_registers to 240 where the warpgroup has 168, line",
    "old_shared": "FK_SHARED or FK_DYNAMIC_SHARED in a kernel of launch_hopper",
    "early_without_wait": r"never waits for that \(wait_for_launch_before",
    "not_launched_by_launch_hopper": "in a kernel that launch_hopper has not launched",
    "too_much_shared_memory": "invalid value",
}


@pytest.mark.parametrize("name", REPORTED)
def test_mistakes_are_reported(name: str, seed: int) -> None:
    report, _ = run_pipeline(name, seed)
    assert re.search(REPORTED[name], report), report


def test_each_mistake_of_the_source_is_held_to_its_report() -> None:
    (listed,) = re.findall(r"^FK_LISTED\((.*?)\);", MISTAKES.read_text(), re.DOTALL | re.MULTILINE)
    names = re.findall(r"\w+", re.sub("//.*", "", listed))
    assert set(names) == {enumerator(name) for name in (*RIGHT, *REPORTED) if name not in ALONE}


def line_of(source: Path, text: str) -> int:
    (number,) = [n for n, line in enumerate(source.read_text().splitlines(), 1) if text in line]
    return number


def test_a_report_names_the_line_of_the_call() -> None:
    load = line_of(MISTAKES, "else tma_load(")
    assert f"is not a multiple of 1024, line {load}, block (0,0,0) thread 0" in run_pipeline("box_misplaced", 1)[0]
    report, _ = run_pipeline("released_early", 1)
    assert f"the product of line {line_of(MISTAKES, 'else Wgmma<64>::shared')}" in report
    assert f"line {load}" in report


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
