"""What the tests of `distributed` run in two processes or four, over gloo. One start of them runs all scenarios, in one
process group.

A scenario is called in each process with its rank, a folder of its own and `GROUPS` ports, if it has that attribute,
for process groups of its own that find each other there as they do under torchrun. Where one fails, in whichever
process, all processes end, and others run the scenarios behind it.
"""

from __future__ import annotations

import datetime
import fcntl
import multiprocessing
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import limits
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

SIZE = 2
#: By the clock, which is all that gloo looks at: longer than any machine is busy. `limits.Watch` ends processes that
#: wait for each other.
SECONDS = 3600
#: Seconds in which no process runs or is ready to.
IDLE = 60.0
EXAMPLES = Path(__file__).resolve().parents[3] / "examples"

Scenarios = Mapping[str, Callable[..., Any]]


def run(scenarios: Scenarios, folder: Path, size: int = SIZE, processor: float = 600.0) -> dict[str, list[Any]]:
    """What each scenario returned in each process, or the traceback where it failed.

    If they finish no scenario in so many seconds of processor time, or all wait for each other, they are killed.
    Another worker of the test run that comes with the same folder waits for the first one and takes its results.
    """
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "results.pt").exists():
            torch.save(_run_all(scenarios, folder, size, processor), folder / "results.pt")
    found: dict[str, list[Any]] = torch.load(folder / "results.pt")
    return found


def _run_all(scenarios: Scenarios, folder: Path, size: int, processor: float) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    attempts: Counter[str] = Counter()
    while left := {name: scenario for name, scenario in scenarios.items() if name not in found}:
        attempt = folder / str(sum(attempts.values()))
        attempt.mkdir()
        how = _run(left, attempt, size, processor)
        results = [torch.load(path) if (path := attempt / f"{rank}.pt").exists() else {} for rank in range(size)]
        for name in left:
            said = [of.get(name, f"the process did not come this far: {how}") for of in results]
            failed = any(isinstance(each, str) for each in said)
            if failed:
                attempts[name] += 1
            if not any(name in of for of in results) and attempts[name] == 1:
                break  # before it began, as where the group could not be made: once more
            found[name] = said
            if failed:
                break
    return found


def _run(scenarios: Scenarios, folder: Path, size: int, processor: float) -> str:
    """How the processes ended."""
    context = multiprocessing.get_context("spawn")

    # As under torchrun the stores through which a group's processes find each other live here, on ports that the system
    # chose. Ports that are chosen and freed are taken by others before their use, gloo's own connections among them.
    # No more than are asked for: a store asks for its client's name, which takes seconds where no one answers.
    def store() -> dist.TCPStore:
        return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    stores = {name: [store() for _ in range(getattr(of, "GROUPS", 0))] for name, of in scenarios.items()}
    ports = {name: [each.port for each in found] for name, found in stores.items()}
    started = [context.Process(target=_work, args=(rank, size, scenarios, folder, ports)) for rank in range(size)]
    for process in started:
        process.start()
    watch = limits.Watch([process.pid for process in started if process.pid], processor, IDLE)
    results, finished, why = [folder / f"{rank}.pt" for rank in range(size)], 0, "nothing was left to do"
    while any(process.is_alive() for process in started):
        time.sleep(0.1)
        if (now := sum(path.stat().st_mtime_ns for path in results if path.exists())) != finished:
            finished = now
            watch.progress()
        elif over := watch.over():
            why = over
            for process in started:
                process.kill()
    for process in started:
        process.join()
    return f"{why}; they ended with exit codes {[process.exitcode for process in started]}"


def _work(rank: int, size: int, scenarios: Scenarios, folder: Path, ports: Mapping[str, list[int]]) -> None:
    torch.set_num_threads(1)
    sys.path.insert(0, str(EXAMPLES.parent))
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    results = {}
    for name, scenario in scenarios.items():
        if not dist.is_initialized():
            start(rank, size, folder / f"{name}.store")
        try:
            results[name] = scenario(rank, folder / name, ports[name])
        except Exception:
            results[name] = traceback.format_exc()
        torch.save(results, folder / f"{rank}.pt.new")
        os.replace(folder / f"{rank}.pt.new", folder / f"{rank}.pt")
        if isinstance(results[name], str):
            os._exit(1)  # at once, so that others who wait for this one are told
        if ports[name]:
            end()
    end()


def start(rank: int, size: int, store: Path) -> None:
    """Sets up a process as torchrun leaves it, but for its port, and a process group that meets in the file `store`."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
    timeout = datetime.timedelta(seconds=SECONDS)
    dist.init_process_group("gloo", timeout=timeout, store=dist.FileStore(str(store), size), rank=rank, world_size=size)


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
