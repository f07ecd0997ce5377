"""Clocks, interleaved medians, time on the GPU, host time a call, memory, caches, fitted exponents."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch


def timer() -> float:
    """The time in seconds, after waiting for the GPU's queue."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


class Replay:
    """A clock that replays earlier measurements to pytest-benchmark (by `give`). pytest-benchmark would run all rounds
    of one contender in succession, so that a slow moment of the machine would affect only one."""

    def __init__(self) -> None:
        self._shown: list[float] = []

    def __call__(self) -> float:
        return self._shown.pop()

    def give(self, benchmark: Any, times: Sequence[float]) -> None:
        self._shown = [shown for seconds in reversed(times) for shown in (seconds, 0.0)]  # end and start, from the end
        benchmark.pedantic(lambda: None, rounds=len(times))


#: The clock of all rows, for `@pytest.mark.benchmark(timer=replay)`.
replay = Replay()

Prepare = Callable[[], Callable[[], object]]


def interleaved(
    contenders: Mapping[str, Prepare],
    seconds: float = 1.5,
    rounds: int = 25,
    warm_ups: int = 1,
    least: int = 5,
    first: int = 2,
    again: int = 0,
) -> dict[str, list[float]]:
    """Times of each contender. All take turns, so that a slow moment of the machine affects all equally.

    A contender prepares a round (untimed) and returns the timed function. Each timed run follows `warm_ups` untimed
    runs of the same contender, so that the caches have its data. It stops after `rounds` or `seconds`, whichever is
    first, but not before `least` rounds. Before all rounds, each contender runs `first` times. A run during which the
    process got new pages of memory is repeated, at most `again` times: if memory should be reused, page faults must not
    be measured, and in a virtual machine each can take milliseconds.
    """
    for prepare in contenders.values():
        for _ in range(first):
            prepare()()
    times: dict[str, list[float]] = {name: [] for name in contenders}
    end = timer() + seconds
    while len(next(iter(times.values()))) < rounds:
        for name, prepare in contenders.items():
            for _ in range(warm_ups):
                prepare()()
            for _ in range(1 + again):
                run = prepare()
                before, start = new_pages(), timer()
                run()
                took = timer() - start
                if new_pages() == before:
                    break
            times[name].append(took)
        if timer() > end and len(next(iter(times.values()))) >= least:
            break
    return times


def new_pages() -> int:
    """The number of page faults of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def settle(contenders: Mapping[str, Prepare], turns: int) -> None:
    """Runs untimed turns of all contenders, at most `turns`, until two in succession had no new pages of memory. Pages
    may have 2 MB, and a virtual machine may need milliseconds to get one from its host, so even a few matter."""
    quiet = 0
    for _ in range(turns):
        before = new_pages()
        for prepare in contenders.values():
            prepare()()
        quiet = quiet + 1 if new_pages() == before else 0
        if quiet == 2:
            return


def median_ratio(numerator: list[float], denominator: list[float]) -> float:
    """Median over rounds of the ratio of two contenders' times in that round."""
    return statistics.median(n / d for n, d in zip(numerator, denominator, strict=True))


def device_times(contenders: Mapping[str, Prepare], rounds: int = 5) -> dict[str, list[float]]:
    """Seconds between two events around a run, for all contenders in turns; needs CUDA.

    A delay is queued first, so that the host has queued the whole run before the GPU starts it. So the GPU's work is
    measured, without waits for launches.
    """
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, prepare in contenders.items():
            run = prepare()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            torch.cuda._sleep(4_000_000)  # cycles, two milliseconds
            start.record()
            run()
            end.record()
            torch.cuda.synchronize()
            times[name].append(start.elapsed_time(end) / 1e3)
    return times


def graph_time(runs: Sequence[Callable[[], object]], replays: int = 7) -> float:
    """Seconds for a run in a CUDA graph that captured `runs`, one after the other (the median replay divided by the
    number of runs). A backward pass must be captured with its forward pass."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # lazy initialisation must happen before the capture
        for _ in range(3):
            runs[0]()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    replayed = device_times({"": lambda: graph.replay}, replays)[""]
    return statistics.median(replayed[1:]) / len(runs)


def host_times(call: Callable[[], object], batch: int = 100, batches: int = 15) -> list[float]:
    """Seconds that the calling thread is busy with a call, measured in batches without waiting for the GPU. On a CPU,
    the call's work is included, so it must be tiny."""
    for _ in range(20):
        call()
    times = []
    for _ in range(batches):
        start = timer()  # the GPU's queue is empty, and a batch of small calls fits
        for _ in range(batch):
            call()
        times.append((time.perf_counter() - start) / batch)
    return times


@cache
def cache_bytes(device: str, sysfs: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Size of the last-level cache; 32 MiB if the system does not report it."""
    if device == "cuda":
        return torch.cuda.get_device_properties().L2_cache_size
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    sizes = [0]
    for path in sysfs.glob("index*/size"):
        with contextlib.suppress(OSError, KeyError, ValueError):
            text = path.read_text().strip()
            sizes.append(int(text[:-1]) * units[text[-1]])
    return max(sizes) or 32 * 2**20


def free_bytes(device: str) -> int | None:
    """Free memory; None if the system does not report it."""
    if device == "cuda":
        cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return torch.cuda.mem_get_info()[0] + cached
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def release() -> None:
    """Frees unreferenced memory: results in reference cycles, and blocks that the C library keeps."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


class Latest:
    """Caches the current comparison. Its tensors are released before the next one is measured, in any suite."""

    def __init__(self) -> None:
        self._key: object = None
        self._value: Any = None

    def get(self, key: object, make: Callable[[], Any]) -> Any:
        if self._key != key or self._value is None:
            self.clear()
            self._key, self._value = key, make()
        return self._value

    def clear(self) -> None:
        if self._value is not None:
            self._key = self._value = None
            release()


#: The cache of this process.
latest = Latest()


class Scrub:
    """Reads memory of twice the last-level cache, so that older data is evicted. (Writing would leave dirty lines.)
    Does nothing while it is `resting`."""

    def __init__(self, device: str) -> None:
        self._buffer = torch.zeros(2 * cache_bytes(device) // 4, device=device)
        self.rests = False

    def __call__(self) -> None:
        if not self.rests:
            self._buffer.sum()

    @contextlib.contextmanager
    def resting(self) -> Iterator[None]:
        """Switches it off, for runs that are not timed."""
        before, self.rests = self.rests, True
        try:
            yield
        finally:
            self.rests = before


def exponent(x: Sequence[float], y: Sequence[float]) -> float | None:
    """The p of the power law y = c x^p, by least squares in logarithms; None for fewer than two sizes or if a y is not
    positive. A constant part of y lowers p, mostly at small sizes; see `last_exponent`."""
    if len(set(x)) < 2 or min(*x, *y) <= 0:
        return None
    return statistics.linear_regression([math.log(v) for v in x], [math.log(v) for v in y]).slope


def last_exponent(x: Sequence[float], y: Sequence[float]) -> float | None:
    """The `exponent` over the upper half of the sizes, at least three. It is closer to the asymptotic growth; a
    quadratic term shows here first."""
    largest = sorted(zip(x, y, strict=True))[-max(3, (len(x) + 1) // 2) :]
    return exponent([a for a, _ in largest], [b for _, b in largest])


def peak_bytes(prepare: Prepare, device: str) -> int:
    """The maximum increase of memory, in bytes, during a run."""
    run = prepare()
    run()
    run = prepare()
    if device == "cuda":
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    enabled = gc.isenabled()
    gc.disable()  # collected memory would count as freed by the run
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            kept = run()
    finally:
        if enabled:
            gc.enable()
    del kept
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def saved_bytes(forward: Callable[[], object]) -> int:
    """Bytes that autograd saves for the backward pass of `forward`, including inputs. Memory that several saved tensors
    share counts once."""
    storages: dict[int, int] = {}
    kept = []  # a freed tensor's address could be reused

    def pack(t: torch.Tensor) -> torch.Tensor:
        kept.append(t)
        storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        forward()
    return sum(storages.values())


@contextlib.contextmanager
def reused_memory() -> Iterator[None]:
    """Lets the C library keep freed memory of any size instead of returning it to the system. New tensors then cause no
    page faults, as with a caching allocator. Does nothing without glibc."""
    library = ctypes.CDLL(None)
    mallopt, trim = getattr(library, "mallopt", None), getattr(library, "malloc_trim", None)
    if mallopt is None or trim is None:
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
        trim(0)  # otherwise the process would keep its peak memory
