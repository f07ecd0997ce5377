"""How the rows of a group are called: rotating inputs, scrubbed caches, results that are kept."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import foundry_kernels as fk
from benchmarks import liger
from benchmarks.measure import Prepare, Scrub, cache_bytes, timer
from benchmarks.suite import DEVICE, LIMITS, MOST_SETS, OURS, Group, rotates, set_count, too_large
from foundry_kernels.testing import make_cotangents


class Arguments:
    """Sets of the case's arguments, handed out in rotation."""

    def __init__(self, group: Group) -> None:
        first = group.case.make(group.dtype, DEVICE)
        more = [{n: _copy(t) for n, t in first.items()} for _ in range(set_count(group) - 1)]
        self.sets = [first, *more]
        #: Whether the first set has left the caches once all have been used.
        self.rotates = rotates(group, len(self.sets))
        self._turn = itertools.cycle(self.sets)

    def next(self) -> dict[str, Tensor | None]:
        return next(self._turn)


def _copy(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.detach().clone().requires_grad_(t.requires_grad)


class Contenders:
    """The rows of a group that can run, ready to be timed (`prepare`), and why the others cannot (`why_not`)."""

    def __init__(self, group: Group, names: tuple[str, ...] | None = None) -> None:
        self.group = group
        self.prepare: dict[str, Prepare] = {}
        self.why_not: dict[str, str] = {}
        reason = too_large(group)
        if reason is not None:
            self.why_not = dict.fromkeys(group.names, reason)
            return
        shared = Arguments(group)
        scrub = Scrub(DEVICE) if group.memory != "warm" else None
        peers = group.peers
        for name in group.names if names is None else names:
            found = peers.get(name)
            if isinstance(found, str):
                self.why_not[name] = found
                continue
            try:
                if name in LIMITS:
                    prepare = _limit(group, name)
                else:
                    own = Arguments(group) if name == liger.NAME else shared
                    prepare = _call(group, group.function(name), own, scrub)
                prepare()()
                timer()  # what a GPU has to say comes late
                if group.memory == "cold" and group.limit == "memcpy" and name not in LIMITS:
                    _use_memory(prepare, len(shared.sets), scrub)
            except Exception as error:
                reason = unavailable(error, ours=name in OURS)
                if reason is None:
                    raise
                self.why_not[name] = reason
            else:
                self.prepare[name] = prepare


def _use_memory(prepare: Prepare, count: int, scrub: Scrub | None) -> None:
    """Call until the memory that results rotate through has been used once, so that no page fault is left to time."""
    if scrub is not None:
        scrub.rests = True
    for _ in range(count):
        prepare()()
    if scrub is not None:
        scrub.rests = False


def unavailable(error: Exception, ours: bool) -> str | None:
    """The reason, in a line, why a call could not be made here; None where that is an error: our own kernels may lack
    memory or a device, no more."""
    text = str(error).strip().splitlines()
    first = f"{type(error).__name__}: {text[0] if text else ''}"[:200]
    lacking = isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
    if lacking:
        return f"too little memory ({first})"
    return first if not ours or isinstance(error, fk.BackendUnavailable) else None


def _limit(group: Group, name: str) -> Prepare:
    if name == "GEMM":
        a, b = (torch.randn(*[MATMUL[DEVICE]] * 2, device=DEVICE, dtype=group.dtype) for _ in range(2))
        return lambda: lambda: a @ b
    size = max(group.bytes_moved // 2 // 4, 1)
    count = 1 if group.memory == "warm" else int(min(max(2 * cache_bytes(DEVICE) // (4 * size) + 1, 2), MOST_SETS))
    # A list: a pair that is made when its turn comes would lie in the caches.
    pairs = itertools.cycle([tuple(torch.ones(2, size, device=DEVICE).unbind()) for _ in range(count)])

    def copy() -> Callable[[], object]:
        source, into = next(pairs)
        return lambda: into.copy_(source)

    return copy if name == "memcpy" else lambda: next(pairs)[0].clone


#: Rows and columns of the factors of the matrix product that is the limit.
MATMUL = {"cpu": 1024, "cuda": 8192}


def _call(group: Group, function: Callable[..., Any], arguments: Arguments, scrub: Scrub | None) -> Prepare:
    """Cold and fresh calls are prepared by scrubbing the caches where the rotation alone does not empty them: where the
    sets are too small together, and behind the forward pass of a backward one."""
    keep: deque[object] = deque(maxlen=len(arguments.sets) if group.memory == "cold" else 0)

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

    made = make_cotangents(outputs(arguments.next()), "contiguous")
    cotangents = itertools.cycle([made, *(tuple(c.clone() for c in made) for _ in arguments.sets[1:])])

    def gradients(args: dict[str, Tensor | None], out: tuple[Tensor, ...], dy: tuple[Tensor, ...]) -> object:
        return torch.autograd.grad(out, [t for t in args.values() if t is not None and t.requires_grad], dy)

    def backward() -> Callable[[], object]:
        args, dy = arguments.next(), next(cotangents)
        out = outputs(args)
        return finish(lambda: gradients(args, out, dy), clean=False)

    def both() -> Callable[[], object]:
        args, dy = arguments.next(), next(cotangents)
        return finish(lambda: gradients(args, outputs(args), dy), arguments.rotates)

    return backward if group.direction == "backward" else both
