"""How the rows of a group are called: rotating inputs, scrubbed caches, results that are kept."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import foundry_kernels as fk
from benchmarks import isa, liger
from benchmarks.measure import Prepare, Scrub, cache_bytes, timer
from benchmarks.suite import DEVICE, LIMITS, MOST_SETS, OURS, Group, rotates, set_count, too_large
from foundry_kernels.testing import make_cotangents


class Arguments:
    """Sets of the case's arguments, handed out in rotation."""

    def __init__(self, group: Group) -> None:
        first = group.case.make(group.dtype, DEVICE, drawn_on=DEVICE)
        more = [{n: copied(t) for n, t in first.items()} for _ in range(set_count(group) - 1)]
        self.sets = [first, *more]
        #: Whether the first set has left the caches once all have been used.
        self.rotates = rotates(group, len(self.sets))
        self._turn = itertools.cycle(self.sets)
        self._cotangents: dict[tuple[object, ...], list[tuple[Tensor, ...]]] = {}

    def cotangents(self, out: tuple[Tensor, ...]) -> list[tuple[Tensor, ...]]:
        """Returns gradients for outputs like `out`, as many as there are sets; all contenders get the same."""
        like = tuple((o.shape, o.dtype) for o in out)
        if like not in self._cotangents:
            made = make_cotangents(out, "contiguous", drawn_on=DEVICE)
            self._cotangents[like] = [made, *(tuple(c.clone() for c in made) for _ in self.sets[1:])]
        return self._cotangents[like]

    def next(self) -> dict[str, Tensor | None]:
        return next(self._turn)


def copied(t: Tensor | None) -> Tensor | None:
    """Returns a copy with gradients of its own, where it takes any."""
    return None if t is None else t.detach().clone().requires_grad_(t.requires_grad)


class Contenders:
    """The rows of a group that can run, ready to be timed (`prepare`), and why the others cannot (`why_not`)."""

    def __init__(self, group: Group, names: tuple[str, ...] | None = None) -> None:
        self.group = group
        self.prepare: dict[str, Prepare] = {}
        self.why_not: dict[str, str] = {}
        #: While it lasts, runs are not timed: no caches are scrubbed before them.
        self.untimed: Callable[[], AbstractContextManager[None]] = nullcontext
        reason = too_large(group)
        if reason is not None:
            self.why_not = dict.fromkeys(group.names, reason)
            return
        shared = Arguments(group)
        #: What is timed, to check the results of.
        self.args = shared.sets[0]
        scrubs = group.memory != "warm" and not (group.direction != "backward" and shared.rotates)
        scrub = Scrub(DEVICE) if scrubs else None
        if scrub is not None:
            self.untimed = scrub.resting
        # Of all contenders together: between two uses of a result's memory lie as many others as there are sets.
        results: deque[object] = deque(maxlen=len(shared.sets) if group.memory == "cold" else 0)
        peers = group.peers
        for name in group.names if names is None else names:
            found = peers.get(name)
            if isinstance(found, str):
                self.why_not[name] = found
                continue
            try:
                if (reason := too_large(group, name) or _falls_back(group, name)) is not None:
                    self.why_not[name] = reason
                    continue
                if name in LIMITS:
                    prepare = _limit(group, name)
                else:
                    own = Arguments(group) if name == liger.NAME else shared
                    prepare = _call(group, group.function(name), own, scrub, results)
                with self.untimed():
                    prepare()()
                timer()  # what a GPU has to say comes late
                if group.memory == "cold" and group.limit == "memcpy" and name not in LIMITS:
                    # No page fault of the memory that results rotate through is left to time.
                    with self.untimed():
                        for _ in shared.sets:
                            prepare()()
            except Exception as error:
                self.why_not[name] = unavailable(error, ours=name in OURS)
            else:
                self.prepare[name] = prepare


#: A call in 16 bits takes at most about as long as in float32, if it is not computed by plain loops.
_FALLBACK = 2.5


def _falls_back(group: Group, name: str) -> str | None:
    """Returns why torch's own products of 16 bits are no measure where oneDNN is restricted, or None. Fused kernels
    may have others: each is compared with itself in float32, at a size of which one call does not take minutes."""
    products = group.flops is not None and name not in (*OURS, "memcpy")
    if not isa.current.lacks_products(group.dtype.itemsize, products):
        return None
    small = replace(group, case=group.bench.parity_case(group.case), memory="warm")
    seconds = []
    for each in (small, replace(small, dtype=torch.float32)):
        if name == "GEMM":
            prepare = _limit(each, name)
        else:
            prepare = _call(each, each.function(name), Arguments(each), None, deque(maxlen=0))
        prepare()()
        seconds.append(_seconds(prepare))
    if seconds[0] <= _FALLBACK * seconds[1]:
        return None
    return f"{isa.no_products()}: more than {_FALLBACK} times as slow as in float32"


def _seconds(prepare: Prepare) -> float:
    """Returns the seconds of the shorter of two calls; of one where it is long."""
    found: list[float] = []
    while len(found) < 2 and sum(found) < 0.1:
        run, start = prepare(), timer()
        run()
        found.append(timer() - start)
    return min(found)


def unavailable(error: Exception, ours: bool) -> str:
    """Returns the reason, in a line, why a call could not be made here; raises it where it is a bug: our own kernels
    may lack memory or a device, no more."""
    text = str(error).strip().splitlines()
    first = f"{type(error).__name__}: {text[0] if text else ''}"[:200]
    lacking = isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
    if lacking:
        return f"too little memory ({first})"
    if ours and not isinstance(error, fk.BackendUnavailable):
        raise error
    return first


def _limit(group: Group, name: str) -> Prepare:
    if name == "GEMM":
        a, b = (torch.randn(*[MATMUL[DEVICE]] * 2, device=DEVICE, dtype=group.dtype) for _ in range(2))
        return lambda: lambda: a @ b
    size = max(group.bytes_moved // 2 // 4, 1)
    count = 1 if group.memory == "warm" else int(min(2 * cache_bytes(DEVICE) // (8 * size) + 1, MOST_SETS))
    # A list: a pair that is made when its turn comes would lie in the caches.
    pairs = itertools.cycle([tuple(torch.ones(2, size, device=DEVICE).unbind()) for _ in range(count)])

    def copy() -> Callable[[], object]:
        source, into = next(pairs)
        return lambda: into.copy_(source)

    return copy if name == "memcpy" else lambda: next(pairs)[0].clone


#: Rows and columns of the factors of the matrix product that is the limit.
MATMUL = {"cpu": 1024, "cuda": 8192}


def _call(
    group: Group, function: Callable[..., Any], arguments: Arguments, scrub: Scrub | None, keep: deque[object]
) -> Prepare:
    """Cold and fresh calls are prepared by scrubbing the caches where the rotation alone does not empty them: where the
    sets are too small together, and behind the forward pass of a backward one. `keep` holds the latest results."""

    def finish(call: Callable[[], object], clean: bool) -> Callable[[], object]:
        if scrub is not None and not clean:
            scrub()
        return lambda: keep.append(call())  # results are not written to again while they are in the cache

    if group.direction == "forward":

        def forward() -> Callable[[], object]:
            args = {n: None if t is None else t.detach() for n, t in arguments.next().items()}

            def call() -> object:
                with torch.no_grad():
                    return function(**args)

            return finish(call, arguments.rotates)

        return forward

    def outputs(args: dict[str, Tensor | None]) -> tuple[Tensor, ...]:
        out = function(**args)
        return out if isinstance(out, tuple) else (out,)

    cotangents = itertools.cycle(arguments.cotangents(outputs(arguments.next())))

    def gradients(args: dict[str, Tensor | None], out: tuple[Tensor, ...], dy: tuple[Tensor, ...]) -> object:
        # The call without an option leaves out the option's tensor; what others leave out, the check of results finds.
        wanted = [t for t in args.values() if t is not None and t.requires_grad]
        return torch.autograd.grad(out, wanted, dy, allow_unused=True)

    def backward() -> Callable[[], object]:
        args, dy = arguments.next(), next(cotangents)
        out = outputs(args)
        return finish(lambda: gradients(args, out, dy), clean=False)

    def both() -> Callable[[], object]:
        args, dy = arguments.next(), next(cotangents)
        return finish(lambda: gradients(args, outputs(args), dy), arguments.rotates)

    return backward if group.direction == "backward" else both
