"""Trains the model whole and sharded."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from processes import SIZE, Collectives, end, full

STEPS, BATCH, LENGTH = 4, 4, 13  # an odd length, which two processes cannot halve


def make_model(**fields: Any) -> nn.Module:
    from foundry_kernels.models import ModelConfig, Transformer

    torch.manual_seed(0)
    return Transformer(ModelConfig(32, 2, 4, 2, vocab_size=64, max_seq_len=32, init_std=0.2, **fields))


def batches() -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        yield torch.randint(8, (BATCH, LENGTH + 1), generator=generator)


def loss_of_ours(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch[:, :-1], batch[:, 1:])[1]


def loss_of_log_probs(model: nn.Module, batch: Tensor) -> Tensor:
    """The same loss, from the tokens' log-probabilities."""
    from foundry_kernels.models import LogProbs

    return -model(batch[:, :-1], batch[:, 1:], return_log_probs=LogProbs()).mean()


def train(
    model: nn.Module,
    *,
    share: Callable[[Tensor], Tensor] = lambda batch: batch,
    accumulating: Callable[[nn.Module, bool], Any] = lambda model, last: contextlib.nullcontext(),
    parts: int = 1,
    around: Callable[[], Any] = contextlib.nullcontext,
    loss_of: Callable[[nn.Module, Tensor], Tensor] = loss_of_ours,
    lr: float = 0.1,
) -> dict[str, Any]:
    """Losses, gradients and final weights of a few steps. The gradients are by step and parameter."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    losses: list[Tensor] = []
    grads: list[dict[str, Tensor]] = []
    for batch in batches():
        total = torch.zeros(())
        for index, part in enumerate(batch.chunk(parts)):
            mine = share(part)
            with around(), accumulating(model, index == parts - 1):
                loss = loss_of(model, mine)
                (loss / parts).backward()
            total += full(loss) / parts
        if dist.is_initialized():
            dist.all_reduce(total)
            total /= dist.get_world_size()
        losses.append(total)
        names = {name.removeprefix("module."): p for name, p in model.named_parameters()}
        grads.append({name: full(p.grad) for name, p in names.items()})
        optimizer.step()
        optimizer.zero_grad()
    weights = {name.removeprefix("module."): full(p) for name, p in model.named_parameters()}
    return {"losses": losses, "grads": grads, "weights": weights}


class Train:
    """Trains the model with the sharding of `examples/training/parallel.py`."""

    GROUPS = 1

    def __init__(
        self, kind: str, parts: int = 1, loss_of: Callable[[nn.Module, Tensor], Tensor] = loss_of_ours
    ) -> None:
        self.kind, self.parts, self.loss_of = kind, parts, loss_of

    def __call__(self, rank: int, folder: Path, ports: list[int]) -> dict[str, Any]:
        from examples.training.parallel import Parallel

        end()
        os.environ["MASTER_PORT"] = str(ports[0])
        processes = Parallel(self.kind, "cpu")
        model = processes.divide(make_model())
        with Collectives() as collectives:
            how: dict[str, Any] = {"accumulating": processes.accumulating, "parts": self.parts, "loss_of": self.loss_of}
            result = train(model, share=processes.share, **how)
        return result | {"collectives": collectives.counts}


def norms_of_heads(rank: int, folder: Path, ports: list[int]) -> dict[str, Any]:
    """Norms of queries and keys under tensor parallelism over two processes, with FSDP2 over the others, and with
    accumulated gradients of two parts of a batch."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import parallelize_module

    from foundry_kernels.distributed import tensor_parallel_plan

    replicas = dist.get_world_size() // 2
    mesh = dist.device_mesh.init_device_mesh("cpu", (replicas, 2), mesh_dim_names=("dp", "tp"))
    model: Any = make_model(qk_norm=True)
    model = parallelize_module(model, mesh["tp"], tensor_parallel_plan(model, mesh["tp"]))
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh["dp"])
    return train(model, share=lambda batch: batch[rank // 2 :: replicas], parts=2)


def loss_parallel(rank: int, folder: Path, ports: list[int]) -> dict[str, Any]:
    """Tensor parallelism in which no process has all logits."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import loss_parallel, parallelize_module

    from foundry_kernels.distributed import tensor_parallel_plan

    mesh = dist.device_mesh.init_device_mesh("cpu", (SIZE,))
    model = make_model()
    model = parallelize_module(model, mesh, tensor_parallel_plan(model, mesh, loss_parallel=True))
    with torch.no_grad():
        assert model(torch.zeros(1, 4, dtype=torch.int64)).placements == (Shard(2),)
    return train(model, around=loss_parallel, loss_of=lambda m, batch: _of_logits(m, batch)[1])


def _of_logits(model: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor]:
    return model(batch[:, :-1], batch[:, 1:], return_logits=True)


def step_collectives(rank: int, folder: Path, ports: list[int]) -> dict[str, dict[str, int]]:
    """The collectives of one step of the model under tensor parallelism, without the optimizer: with logits and
    without."""
    from torch.distributed.tensor.parallel import parallelize_module

    from foundry_kernels.distributed import tensor_parallel_plan

    mesh = dist.device_mesh.init_device_mesh("cpu", (SIZE,))
    model = make_model()
    model = parallelize_module(model, mesh, tensor_parallel_plan(model, mesh))
    found = {}
    for name, loss_of in (("logits", lambda m, batch: _of_logits(m, batch)[1]), ("loss", loss_of_ours)):
        with Collectives() as collectives:
            loss_of(model, next(batches())).backward()
        found[name] = dict(collectives.counts)
    return found


#: Choices that the plan shards, combined in few models.
SHARDED: dict[str, dict[str, Any]] = {
    "gpt2": {"positions": "learned", "norm": "layer_norm", "activation": "gelu_tanh", "attention_bias": True}
    | {"mlp_bias": True, "output_bias": True},
    "falcon": {"norm": "layer_norm", "activation": "gelu", "parallel_residual": True, "shared_attention_norm": True}
    | {"sliding_window": 5},
    "neox": {"norm": "layer_norm", "activation": "geglu", "parallel_residual": True, "embedding_norm": True},
    "post": {"positions": "none", "norm_placement": "post", "activation": "relu", "qk_norm": True},
    "qwen3": {"qk_norm": True, "sliding_window": 5},
}


def choices(rank: int, folder: Path, ports: list[int]) -> dict[str, tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Loss and gradients of one step of models with other choices, under tensor parallelism and in one process."""
    from torch.distributed.tensor.parallel import parallelize_module

    from foundry_kernels.distributed import tensor_parallel_plan

    mesh = dist.device_mesh.init_device_mesh("cpu", (SIZE,))

    def step(model: nn.Module) -> dict[str, Tensor]:
        loss = loss_of_ours(model, next(batches()))
        loss.backward()
        return {"loss": full(loss)} | {name: full(p.grad) for name, p in model.named_parameters()}

    found = {}
    for name, fields in SHARDED.items():
        whole = make_model(**fields)
        with torch.no_grad():
            for parameter in whole.parameters():  # biases of 0 would hide errors
                parameter.add_(0.1 * torch.randn(parameter.shape))
        model = copy.deepcopy(whole)
        model = parallelize_module(model, mesh, tensor_parallel_plan(model, mesh))
        found[name] = (step(model), step(whole))
    return found


def low_precision(rank: int, folder: Path, ports: list[int]) -> dict[str, Any]:
    """One step under FSDP2 with bfloat16 parameters and float32 sums, and the same step without FSDP2."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model: Any = make_model()
    for module in (*model.layers, model):
        fully_shard(module, mp_policy=policy)
    halves = next(batches()).chunk(SIZE)
    loss_of_ours(model, halves[rank]).backward()
    whole = make_model()
    for parameter in whole.parameters():
        parameter.data = parameter.data.bfloat16()
    expected = {name: torch.zeros(p.shape) for name, p in whole.named_parameters()}
    for half in halves:
        whole.zero_grad()
        loss_of_ours(whole, half).backward()
        for name, parameter in whole.named_parameters():
            assert parameter.grad is not None
            expected[name] += parameter.grad.float() / SIZE
    return {"grads": {name: full(p.grad) for name, p in model.named_parameters()}, "expected": expected}
