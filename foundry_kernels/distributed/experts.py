"""Expert parallelism of a model: each process has some experts of every mixture and runs them on the tokens of all
processes."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from foundry_kernels.core.autograd import apply
from foundry_kernels.distributed.zigzag import check_mesh
from foundry_kernels.nn.moe import MoE, RunRows, dispatch, gather_rows
from foundry_kernels.nn.router import RouterStats
from foundry_kernels.ops.combine_experts import combine_experts

M = TypeVar("M", bound=nn.Module)


def expert_parallel(model: M, mesh: DeviceMesh) -> M:
    """Shards the experts of every :class:`foundry_kernels.nn.MoE` of a model over the processes of `mesh`, and returns
    the model.

    Of E experts, process r of n has E / n, starting with number r E / n: the parameters of `experts` become DTensors,
    ``Shard(0)``, with the values of the first process. All processes call the model together and equally often, each
    with its own tokens, as under data parallelism. A layer sends each token to its experts and receives the results:
    two all-to-alls of T k rows forward and two backward, and one of the numbers of rows, which synchronizes with the
    host. No token is dropped, and a process may receive none. Routers and shared experts are replicated.

    Gradients are those of data parallelism: gradients of experts are already the mean over the processes. All others
    are left to `fully_shard` over `mesh`, which must ignore the experts, or to your own averaging:

        expert_parallel(model, mesh)
        experts = {p for m in model.modules() if isinstance(m, fk.nn.MoE) for p in m.experts.parameters()}
        fully_shard(model, mesh=mesh, ignored_params=experts)

    The statistics of the routers are means over the processes, and so are the losses made of them. Their gradient is
    that of a process's own tokens, n times its part, as always under data parallelism.

    Args:
        model: with mixtures of this package, on the device of `mesh`.
        mesh: of one dimension (of a larger mesh, the slice for expert parallelism).

    Raises:
        TypeError: `model` is no module, `mesh` no DeviceMesh.
        ValueError: the mesh has several dimensions, its size does not divide the experts of a mixture, the model has no
            mixture or is expert parallel already. Nothing is sharded then.

    Lepikhin et al., "GShard", 2020, arXiv:2006.16668.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module; got {type(model).__name__}")
    check_mesh(mesh, "expert")
    mixtures = {name or "model": module for name, module in model.named_modules() if isinstance(module, MoE)}
    if not mixtures:
        raise ValueError(f"model must have a foundry_kernels.nn.MoE; {type(model).__name__} has none")
    for name, moe in mixtures.items():
        if moe.experts.exchange is not None:
            raise ValueError(f"model must not be expert parallel yet; {name} is")
        if moe.experts.n_experts % mesh.size():
            raise ValueError(
                f"n_experts of {name} must be a multiple of the {mesh.size()} processes that share the experts; "
                f"got {moe.experts.n_experts}"
            )
    exchange = _Exchange(mesh)
    for moe in mixtures.values():
        for name, parameter in list(moe.experts.named_parameters()):
            shard = distribute_tensor(parameter.detach(), mesh, [Shard(0)])
            moe.experts.register_parameter(name, nn.Parameter(shard, requires_grad=parameter.requires_grad))
        moe.experts.exchange = exchange
    return model


class _Exchange:
    """An `ExpertExchange`."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh, self.size = mesh, mesh.size()
        # The number of received rows is read from the device, so a compiled graph breaks here.
        self.run = torch.compiler.disable(self._run)

    def own(self, parameter: Any) -> Tensor:
        local: Tensor = apply(_Mean, parameter.to_local(), self.size)
        return local

    def _run(self, rows: Tensor, counts: Tensor, run: RunRows, backend: str) -> Tensor:
        group, own = self.mesh.get_group(), counts.shape[0] // self.size
        arriving = torch.empty_like(counts)  # by process and by expert of ours
        dist.all_to_all_single(arriving, counts, group=group)
        sent, got = (n.view(self.size, own).sum(1).tolist() for n in (counts, arriving))
        arrived = apply(_AllToAll, rows, got, sent, group)
        experts = torch.arange(own, device=counts.device).repeat(self.size)
        where = dispatch(experts.repeat_interleave(arriving, output_size=sum(got)).unsqueeze(1), own)
        y = combine_experts(run(gather_rows(arrived, where, backend), where.offs), None, where.slots, backend=backend)
        back: Tensor = apply(_AllToAll, y, sent, got, group)
        return back

    def mean(self, stats: RouterStats) -> RouterStats:
        summed = torch.cat([stats.shares, stats.probabilities, stats.z.view(1)]).detach()
        summed = collectives.wait_tensor(collectives.all_reduce(summed, "sum", (self.mesh, 0)))
        n = stats.shares.shape[0]
        shares, probabilities, z = (summed / self.size).split([n, n, 1])
        return RouterStats(
            shares,
            stats.probabilities + (probabilities - stats.probabilities.detach()),
            stats.z + (z.squeeze(0) - stats.z.detach()),
        )


class _Mean(torch.autograd.Function):
    """A process's experts, whose gradient is a sum over the tokens of all processes; this divides it by their
    number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int) -> Tensor:
        ctx.size = size
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] / ctx.size, None


class _AllToAll(torch.autograd.Function):
    """Rows ``[sum(sent), D]`` by the process that they go to, to ``[sum(got), D]`` by the one that they come from."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, got: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.got, ctx.sent, ctx.group = got, sent, group
        y = x.new_empty(sum(got), x.shape[1])
        dist.all_to_all_single(y, x.contiguous(), got, sent, group=group)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return apply(_AllToAll, grads[0], ctx.sent, ctx.got, ctx.group), None, None, None
