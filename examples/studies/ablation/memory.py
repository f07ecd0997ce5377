"""Peak memory of a function, in a fresh process, so that earlier work does not count and its memory is not reused."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import torch

from examples.training.memory import PeakMemory

Prepare = Callable[[], Callable[[], object]]


def peak_bytes(prepare: Prepare, *, whole: bool = False, device: str = "cpu") -> int:
    """Peak bytes (on a CPU, resident bytes) of ``prepare()()``: the increase by the call, or with `whole` the increase
    by preparation and call. `prepare` must be picklable."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        return pool.submit(partial(_measure, prepare, whole, device, torch.get_num_threads())).result()


def _measure(prepare: Prepare, whole: bool, device: str, threads: int) -> int:
    torch.set_num_threads(threads)
    prepare()()  # a first call loads libraries and compiles for these shapes
    memory = PeakMemory(torch.device(device))
    run = prepare()
    if not whole:
        memory = PeakMemory(torch.device(device))
    run()
    return memory.bytes()
