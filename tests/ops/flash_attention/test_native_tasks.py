"""How attention on the CPU is split into tasks: how many threads they keep busy, what they hold in memory, and that
no number of threads changes a bit of the result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from built import needs_native
from schedules import Task
from schedules import of_tasks as load_imbalance
from torch.nn.attention import SDPBackend, sdpa_kernel

import foundry_kernels as fk
from benchmarks.measure import peak_bytes
from foundry_kernels.core import extension

pytestmark = needs_native

CORES = 64
NONE = -1


def tasks_of(
    q_lens: Sequence[int],
    k_lens: Sequence[int] | None = None,
    *,
    hk: int = 1,
    group: int = 1,
    window: tuple[int | None, int | None] = (None, 0),
    bottom_right: bool = True,
    threads: int = CORES,
) -> dict[str, list[Task]]:
    found = extension._C.attention_tasks(q_lens, k_lens or q_lens, hk, group, *window, bottom_right, threads)
    return {name: [Task(*t) for t in tasks] for name, tasks in found.items()}


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("window", [(None, 0), (None, None)], ids=["causal", "full"])
def test_64_cores_are_busy(group: int, window: tuple[int | None, int | None]) -> None:
    """One sequence, 8 key-value heads, 4096 tokens."""
    for threads, most in ((CORES, 1.1), (2, 1.01)):
        for name, tasks in tasks_of([4096], hk=8, group=group, window=window, threads=threads).items():
            assert len(tasks) >= 4 * CORES, name
            assert load_imbalance(tasks, threads) < most, (name, threads)


@pytest.mark.parametrize(
    ("q_lens", "k_lens", "hk", "group", "cores"),  # of the backward pass; of the forward pass 64
    [
        ([1], [4096], 8, 4, 8),  # decoding: keys are split
        ([1], [16384], 2, 4, 2),
        ([4096], None, 2, 4, 16),  # few heads: chunks of fewer keys would cost more than they gain
        ([512], None, 8, 4, 8),
        ([4096, 300, 17], None, 8, 1, CORES),  # a long sequence among short ones
        ([512] * 16, None, 8, 4, CORES),
    ],
    ids=["decode", "decode-long", "few-heads", "short", "packed", "batch"],
)
def test_cores_are_busy(q_lens: list[int], k_lens: list[int] | None, hk: int, group: int, cores: int) -> None:
    tasks = tasks_of(q_lens, k_lens, hk=hk, group=group, threads=cores)
    assert load_imbalance(tasks["forward"], CORES) < 1.1
    assert load_imbalance(tasks["backward"], cores) < 1.1


@pytest.mark.parametrize("threads", [1, 2, 4, 16])
@pytest.mark.parametrize(
    ("q_lens", "k_lens", "window"),
    [
        ([512], [512], (None, 0)),
        ([2048], [2048], (None, 0)),
        ([1024], [1024], (None, None)),
        ([3000], [3000], (500, 0)),
        ([1600], [600], (None, 0)),  # rows without keys
        ([600], [1600], (300, 0)),  # keys without rows
        ([512] * 3 + [1000] + [512], [512] * 3 + [1000] + [512], (None, 0)),
    ],
    ids=str,
)
def test_heads_share_sums_and_no_thread_waits_for_that(
    q_lens: list[int], k_lens: list[int], window: tuple[int | None, int | None], threads: int
) -> None:
    """What adds to the same sums of some rows or keys is one line, a head after the other."""
    hk = 8
    tasks = tasks_of(q_lens, k_lens, hk=hk, window=window, threads=threads)["backward"]
    apart = tasks_of(q_lens, k_lens, hk=hk, window=window, threads=1 << 20)["backward"]
    heads = {t[:2] for t in tasks}
    assert len({t.sums for t in apart}) == len(heads) == len(q_lens) * hk
    if threads <= 2:
        assert len({t.sums for t in tasks}) < len(heads)
    lines: dict[tuple[str, int, int], list[int]] = {}
    alone: list[tuple[int, int, int]] = []  # rows that have no sums
    for i, task in enumerate(tasks):
        if task.row_sums != NONE:
            lines.setdefault(("next_of_rows", task.row_sums, task.row_begin), []).append(i)
        elif task.row_begin < task.row_end:
            alone.append((task.sequence, task.kv_head, task.row_begin))
        if task.key_begin < task.key_end:
            lines.setdefault(("next_of_keys", task.sums, task.key_begin), []).append(i)
    for (next_of, *_), line in lines.items():
        assert [getattr(tasks[i], next_of) for i in line] == [*line[1:], NONE]
        assert [tasks[i][:2] for i in line] == sorted(tasks[i][:2] for i in line)
    summed = {(t.sequence, t.kv_head, t.row_begin) for t in tasks if t.row_sums != NONE}
    assert len(alone) == len(set(alone) - summed)
    assert load_imbalance(tasks, threads) < load_imbalance(apart, threads) + 0.02


@pytest.mark.parametrize("bottom_right", [True, False])
@pytest.mark.parametrize("window", [(None, 0), (None, None), (70, 20), (0, -90)], ids=str)
@pytest.mark.parametrize(("t", "s", "group"), [(700, 700, 1), (300, 900, 2), (1000, 260, 1), (9, 0, 3), (130, 1, 1)])
def test_every_key_is_seen_once(
    t: int, s: int, group: int, window: tuple[int | None, int | None], bottom_right: bool
) -> None:
    """Each key is seen once by the rows that see it, and each row and key has a task that writes its gradient, the last
    of its line."""
    offset = s - t if bottom_right else 0
    rel_pos = torch.arange(s) - (torch.arange(t * group) // group)[:, None] - offset
    left, right = window
    visible = (rel_pos >= (-(1 << 30) if left is None else -left)) & (rel_pos <= (1 << 30 if right is None else right))
    for name, tasks in tasks_of([t], [s], hk=1, group=group, window=window, bottom_right=bottom_right).items():
        times, rows, keys = torch.zeros(t * group, s), torch.zeros(t * group), torch.zeros(s)
        for task in tasks:
            of_rows, of_keys = slice(task.row_begin, task.row_end), slice(task.key_begin, task.key_end)
            times[of_rows, of_keys] += 1
            if task.next_of_rows == NONE:
                rows[of_rows] += 1
            else:
                assert tasks[task.next_of_rows][2:4] == task[2:4]
            if task.next_of_keys == NONE:
                keys[of_keys] += 1
            else:
                assert tasks[task.next_of_keys][4:6] == task[4:6]
        assert (times <= 1).all(), name
        assert (times[visible] == 1).all(), name
        assert sum(task.work for task in tasks) >= visible.sum(), name
        if name == "backward":
            assert (rows == 1).all()
            assert (keys == 1).all()


SHAPES = {
    "causal": ((1, 8, 700, 32), (1, 8, 700, 32), {"causal": True}),
    "grouped": ((1, 8, 600, 40), (1, 2, 900, 40), {"causal": True, "window": (300, 0)}),
    "full": ((2, 2, 520, 64), (2, 1, 640, 64), {}),
    "rows-without-keys": ((1, 4, 1600, 32), (1, 4, 600, 32), {"causal": True}),
    "keys-without-rows": ((1, 4, 600, 32), (1, 4, 1600, 32), {"causal": True, "window": (300, 0)}),
    "decode": ((1, 8, 1, 64), (1, 2, 4096, 64), {}),
}


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_more_threads_than_cores_change_no_bit(shape: str, dtype: torch.dtype) -> None:
    q_shape, k_shape, options = SHAPES[shape]
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(x, generator=g).to(dtype).requires_grad_() for x in (q_shape, k_shape, k_shape))
    dout = torch.randn(q_shape, generator=g).to(dtype)
    results: list[tuple[torch.Tensor, ...]] = []
    for n in (1, 2, 8, CORES, CORES):
        torch.set_num_threads(n)
        out = fk.flash_attention(q, k, v, backend="native", **options)
        results.append((out, *torch.autograd.grad(out, (q, k, v), dout)))
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("hk", "dtype"), [(2, torch.bfloat16), (8, torch.float32)], ids=str)
def test_what_the_backward_pass_holds(hk: int, dtype: torch.dtype) -> None:
    """Memory is no more than SDPA's."""
    torch.set_num_threads(2)
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, h, 2048, 64, generator=g).to(dtype).requires_grad_() for h in (8, hk, hk))

    def peak(attend: Any) -> int:
        out = attend()
        return peak_bytes(lambda: lambda: torch.autograd.grad(out, (q, k, v), out, retain_graph=True), "cpu")

    ours = peak(lambda: fk.flash_attention(q, k, v, causal=True, backend="native"))
    assert (q.numel() + k.numel() + v.numel()) * q.itemsize < ours
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        theirs = peak(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
    assert ours <= theirs
