"""Calls the rows of a group, with rotating inputs, scrubbed caches and kept results."""

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
    """Sets of the case's arguments, used in rotation."""

    def __init__(self, group: Group) -> None:
        first = group.case.make(group.dtype, DEVICE, drawn_on=DEVICE)
        more = [{n: copied(t) for n, t in first.items()} for _ in range(set_count(group) - 1)]
        self.sets = [first, *more]
        #: Whether the first set is out of the caches after all sets were used.
        self.rotates = rotates(group, len(self.sets))
        self._turn = itertools.cycle(self.sets)
        self._cotangents: dict[tuple[object, ...], list[tuple[Tensor, ...]]] = {}

    def cotangents(self, out: tuple[Tensor, ...]) -> list[tuple[Tensor, ...]]:
        """Returns gradients for outputs like `out`, one for each set. All contenders get the same ones."""
        like = tuple((o.shape, o.dtype) for o in out)
        if like not in self._cotangents:
            made = make_cotangents(out, "contiguous", drawn_on=DEVICE)
            self._cotangents[like] = [made, *(tuple(c.clone() for c in made) for _ in self.sets[1:])]
        return self._cotangents[like]

    def next(self) -> dict[str, Tensor | None]:
        return next(self._turn)


def copied(t: Tensor | None) -> Tensor | None:
    """Returns a copy, which has its own gradient if it requires one."""
    return None if t is None else t.detach().clone().requires_grad_(t.requires_grad)


class Contenders:
    """The rows of a group that can run, prepared for timing (`prepare`), and the reasons why others cannot
    (`why_not`)."""

    def __init__(self, group: Group, names: tuple[str, ...] | None = None) -> None:
        self.group = group
        self.prepare: dict[str, Prepare] = {}
        self.why_not: dict[str, str] = {}
        #: In this context, runs are not timed, and no caches are scrubbed before them.
        self.untimed: Callable[[], AbstractContextManager[None]] = nullcontext
        reason = too_large(group)
        if reason is not None:
            self.why_not = dict.fromkeys(group.names, reason)
            return
        shared = Arguments(group)
        #: The arguments of the check; they are also timed.
        self.args = shared.sets[0]
        scrubs = group.memory != "warm" and not (group.direction != "backward" and shared.rotates)
        scrub = Scrub(DEVICE) if scrubs else None
        if scrub is not None:
            self.untimed = scrub.resting
        # Shared by all contenders, so that a result's memory is reused only after as many other results as there are
        # sets.
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
                timer()  # raises asynchronous errors of a GPU
                if group.memory == "cold" and group.limit == "memcpy" and name not in LIMITS:
                    # Page faults of the results' memory happen before the timing.
                    with self.untimed():
                        for _ in shared.sets:
                            prepare()()
            except Exception as error:
                self.why_not[name] = unavailable(error, ours=name in OURS)
            else:
                self.prepare[name] = prepare


#: A 16-bit call takes at most about as long as in float32, unless it runs plain loops.
_FALLBACK = 2.5


def _falls_back(group: Group, name: str) -> str | None:
    """Returns why torch's 16-bit matmuls are not a fair comparison if oneDNN is restricted, or None. Fused kernels may
    have others, so each row is compared with itself in float32, at a size at which a call does not take minutes."""
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
    """Returns the seconds of the shorter of two calls, or of one long call."""
    found: list[float] = []
    while len(found) < 2 and sum(found) < 0.1:
        run, start = prepare(), timer()
        run()
        found.append(timer() - start)
    return min(found)


def unavailable(error: Exception, ours: bool) -> str:
    """Returns a one-line reason why a call failed. Re-raises the error if it is a bug: this package's kernels may only
    lack memory or a device."""
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
    # A list, because a pair that is created just before its use would be in the caches.
    pairs = itertools.cycle([tuple(torch.ones(2, size, device=DEVICE).unbind()) for _ in range(count)])

    def copy() -> Callable[[], object]:
        source, into = next(pairs)
        return lambda: into.copy_(source)

    return copy if name == "memcpy" else lambda: next(pairs)[0].clone


#: Rows and columns of the matmul that is the limit.
MATMUL = {"cpu": 1024, "cuda": 8192}


def _call(
    group: Group, function: Callable[..., Any], arguments: Arguments, scrub: Scrub | None, keep: deque[object]
) -> Prepare:
    """Before cold and fresh calls, the caches are scrubbed if rotation does not empty them: if the sets are too small
    together, and between a forward pass and its timed backward pass. `keep` has the latest results."""

    def finish(call: Callable[[], object], clean: bool) -> Callable[[], object]:
        if scrub is not None and not clean:
            scrub()
        return lambda: keep.append(call())  # the memory of results is not reused while it is in the cache

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
        # A call without an option does not use the option's tensor. The check of results finds other unused tensors.
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
