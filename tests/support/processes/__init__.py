"""What test_distributed.py runs in two processes, over gloo. One start of the two runs all scenarios.

A scenario is called in each process with its rank, a folder of its own and three free ports.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import multiprocessing
import os
import socket
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

SIZE = 2
SECONDS = 120  # a collective that waits longer has been left by the other process
EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def run(scenarios: Mapping[str, Callable[..., Any]], folder: Path, seconds: float = 600.0) -> dict[str, list[Any]]:
    """What each scenario returned in each process, or the traceback where it failed; hanging processes are killed.

    Another worker of the test run that comes with the same folder waits for the first one and takes its results.
    """
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            _run(scenarios, folder, seconds)
            (folder / "done").touch()
    found = [torch.load(folder / f"{rank}.pt") if (folder / f"{rank}.pt").exists() else {} for rank in range(SIZE)]
    return {name: [results.get(name, "the process did not come this far") for results in found] for name in scenarios}


def _run(scenarios: Mapping[str, Callable[..., Any]], folder: Path, seconds: float) -> None:
    context = multiprocessing.get_context("spawn")
    ports = _free_ports(4 * len(scenarios))
    started = [context.Process(target=_work, args=(rank, scenarios, folder, ports)) for rank in range(SIZE)]
    for process in started:
        process.start()
    deadline = time.monotonic() + seconds
    for process in started:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _work(rank: int, scenarios: Mapping[str, Callable[..., Any]], folder: Path, ports: list[int]) -> None:
    torch.set_num_threads(1)
    sys.path.insert(0, str(EXAMPLES.parent))
    results = {}
    for index, (name, scenario) in enumerate(scenarios.items()):
        start(rank, SIZE, ports[4 * index])
        try:
            results[name] = scenario(rank, folder / name, ports[4 * index + 1 : 4 * index + 4])
        except Exception:
            results[name] = traceback.format_exc()
        end()
        torch.save(results, folder / f"{rank}.pt")


def start(rank: int, size: int, port: int) -> None:
    """Sets up a process as torchrun leaves it, and a process group."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=SECONDS))


def end() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


class Collectives(TorchDispatchMode):
    """Counts the collectives, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch.distributed.tensor import DTensor

        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # it comes again, as what DTensor makes of it
        name = func.name().split("::")[1].removesuffix("_base_")
        if func.namespace in ("c10d", "_c10d_functional") and name not in ("wait_tensor", "_wrap_tensor_autograd"):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def full(x: Tensor) -> Tensor:
    """The whole of a tensor, wherever its parts are."""
    from torch.distributed.tensor import DTensor

    x = x.detach()
    return x.full_tensor() if isinstance(x, DTensor) else x.clone()
