"""Clocks, interleaved medians, peak memory."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping

import torch


def timer() -> float:
    """Seconds; work that was queued on a GPU before is finished first."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


Prepare = Callable[[], Callable[[], object]]


def interleaved(
    contenders: Mapping[str, Prepare], seconds: float = 1.5, rounds: int = 25, warm_ups: int = 1
) -> dict[str, list[float]]:
    """Times of each contender, all taking turns, so that a slow moment of the machine hits each alike.

    A contender prepares a round (untimed) and returns what is timed. Each timed run follows `warm_ups` untimed ones of
    the same contender, so that caches hold its data and not the one before's. Stops after `rounds` or `seconds`,
    whichever is first, but not before 5 rounds.
    """
    for prepare in contenders.values():
        for _ in range(2):
            prepare()()
    times: dict[str, list[float]] = {name: [] for name in contenders}
    end = timer() + seconds
    while len(next(iter(times.values()))) < rounds:
        for name, prepare in contenders.items():
            for _ in range(warm_ups):
                prepare()()
            run = prepare()
            start = timer()
            run()
            times[name].append(timer() - start)
        if timer() > end and len(next(iter(times.values()))) >= 5:
            break
    return times


def median_ratio(numerator: list[float], denominator: list[float]) -> float:
    """Median over rounds of the ratio of two contenders' times in that round."""
    return statistics.median(n / d for n, d in zip(numerator, denominator, strict=True))


def peak_bytes(prepare: Prepare, device: str) -> int:
    """Most bytes that one run holds at a time beyond what was there before it."""
    run = prepare()
    run()
    run = prepare()
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        kept = run()
    del kept
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def saved_bytes(forward: Callable[[], object]) -> int:
    """Bytes that autograd keeps for the backward pass of `forward`, inputs among them; memory shared by several saved
    tensors counts once."""
    storages: dict[int, int] = {}
    kept = []  # or a freed one's address could be another's

    def pack(t: torch.Tensor) -> torch.Tensor:
        kept.append(t)
        storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        forward()
    return sum(storages.values())


@contextlib.contextmanager
def reused_memory() -> Iterator[None]:
    """Lets the C library keep freed memory, however large the block, instead of returning it to the system: a fresh
    tensor then costs no page faults, as in a program whose allocator caches. Does nothing outside of glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        yield
        return
    trim_threshold, mmap_max = -1, -4
    mallopt(mmap_max, 0)
    mallopt(trim_threshold, 2**31 - 1)
    try:
        yield
    finally:
        mallopt(mmap_max, 65536)
        mallopt(trim_threshold, 128 * 1024)
