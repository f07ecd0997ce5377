"""What the tests of `distributed` run in two processes or four, over gloo. One start of them runs all scenarios.

A scenario is called in each process with its rank, a folder of its own and `GROUPS` ports, if it has that attribute,
for process groups that find each other there as they do under torchrun.
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

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

SIZE = 2
SECONDS = 120  # a collective that waits longer has been left by the other process
EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def run(
    scenarios: Mapping[str, Callable[..., Any]], folder: Path, size: int = SIZE, seconds: float = 300.0
) -> dict[str, list[Any]]:
    """What each scenario returned in each process, or the traceback where it failed.

    If one of them finishes no scenario for `seconds`, all are killed. Another worker of the test run that comes with
    the same folder waits for the first one and takes its results.
    """
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            (folder / "done").write_text(_run(scenarios, folder, size, seconds))
    missing = f"the process did not come this far: {(folder / 'done').read_text()}"
    found = [torch.load(folder / f"{rank}.pt") if (folder / f"{rank}.pt").exists() else {} for rank in range(size)]
    return {name: [results.get(name, missing) for results in found] for name in scenarios}


def _run(scenarios: Mapping[str, Callable[..., Any]], folder: Path, size: int, seconds: float) -> str:
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
    begun = time.time()
    while any(process.is_alive() for process in started):
        time.sleep(0.1)
        results = [folder / f"{rank}.pt" for rank, process in enumerate(started) if process.is_alive()]
        last = [path.stat().st_mtime if path.exists() else begun for path in results]
        if time.time() - min(last, default=begun) > seconds:  # others may go on, from one timeout to the next
            for process in started:
                process.kill()
    for process in started:
        process.join()
    return f"after {time.time() - begun:.0f} s they ended with exit codes {[process.exitcode for process in started]}"


def _work(
    rank: int, size: int, scenarios: Mapping[str, Callable[..., Any]], folder: Path, ports: Mapping[str, list[int]]
) -> None:
    torch.set_num_threads(1)
    sys.path.insert(0, str(EXAMPLES.parent))
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    results = {}
    for name, scenario in scenarios.items():
        try:
            start(rank, size, folder / f"{name}.store")
            results[name] = scenario(rank, folder / name, ports[name])
        except Exception:
            results[name] = traceback.format_exc()
        end()
        torch.save(results, folder / f"{rank}.pt.new")
        os.replace(folder / f"{rank}.pt.new", folder / f"{rank}.pt")


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
