"""Mistakes with the instructions of compute capability 9.0, which the checker reports by name."""

from __future__ import annotations

import re

import pytest
import torch
from hopper_units import MISTAKES, SEEDS, library, line_of, pointers, random

pytestmark = pytest.mark.usefixtures("guarded_memory")


@pytest.fixture(params=SEEDS)
def seed(request: pytest.FixtureRequest) -> int:
    return int(request.param)


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


def test_a_report_names_the_line_of_the_call() -> None:
    load = line_of(MISTAKES, "else tma_load(")
    assert f"is not a multiple of 1024, line {load}, block (0,0,0) thread 0" in run_pipeline("box_misplaced", 1)[0]
    report, _ = run_pipeline("released_early", 1)
    assert f"the product of line {line_of(MISTAKES, 'else Wgmma<64>::shared')}" in report
    assert f"line {load}" in report
