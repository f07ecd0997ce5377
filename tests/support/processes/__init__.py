"""Runs the scenarios of the `distributed` tests in two or four processes over gloo. The processes start once and run
all scenarios in one process group.

Each process calls a scenario with its rank, a separate folder and, if it has the attribute `GROUPS`, as many ports.
With these, the scenario can create its own process groups, as under torchrun. If a scenario fails in any process, all
processes end, and new ones run the remaining scenarios.
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

import interpreter
import limits
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

SIZE = 2
#: gloo's timeout in wall-clock time, long enough for a busy machine. `limits.Watch` ends processes that wait for each
#: other.
SECONDS = 3600
#: Seconds in which no process is running or runnable.
IDLE = 60.0
EXAMPLES = Path(__file__).resolve().parents[3] / "examples"

Scenarios = Mapping[str, Callable[..., Any]]


def run(scenarios: Scenarios, folder: Path, size: int = SIZE, processor: float = 600.0) -> dict[str, list[Any]]:
    """The result of each scenario in each process, or the traceback of a failure.

    If the processes finish no scenario in `processor` seconds of processor time, or if all wait for each other, they
    are killed. If another worker of the test run calls this with the same folder, it waits for the first one and uses
    its results.
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
                break  # before the first scenario, for example without a process group: try again
            found[name] = said
            if failed:
                break
    return found


def _run(scenarios: Scenarios, folder: Path, size: int, processor: float) -> str:
    """Returns how the processes ended."""
    context = multiprocessing.get_context("spawn")

    # As under torchrun, this process has the stores through which a group's processes find each other. The system
    # chooses their ports. (If ports were chosen and freed first, other connections, including gloo's, could take them.)
    # Only the requested stores are created: a store looks up its client's name, which takes seconds without an answer.
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
    interpreter.hasten()
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
            os._exit(1)  # at once, so that processes that wait for this one notice
        if ports[name]:
            end()
    end()


def start(rank: int, size: int, store: Path) -> None:
    """Sets up a process as torchrun does, except for the port, and a process group over the file `store`."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
    timeout = datetime.timedelta(seconds=SECONDS)
    dist.init_process_group("gloo", timeout=timeout, store=dist.FileStore(str(store), size), rank=rank, world_size=size)


def end() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


class Collectives(TorchDispatchMode):
    """Counts the collectives by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch.distributed.tensor import DTensor

        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # DTensor calls this again with its own operators
        name = func.name().split("::")[1].removesuffix("_base_")
        if func.namespace in ("c10d", "_c10d_functional") and name not in ("wait_tensor", "_wrap_tensor_autograd"):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def full(x: Tensor) -> Tensor:
    """The full tensor of a sharded one."""
    from torch.distributed.tensor import DTensor

    x = x.detach()
    return x.full_tensor() if isinstance(x, DTensor) else x.clone()
