"""Context parallelism of a model: every sequence is sharded over processes, attention is `ring_attention`, and linear
attention runs from the states that `sharded_gated_delta_rule` finds."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from foundry_kernels.core.autograd import apply
from foundry_kernels.distributed.linear_attention import sharded_gated_delta_rule, sharded_short_conv1d
from foundry_kernels.distributed.ring import ring_attention
from foundry_kernels.distributed.zigzag import Place, sequence_positions, shard_sequence
from foundry_kernels.models import ModelConfig, Transformer
from foundry_kernels.models.call import Call, Positions
from foundry_kernels.models.inputs import check_tokens
from foundry_kernels.nn import Attention, GatedDeltaNet
from foundry_kernels.nn._masks import packed_positions


def context_parallel(model: Transformer, mesh: DeviceMesh) -> Transformer:
    r"""Makes a model run on sequences that are sharded over the processes of `mesh`, and returns it.

    All processes then call it together, each with its shards of tokens, targets and token types (`shard_sequence`);
    `cu_seqlens` of packed documents describe the whole sequence. Logits are those of the local tokens. The loss is the
    mean over the tokens of all processes and the same on each. Everything except attention only needs local tokens.

    Keys and values of attention go round (:func:`ring_attention`). Linear attention (`layer_types`) takes the same two
    chunks, so no token has to be sent to another place: a process sends what each chunk does to the state, and the
    convolution's last W - 1 inputs in each chunk. A layer with H_v heads of :math:`D_k \times D_v` and C channels sends
    to each other process, for each sequence and chunk, ``H_v D_k (D_k + D_v)`` float32 numbers and ``C (W - 1)``
    numbers of the model's dtype, and as many gradients backward. That does not grow with the number of tokens.

    Gradients are distributed as under data parallelism: a process has n times its part of the gradient, and the mean
    over the processes is the gradient of the loss. `DistributedDataParallel` and `fully_shard` over `mesh` compute that
    mean. With additional data parallelism, pass them both dimensions:

        mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "cp"))
        context_parallel(model, mesh["cp"])
        fully_shard(model, mesh=mesh["dp", "cp"])   # shards over cp, replicates over dp
        _, loss = model(shard_sequence(tokens, mesh["cp"]), shard_sequence(targets, mesh["cp"]))

    Apply tensor parallelism first: ``parallelize_module(model, mesh["tp"], tensor_parallel_plan(model, mesh["tp"]))``.

    Args:
        model: of this package. (`Transformer.from_hf` makes one of a model of transformers.)
        mesh: of one dimension (of a larger mesh, the slice for context parallelism).

    Raises:
        TypeError: `model` is not a Transformer, `mesh` no DeviceMesh.
        ValueError: the mesh has several dimensions, the model is sharded already, or it has an option that combines all
            tokens outside of attention: relative positions, a context, router losses.
    """
    if not isinstance(model, Transformer):
        raise TypeError(f"model must be a foundry_kernels.models.Transformer; got {type(model).__name__}")
    shard = _Shard(mesh)
    if model.sequence_shard is not None:
        raise ValueError("model must not be context parallel yet; got one that is")
    _check_config(model.config)
    for module in model.modules():
        if isinstance(module, Attention):
            module.attend = shard.attend
        elif isinstance(module, GatedDeltaNet):
            module.sharded = shard
    model.sequence_shard = shard
    return model


def _check_config(config: ModelConfig) -> None:
    refused = {
        "positions=relative": (config.relative, "relative positions are not sharded"),
        "context_dim": (config.context_dim is not None, "a context is not sharded"),
        "load_balancing_coef or router_z_coef": (config.balances, "the routers' losses would be those of parts"),
    }
    for name, (given, reason) in refused.items():
        if given:
            raise ValueError(f"{name} is not context parallel: {reason}")


class _Shard:
    """A `SequenceShard` and a `ShardedDelta`."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.place, self.mesh = Place.of(mesh), mesh
        # Communication is not part of a compiled graph: the graph breaks around it.
        self.attend = torch.compiler.disable(self._attend)
        self.short_conv1d = torch.compiler.disable(self._convolve)
        self.gated_delta_rule = torch.compiler.disable(self._delta_rule)

    def check(self, call: Call, config: ModelConfig, weight: Tensor) -> None:
        for name in ("cache", "attn_mask", "lengths", "last_only"):
            value = getattr(call, name)
            if value is not None and value is not False:
                raise ValueError(f"{name} must not be given to a context parallel model; got {value!r:.80}")
        check_tokens(call._replace(cu_seqlens=None, max_seqlen=None), config, weight)
        tokens = call.tokens
        if tokens.shape[1] % 2:
            raise ValueError(f"tokens must be two chunks of a sequence; got {tokens.shape[1]} tokens (shard_sequence)")
        past = config.linear_conv_size - 1 if config.linear_layers else 0
        if tokens.shape[1] // 2 < past:
            raise ValueError(
                f"tokens must be two chunks of at least linear_conv_size - 1 = {past} tokens, which the convolution of "
                f"linear attention hands on; got chunks of {tokens.shape[1] // 2}"
            )
        whole = tokens[:, :1].expand(-1, tokens.shape[1] * self.place.size)
        check_tokens(call._replace(tokens=whole), config, weight)

    def positions(self, call: Call) -> Positions:
        length, cu_seqlens = call.tokens.shape[1] * self.place.size, call.cu_seqlens
        if cu_seqlens is None:
            return Positions(sequence_positions(length, self.mesh, call.tokens.device), None, call.max_seqlen)
        positions = shard_sequence(packed_positions(cu_seqlens, length), self.mesh, 0)
        return Positions(positions, cu_seqlens.cpu(), call.max_seqlen)  # once, not in each layer

    def mean(self, total: Tensor, count: Tensor) -> Tensor:
        mean: Tensor = apply(_Mean, total, count, self.mesh.get_group(), self.place.size)
        return mean

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, **options: Any) -> Any:
        if options.pop("return_stats", False):
            raise ValueError("return_stats must be False if a sequence is sharded over processes; got True")
        return ring_attention(q, k, v, self.mesh, cu_seqlens=cu_seqlens, **options)

    def _convolve(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, **options: Any
    ) -> Tensor:
        return sharded_short_conv1d(x, weight, bias, activation, self.mesh, **options)

    def _delta_rule(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any) -> Tensor:
        return sharded_gated_delta_rule(q, k, v, g, beta, self.mesh, **options)


class _Mean(torch.autograd.Function):
    """The mean over processes, each of which contributes n times its part of the gradient."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, count: Tensor, group: dist.ProcessGroup, size: int) -> Tensor:
        both = torch.stack([total.double(), count.double()])
        dist.all_reduce(both, group=group)
        counted = both[1].clamp_min(1.0)
        ctx.save_for_backward(size / counted)
        return (both[0] / counted).to(total.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (scale,) = ctx.saved_tensors
        return grad * scale.to(grad.dtype), None, None, None
