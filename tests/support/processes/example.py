"""examples/train.py, sharded."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch.distributed as dist

from processes import end, start

OPTIONS = ["--dim", "16", "--layers", "1", "--heads", "2", "--kv-heads", "2", "--batch", "4", "--seq-len", "16"]
OPTIONS += ["--device", "cpu", "--steps", "6", "--sample-tokens", "0", "--backend", "auto"]


class Resume:
    """Runs the example in `first[1]` processes, sharded by `first[0]`, stops half-way, and continues in `second[1]`
    processes."""

    GROUPS = 2

    def __init__(self, first: tuple[str, int], second: tuple[str, int]) -> None:
        self.halves = (first, second)

    def __call__(self, rank: int, folder: Path, ports: list[int]) -> dict[str, Any]:
        from examples import train
        from examples.training import loop as train_loop
        from examples.training import text as train_text
        from examples.training.parallel import Parallel

        recipe = train.make_recipe(train.parse(OPTIONS), 5)
        text = train_text.read_text(None, recipe.seq_len)
        run, started = None, dist.get_world_size()
        for half, (kind, size) in enumerate(self.halves):
            dist.barrier()
            end()
            if rank < size:
                os.environ |= {"WORLD_SIZE": str(size), "MASTER_PORT": str(ports[half])}
                folder.mkdir(exist_ok=True)
                run = train_loop.train(
                    recipe,
                    "auto",
                    text,
                    folder / "checkpoint",
                    resume=half == 1,
                    stop=lambda step, half=half: half == 0 and step == 3,
                    progress=False,
                    processes=Parallel(kind, "cpu"),
                )
                end()
            os.environ |= {"WORLD_SIZE": str(started)}
            start(rank, started, folder.with_name(f"{folder.name}.again")) if half == 0 else None
        assert run is not None
        return {"losses": run.losses, "held_out": run.held_out, "weights": run.model and run.model.state_dict()}


def refusals(rank: int, folder: Path, ports: list[int]) -> list[str]:
    """The example's errors for a model and a batch that two processes cannot shard."""
    from examples.training.parallel import Parallel, ParallelError
    from foundry_kernels.models import ModelConfig

    said = []
    for index, (kind, heads, batch) in enumerate([("tp", 3, 4), ("fsdp", 2, 3), ("cp", 2, 3)]):
        end()
        os.environ["MASTER_PORT"] = str(ports[index])
        processes = Parallel(kind, "cpu")
        try:
            processes.check(ModelConfig(dim=24, n_layers=1, n_heads=heads, vocab_size=8), batch, 6)
        except ParallelError as error:
            said.append(str(error))
    return said


refusals.GROUPS = 3  # type: ignore[attr-defined]
