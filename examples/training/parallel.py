"""Training with several processes, started by torchrun: `train.py --parallel ddp`, `fsdp`, `tp` or `cp`.

    torchrun --nproc-per-node 2 examples/train.py --parallel fsdp

Any number of processes trains the same model as one process would. `--batch` is the total batch; with `cp`, each
process has a part of every sequence. A checkpoint does not depend on the sharding, so any number of processes can
continue it with any sharding.
"""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from examples.training.checkpoint import CheckpointError, load, save
from foundry_kernels.diagnostics import SigmaReparam
from foundry_kernels.models import ModelConfig, Transformer

T = TypeVar("T")
KINDS = ("ddp", "fsdp", "tp", "cp")
PROGRESS = "progress.pt"


class ParallelError(Exception):
    """Processes cannot train together; the message is for the user."""


class Single:
    """A single process with the whole model, the whole batch and a checkpoint in one file."""

    rank, size = 0, 1
    suffix = ".pt"
    #: For `clip_grad_norm_`. Under tensor parallelism, the gradients of norms are partial sums, which torch 2.11's
    #: foreach form does not support.
    foreach: bool | None = None

    @property
    def first(self) -> bool:
        """Whether this process prints and writes for all."""
        return self.rank == 0

    def same(self, make: Callable[[], T]) -> T:
        """Returns the first process's result of `make`."""
        return make()

    def check(self, model: ModelConfig, batch: int, seq_len: int) -> None:
        """Raises ParallelError if the model, the batch or its sequences cannot be sharded."""

    def divide(self, model: Transformer) -> nn.Module:
        """The module to train."""
        return model

    def share(self, batch: Tensor) -> Tensor:
        """This process's part of a batch."""
        return batch

    def window(self, tokens: Tensor) -> Tensor:
        """This process's part of sequences that all processes evaluate."""
        return tokens

    def accumulating(self, model: nn.Module, last: bool) -> AbstractContextManager[Any]:
        """Context for the backward pass of a part of a batch: only the last one needs to exchange gradients."""
        return nullcontext()

    def agree(self, loss: Tensor, stop: bool) -> tuple[float, bool]:
        """The batch's loss, and whether any process wants to stop."""
        return loss.item(), stop

    def whole(self, model: nn.Module) -> Transformer:
        """The unsharded model; under DDP, FSDP and tensor parallelism a copy with plain weights."""
        assert isinstance(model, Transformer)
        return model

    def save(
        self, path: Path, settings: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer, progress: Any
    ) -> None:
        """Writes a checkpoint to `path` atomically."""
        save(path, settings, {"model": model.state_dict(), "optimizer": optimizer.state_dict(), **progress})

    def load(self, path: Path, settings: dict[str, Any]) -> dict[str, Any]:
        """Returns the `progress` given to `save`, and the state for `restore`."""
        return load(path, settings)

    def restore(self, path: Path, state: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])


class Parallel(Single):
    """One of the processes started by torchrun. All of them write to one checkpoint folder."""

    suffix = ""

    def __init__(self, kind: str, device: str) -> None:
        if not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
            raise ParallelError(
                f"--parallel {kind} needs processes that torchrun starts: "
                f"torchrun --nproc-per-node 2 examples/train.py --parallel {kind} ..."
            )
        self.kind = kind
        self.foreach = False if kind == "tp" else None
        if device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.mesh = dist.device_mesh.init_device_mesh(device, (self.size,))

    def end(self) -> None:
        dist.destroy_process_group()

    def same(self, make: Callable[[], T]) -> T:
        answer: list[Any] = [None]
        if self.first:
            try:
                answer = [make()]
            except Exception as error:  # all processes must raise it, or the others would wait forever
                answer = [error]
        dist.broadcast_object_list(answer)
        if isinstance(answer[0], Exception):
            raise answer[0]
        return answer[0]

    def check(self, model: ModelConfig, batch: int, seq_len: int) -> None:
        if model.selection_bias:
            raise ParallelError("selection_bias: each process would update it with only its own tokens")
        if self.kind in ("tp", "cp"):
            from foundry_kernels.distributed import context_parallel, sequence_positions, tensor_parallel_plan

            with torch.device("meta"):
                skeleton = Transformer(model, "reference")
            try:
                if self.kind == "tp":
                    tensor_parallel_plan(skeleton, self.mesh)
                else:
                    context_parallel(skeleton, self.mesh)
                    sequence_positions(seq_len, self.mesh)
            except ValueError as error:
                raise ParallelError(f"--parallel {self.kind} with {self.size} processes: {error}") from None
        elif batch % self.size:
            raise ParallelError(f"--batch / --accumulate must be a multiple of the {self.size} processes; got {batch}")

    def divide(self, model: Transformer) -> nn.Module:
        if self.kind == "ddp":
            return nn.parallel.DistributedDataParallel(model)
        if self.kind == "tp":
            from torch.distributed.tensor.parallel import parallelize_module

            from foundry_kernels.distributed import tensor_parallel_plan

            return parallelize_module(model, self.mesh, tensor_parallel_plan(model, self.mesh))
        from torch.distributed.fsdp import fully_shard

        if self.kind == "cp":
            from foundry_kernels.distributed import context_parallel

            context_parallel(model, self.mesh)
        for layer in model.layers:
            fully_shard(layer, mesh=self.mesh)
        fully_shard(model, mesh=self.mesh)
        return model

    def share(self, batch: Tensor) -> Tensor:
        if self.kind in ("tp", "cp"):
            return self.window(batch)
        return batch[self.rank :: self.size]

    def window(self, tokens: Tensor) -> Tensor:
        if self.kind != "cp":
            return tokens
        from foundry_kernels.distributed import shard_sequence

        return shard_sequence(tokens, self.mesh)

    def accumulating(self, model: nn.Module, last: bool) -> AbstractContextManager[Any]:
        if isinstance(model, nn.parallel.DistributedDataParallel) and not last:
            return model.no_sync()
        if self.kind in ("fsdp", "cp"):
            model.set_requires_gradient_sync(last)  # type: ignore[operator]
        return nullcontext()

    def agree(self, loss: Tensor, stop: bool) -> tuple[float, bool]:
        both = torch.stack([loss.detach(), torch.full_like(loss, float(stop), requires_grad=False)])
        dist.all_reduce(both)
        return both[0].item() / self.size, both[1].item() > 0

    def whole(self, model: nn.Module) -> Transformer:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        sharded = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        assert isinstance(sharded, Transformer)
        device = next(model.parameters()).device
        unsharded = Transformer(sharded.config, sharded.backends, device=device)
        reparam = SigmaReparam(unsharded) if SigmaReparam.is_in(state) else None
        unsharded.load_state_dict(state)
        if reparam is not None:
            reparam.remove()
        return unsharded

    def save(
        self, path: Path, settings: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer, progress: Any
    ) -> None:
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.state_dict_saver import save as save_sharded

        written, old = path.with_name(path.name + ".new"), path.with_name(path.name + ".old")
        if self.first:
            shutil.rmtree(written, ignore_errors=True)
        dist.barrier()
        try:
            save_sharded(_state(model, optimizer), checkpoint_id=written)
        except CheckpointException as error:
            raise CheckpointError(f"cannot write the checkpoint {path}: {_first_line(error)}") from None
        if self.first:
            save(written / PROGRESS, settings, progress)
            shutil.rmtree(old, ignore_errors=True)
            if path.exists():
                path.rename(old)
            written.rename(path)
            shutil.rmtree(old, ignore_errors=True)
        dist.barrier()

    def load(self, path: Path, settings: dict[str, Any]) -> dict[str, Any]:
        return load(path / PROGRESS, settings)

    def restore(self, path: Path, state: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.state_dict import set_state_dict
        from torch.distributed.checkpoint.state_dict_loader import load as load_sharded

        found = _state(model, optimizer)
        try:
            load_sharded(found, checkpoint_id=path)
        except (CheckpointException, OSError, pickle.UnpicklingError) as error:
            raise CheckpointError(f"{path} is damaged: {_first_line(error)}") from None
        set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """State of model and optimizer by parameter name, independent of the sharding."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    parameters, moments = get_state_dict(model, optimizer)
    return {"model": parameters, "optimizer": moments}


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:120]}"
