"""Expert parallelism: mixtures of experts alone, and the training of models."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from processes import full
from processes.training import make_model, train

#: Mixtures of four experts, and how many of 14 tokens each process has, repeated cyclically.
MIXTURES: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "even": ({}, (7,)),
    "uneven": ({"bias": True, "router_bias": True, "shared_width": 8, "shared_gate": True}, (5, 9)),
    "no tokens": ({"weight_inputs": True, "scoring": "sigmoid"}, (0, 14)),
    "no rows": ({"router_bias": True, "selection_bias": True}, (7,)),  # the first two experts get all
}
#: Fields of the model by the number of processes. With four processes, the balance is over two by two.
FIELDS: dict[int, dict[str, Any]] = {
    2: {"n_experts": 4, "load_balancing_coef": 0.1, "router_z_coef": 0.01},
    4: {"n_experts": 4, "load_balancing_coef": 0.0, "router_z_coef": 0.01},
}


def mixtures(rank: int, folder: Path, ports: list[int]) -> dict[str, tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Results, statistics and gradients for a process's own tokens, and for the same tokens in a process with all
    tokens."""
    import foundry_kernels as fk
    from foundry_kernels.distributed import expert_parallel

    size = dist.get_world_size()
    mesh = dist.device_mesh.init_device_mesh("cpu", (size,))
    found = {}
    for name, (options, shares) in MIXTURES.items():
        torch.manual_seed(0)
        whole = fk.nn.MoE(16, 8, 4, 2, **options)
        if name == "no rows":
            with torch.no_grad():
                whole.router.bias.copy_(torch.tensor([50.0, 50.0, 0.0, 0.0]))
        counts = [shares[i % len(shares)] for i in range(size)]
        x, dy = torch.randn(sum(counts), 16), torch.randn(sum(counts), 16)
        divided = expert_parallel(copy.deepcopy(whole), mesh)
        own = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
        even = len(shares) == 1
        found[name] = _step(divided, x[own], dy[own], size, even), _step(whole, x, dy, 1, even, own)
    return found


def _step(moe: nn.Module, x: Tensor, dy: Tensor, size: int, even: bool, own: slice = slice(None)) -> dict[str, Tensor]:
    from foundry_kernels.nn import load_balancing_loss, router_z_loss

    x = x.clone().requires_grad_()
    y, stats = moe(x, return_stats=True)
    # The processes' losses are means of means: the mean over all tokens if each process has as many.
    losses = {"balance": load_balancing_loss(stats), "z": router_z_loss(stats)} if even else {}
    # Data parallelism: the loss is the mean over n processes, so each has n times its part of the gradient.
    ((y * dy).sum() * size + sum(losses.values())).backward()
    grads = {}
    for name, parameter in moe.named_parameters():
        grads[name] = full(parameter.grad)
        if size > 1 and "experts" not in name:
            dist.all_reduce(grads[name])
            grads[name] /= size
    return {"y": y.detach()[own], "dx": x.grad[own] / size, **grads} | {n: loss.detach() for n, loss in losses.items()}


def trained(rank: int, folder: Path, ports: list[int]) -> dict[str, Any]:
    """A model whose experts are sharded over two processes, with FSDP2. With four processes, FSDP2 shards experts over
    the other dimension of the mesh, and everything else over both."""
    from torch.distributed.fsdp import fully_shard

    from foundry_kernels.distributed import expert_parallel
    from foundry_kernels.nn import MoE

    size = dist.get_world_size()
    mesh = dist.device_mesh.init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "ep"))
    model: Any = expert_parallel(make_model(**FIELDS[size]), mesh["ep"])
    mixtures = [module for module in model.modules() if isinstance(module, MoE)]
    for moe in mixtures if size > 2 else ():
        fully_shard(moe.experts, mesh=mesh["dp"])
    experts = {p for moe in mixtures for p in moe.experts.parameters()} if size == 2 else set()
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh["dp", "ep"] if size > 2 else mesh["ep"], ignored_params=experts)
    return train(model, share=lambda batch: batch[rank::size])
