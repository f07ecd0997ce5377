"""The load imbalance of CPU kernels for any number of threads, computed from the kernels' task lists or their
scheduling rules."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

#: Of csrc/torch/cpu_common.h: elements that are worth waking a thread for, and those that take an exponential.
GRAIN = 1 << 15
EXP_GRAIN = GRAIN // 2
#: Of csrc/cpu/tiles.h: columns of a row that gated activations take at a time.
TILE = 8192
#: Of csrc/torch/products_cpu.cpp and csrc/cpu/matmul.h: multiplications of a matmul that are worth waking a thread for,
#: the most rows and columns of a tile, and what both are multiples of.
PRODUCT_GRAIN = 1 << 19
MOST_ROWS = MOST_COLUMNS = 512
ROWS_TOGETHER, COLUMNS_TOGETHER = 16, 64
#: Of csrc/torch/decode_linear_cpu.cpp: the same for a matmul of few rows in one pass over its matrix, the matrix rows
#: of a task, and the largest group that uses it when it is optional.
PASS_GRAIN = 1 << 17
BLOCK = 64
FEW_ROWS = 32
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


def of_rows(count: int, grain: int, threads: int) -> float:
    """Returns the time that `threads` take for `count` rows, relative to an even split, as at::parallel_for splits
    them: among at most as many threads as there are grains, in ranges of equal size."""
    if count == 0:
        return 1.0
    used = min(threads, _parts(count, max(grain, 1)))
    return _parts(count, used) * threads / count


def of_tiles(rows: int, width: int, threads: int) -> float:
    """Returns the same for an activation's rows, cut into tiles."""
    return of_rows(rows * _parts(width, TILE), EXP_GRAIN // min(width, TILE), threads)


def of_one_pass(products: Sequence[tuple[int, int]], width: int, threads: int) -> float:
    """Returns the same for several matmuls of few rows with matrices whose rows have `width` elements. Rows count in
    multiples of eight, as in the kernel; tasks do not differ otherwise."""
    work = [_parts(rows, 8) for rows, n in products for _ in range(_parts(n, BLOCK))]
    return _of_shares(work, PASS_GRAIN // max(1, sum(work) * BLOCK * width // len(work)), threads)


def of_product(rows: int, columns: int, depth: int, threads: int) -> float:
    """Returns the same for a float32 matmul with a row-major left factor, cut into tiles."""

    def size(n: int, most: int, tiles: int, together: int) -> int:
        tiles = min(_parts(_parts(n, most), tiles) * tiles, _parts(n, together))
        return _parts(_parts(n, tiles), together) * together

    used = min(threads, _parts(rows * columns * depth, PRODUCT_GRAIN))
    wide = size(columns, MOST_COLUMNS, used, COLUMNS_TOGETHER)
    tall = size(rows, MOST_ROWS, _parts(used, _parts(columns, wide)), ROWS_TOGETHER)
    work = [
        min(tall, rows - row) * min(wide, columns - column)
        for column in range(0, columns, wide)
        for row in range(0, rows, tall)
    ]
    return _of_shares(work, _parts(len(work), used), threads)


def _parts(n: int, size: int) -> int:
    return -(-n // size)


def _of_shares(work: Sequence[int], grain: int, threads: int) -> float:
    """Returns the same for tasks that at::parallel_for splits by number."""
    used = min(threads, _parts(len(work), max(grain, 1)))
    share = _parts(len(work), used)
    return max(sum(work[i : i + share]) for i in range(0, len(work), share)) * threads / sum(work)


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
