"""The timing of `tune`: in turns, with cold caches, by the median of the turns' ratios."""

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
        """Returns the function to time for `step`, which launches `kernel`. It makes at least that launch, with the
        config that is forced now."""

    def times(self, repeats: Mapping[str, Repeat]) -> dict[str, list[float]]:
        """The times of each function, one for each turn."""


def ratio(own: Sequence[float], other: Sequence[float]) -> float:
    """The speedup of `other` over `own`: the median over the turns, so that a few disturbed turns do not matter."""
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
    """Measures with CUDA events. Before each call, it overwrites the cache and keeps the GPU busy until the host has
    made the launches, so that host time is not measured."""

    def __init__(self, turns: int = 40) -> None:
        self.turns = turns
        cache = torch.cuda.get_device_properties().L2_cache_size
        self.buffer = torch.empty(max(4 * cache, 256 << 20), dtype=torch.uint8, device="cuda")

    def prepare(self, step: Repeat, kernel: str) -> Repeat:
        """Times only the launches of the kernel, not the rest of the step. Raises an error if it spills registers."""
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
    """Calls the step, and returns a function that repeats its launches of `kernel` (or of the kernel that replaces it)
    with the same arguments. So only the kernel is timed, and a config that is forced later has no effect. The function
    returns the compiled kernels.

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
