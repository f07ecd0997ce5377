"""How evenly attention on the CPU divides a call among threads, of which there may be more than the machine has, by the
lists of tasks that the kernel makes."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

_NONE = -1


class Task(NamedTuple):
    """A task of attention, as csrc/cpu/flash_attention_tasks.h makes it, its work, which tasks wait for it, and where
    the sums of its head and of its rows are."""

    sequence: int
    kv_head: int
    row_begin: int
    row_end: int
    key_begin: int
    key_end: int
    work: int
    next_of_rows: int = _NONE
    next_of_keys: int = _NONE
    sums: int = _NONE
    row_sums: int = _NONE

    @property
    def next(self) -> list[int]:
        """The tasks that wait for it: one twice that does so for its rows and its keys."""
        return [n for n in (self.next_of_rows, self.next_of_keys) if n != _NONE]


def of_tasks(tasks: Sequence[Task], threads: int) -> float:
    """Returns the time that `threads` take, relative to perfectly balanced work without waiting. Each thread takes the
    next ready task, and of several the one with the longest chain of dependent tasks, as TaskQueue does."""
    waits = Counter(n for t in tasks for n in t.next)
    behind = [0] * len(tasks)
    for i in reversed(range(len(tasks))):
        assert all(n > i for n in tasks[i].next)
        behind[i] = tasks[i].work + max((behind[n] for n in tasks[i].next), default=0)
    ready = [(-behind[i], i) for i in range(len(tasks)) if not waits[i]]
    heapq.heapify(ready)
    running: list[tuple[int, int]] = []
    now = done = 0
    while ready or running:
        while ready and len(running) < threads:
            i = heapq.heappop(ready)[1]
            heapq.heappush(running, (now + tasks[i].work, i))
        now, i = heapq.heappop(running)
        done += 1
        for n in tasks[i].next:
            waits[n] -= 1
            if not waits[n]:
                heapq.heappush(ready, (-behind[n], n))
    assert done == len(tasks), "some wait for each other"
    return now / (sum(t.work for t in tasks) / threads)
