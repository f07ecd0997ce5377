"""How `tune` times: in turns, each time with cold caches, and by the median of the ratios of a turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from foundry_kernels import _triton
from foundry_kernels._triton.tuning import asked_as

Repeat = Callable[[], object]


class Timer(Protocol):
    def prepare(self, step: Repeat, kernel: str) -> Repeat:
        """What is timed of `step`, which launches `kernel`: at least that launch, with the launch config that is forced
        now."""

    def times(self, repeats: Mapping[str, Repeat]) -> dict[str, list[float]]:
        """Times of each, as many as there were turns."""


def ratio(own: Sequence[float], other: Sequence[float]) -> float:
    """How many times as fast the other is: the median over the turns, which a disturbance of a few does not change."""
    return statistics.median(a / b for a, b in zip(own, other, strict=True))


class WallTimer:
    """Times calls in the interpreter."""

    def __init__(self, turns: int = 3) -> None:
        self.turns = turns

    def prepare(self, step: Repeat, kernel: str) -> Repeat:
        return recorded(step, kernel)

    def times(self, repeats: Mapping[str, Repeat]) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {name: [] for name in repeats}
        for _ in range(self.turns):
            for name, repeat in repeats.items():
                start = time.perf_counter()
                repeat()
                found[name].append(time.perf_counter() - start)
        return found


class GpuTimer:
    """Measures by events on the GPU. Before each call the cache is overwritten, and the GPU kept busy for as long as
    the host may take to make the launches, so that their time is the GPU's alone."""

    def __init__(self, turns: int = 40) -> None:
        self.turns = turns
        cache = torch.cuda.get_device_properties().L2_cache_size
        self.buffer = torch.empty(max(4 * cache, 256 << 20), dtype=torch.uint8, device="cuda")

    def prepare(self, step: Repeat, kernel: str) -> Repeat:
        """The launches of the kernel alone, without what else the step does; not one that spills registers."""
        repeat = recorded(step, kernel)
        spilled = max(getattr(compiled, "n_spills", 0) or 0 for compiled in repeat())
        if spilled:
            raise RuntimeError(f"{spilled} bytes of registers are spilled")
        return repeat

    def times(self, repeats: Mapping[str, Repeat]) -> dict[str, list[float]]:
        for repeat in repeats.values():
            repeat()
        events: dict[str, list[tuple[Any, Any]]] = {name: [] for name in repeats}
        for _ in range(self.turns):
            for name, repeat in repeats.items():
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                self.buffer.zero_()
                torch.cuda._sleep(2_000_000)  # about a millisecond
                start.record()
                repeat()
                end.record()
                events[name].append((start, end))
            torch.cuda.synchronize()
        return {name: [start.elapsed_time(end) for start, end in pairs] for name, pairs in events.items()}


def recorded(step: Repeat, kernel: str) -> Callable[[], list[Any]]:
    """Calls the step, and returns what repeats its launches of `kernel`, or of what stands for it: with the same
    numbers, on the same tensors. So the time is that of the kernel alone, and which row is forced when it is repeated
    makes no difference. A repeat returns what Triton compiled.

    Raises:
        RuntimeError: the step launched no such kernel.
    """
    if _triton.INTERPRET:
        from triton.runtime.interpreter import InterpretedFunction as Function
    else:
        from triton.runtime.jit import JITFunction as Function
    made: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    own = Function.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if asked_as(self.__name__) == kernel:
            made.append((self, args, kwargs))
        return own(self, *args, **kwargs)

    Function.run = run
    try:
        step()
    finally:
        Function.run = own
    if not made:
        raise RuntimeError(f"{kernel} was not launched")
    return lambda: [own(function, *args, **kwargs) for function, args, kwargs in made]
