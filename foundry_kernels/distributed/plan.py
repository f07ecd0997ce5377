"""How `foundry_kernels.models.Transformer` is sharded for tensor parallelism."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

from foundry_kernels.models import Transformer
from foundry_kernels.models.validate import refuse_choices
from foundry_kernels.nn._head import PLANNED_GRADIENT, PLANNED_HOOKS, PLANNED_INPUT, count_hooks


class SequenceParallelNorm(SequenceParallel):
    """torch's `SequenceParallel` for a norm that also takes a residual: both inputs are sharded along the sequence."""

    @staticmethod
    def _prepare_input_fn(
        sequence_sharding: tuple[Placement, ...], mod: nn.Module, inputs: tuple[Tensor, ...], device_mesh: DeviceMesh
    ) -> tuple[Any, ...]:
        prepare = SequenceParallel._prepare_input_fn
        return tuple(prepare(sequence_sharding, mod, (x,), device_mesh) for x in inputs)


class HeadParallelNorm(SequenceParallel):
    """torch's `SequenceParallel` for a per-head norm with sharded heads: the norms of queries and keys in Qwen3 and
    Gemma 3. Its input and output are plain tensors with the local heads; the gradient of its weight is the sum over the
    heads of all devices.

    It also works for patched models of transformers: use it in your own plan for `q_norm` and `k_norm`.
    """

    def __init__(self) -> None:
        super().__init__(sequence_dim=2, use_local_output=True)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module = super()._apply(module, device_mesh)
        setattr(module, PLANNED_GRADIENT, [Partial()] * device_mesh.ndim)
        return module


def _contiguous(x: Any) -> Any:
    """x, or a contiguous copy. A sequence that is gathered from uneven shards is not contiguous: each projection would
    copy it again, and torch 2.11 does not support it."""
    has_gaps = isinstance(x, DTensor) and not x._local_tensor.is_contiguous()
    return x.clone(memory_format=torch.contiguous_format) if has_gaps else x


class _Gathered(PrepareModuleInput):
    """torch's `PrepareModuleInput` for a block whose input is sharded along the sequence: gathers it."""

    def __init__(self) -> None:
        super().__init__(input_layouts=Shard(1), desired_input_layouts=Replicate())

    def _prepare_input_fn(self, inputs: Any, device_mesh: DeviceMesh) -> Any:
        return tuple(_contiguous(x) for x in super()._prepare_input_fn(inputs, device_mesh))


class _Scattering(RowwiseParallel):
    """torch's `RowwiseParallel` whose result is sharded along the sequence, and its gradient gathered."""

    def __init__(self) -> None:
        super().__init__(output_layouts=Shard(1), use_local_output=False)

    @staticmethod
    def _prepare_output_fn(
        output_layouts: Any, use_local_output: bool, mod: nn.Module, outputs: Any, device_mesh: DeviceMesh
    ) -> Any:
        if outputs.requires_grad and outputs.shape[1] % device_mesh.size():
            outputs.register_hook(_contiguous)
        return RowwiseParallel._prepare_output_fn(output_layouts, use_local_output, mod, outputs, device_mesh)


class VocabularyParallel(ColwiseParallel):
    """torch's `ColwiseParallel` for the head, whose loss is computed from its weight as well, without a call.

    It also works for patched models of transformers: use it in your own plan for `lm_head`.
    """

    @staticmethod
    def _prepare_input_fn(
        input_layouts: Any, desired_input_layouts: Any, mod: nn.Module, inputs: Any, device_mesh: DeviceMesh
    ) -> Any:
        prepare = ColwiseParallel._prepare_input_fn
        return _contiguous(prepare(input_layouts, desired_input_layouts, mod, inputs, device_mesh))

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module = super()._apply(module, device_mesh)
        setattr(module, PLANNED_HOOKS, count_hooks(module))
        setattr(module, PLANNED_INPUT, (device_mesh, self.input_layouts))
        return module


#: The fields of a model's configuration that need not have their defaults: any value (None), or these values.
SHARDED: dict[str, tuple[Any, ...] | None] = {
    **dict.fromkeys(("dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "vocab_size", "max_seq_len")),
    **dict.fromkeys(("init", "init_std")),
    **dict.fromkeys(("hidden_dim", "multiple_of", "ffn_dim_multiplier", "ffn_rule")),
    **dict.fromkeys(("norm_eps", "norm_round_before_weight", "norm_bias", "embedding_norm")),
    **dict.fromkeys(("rope_base", "rope_scaling", "rope_interleaved", "rope_dim", "sliding_window")),
    **dict.fromkeys(("attention_bias", "attention_out_bias", "mlp_bias", "output_bias")),
    **dict.fromkeys(("parallel_residual", "shared_attention_norm", "qk_norm")),
    "qk_norm_over": ("head",),
    "positions": ("rope", "learned", "none"),
    "norm": ("rms_norm", "layer_norm"),
    "norm_placement": ("pre", "post"),
    "activation": ("swiglu", "geglu", "geglu_tanh", "glu", "reglu", "gelu", "gelu_tanh", "silu", "relu"),
}
#: The reasons why other fields are not supported.
_REASONS = {
    "positions=alibi": "each device would need the slopes of its own heads",
    "positions=sinusoidal": "the table is not sharded along the sequence",
    "qk_norm_over": "a device has a part of the projection, and the norm is over the whole",
    **dict.fromkeys(("embedding_dropout", "residual_dropout"), "random numbers are not sharded"),
    "activation_dropout": "a device knows its columns by their number there, and would drop what the first one drops",
    "attention_dropout": "a device knows its heads by their number there, and would drop what the first one drops",
    "n_experts": "experts are sharded by expert_parallel, in a model that is not sharded otherwise",
    "tie_embeddings": "a shared matrix cannot be sharded in both ways",
}


def tensor_parallel_plan(
    model: Transformer, mesh: DeviceMesh, *, loss_parallel: bool = False
) -> dict[str, ParallelStyle]:
    """Returns the plan by which ``parallelize_module(model, mesh, plan)`` shards a model over the devices of `mesh`.

    Heads, the feed-forward width and the vocabulary are sharded; the residual stream and its norms are sharded along
    the sequence (Korthikanti et al., 2022, arXiv:2205.05198). A block gathers the sequence before attention and before
    the feed-forward part and scatters the sums after them: four collectives forward and four backward. Rotary
    embedding, SwiGLU and attention run on plain tensors, each device on its own heads.

    Inputs are the same on every device, and so are logits and loss. Parameters come from the first device of the mesh.
    A loss without logits (``return_logits=False``) needs two small all-reduces instead of a gather.

    Args:
        model: with an output matrix of its own.
        mesh: of one dimension (of a larger mesh, the slice for tensor parallelism).
        loss_parallel: leave the logits sharded along the vocabulary, as DTensors. A loss with ``return_logits=True``,
            forward and backward, must then be computed inside ``torch.distributed.tensor.parallel.loss_parallel()``.

    Raises:
        TypeError: `model` is not a Transformer.
        ValueError: the mesh has several dimensions, its size does not divide both numbers of heads, the model has an
            option that is not in `SHARDED`, or a parameter that the plan does not support.
    """
    if not isinstance(model, Transformer):
        raise TypeError(f"model must be a foundry_kernels.models.Transformer; got {type(model).__name__}")
    if mesh.ndim != 1:
        raise ValueError(f"mesh must have one dimension, that of tensor parallelism; got {mesh.ndim}: {mesh}")
    config, devices = model.config, mesh.size()
    refuse_choices(config, SHARDED, "is not sharded by this plan", _REASONS)
    for name, heads in (("n_heads", config.n_heads), ("n_kv_heads", config.kv_heads)):
        if heads % devices:
            raise ValueError(f"{name} must be a multiple of the {devices} devices that share the heads; got {heads}")

    plan: dict[str, ParallelStyle] = {
        "tok_embeddings": RowwiseParallel(
            input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False
        ),
        "norm": SequenceParallelNorm(),
        "output": VocabularyParallel(
            input_layouts=Shard(1),
            output_layouts=Shard(-1) if loss_parallel else Replicate(),
            use_local_output=not loss_parallel,
        ),
    }  # fmt: skip
    if config.positions == "learned":
        plan["pos_embeddings"] = RowwiseParallel(
            input_layouts=Replicate(), output_layouts=Shard(0), use_local_output=False
        )
    if config.embedding_norm:
        plan["embedding_norm"] = SequenceParallelNorm()
    for index in range(config.n_layers):
        plan |= {
            f"layers.{index}.{name}": style
            for name, style in {
                "attention_norm": SequenceParallelNorm(),
                "attention": _Gathered(),
                "attention.wq": ColwiseParallel(),
                "attention.wk": ColwiseParallel(),
                "attention.wv": ColwiseParallel(),
                "attention.q_norm": HeadParallelNorm(),
                "attention.k_norm": HeadParallelNorm(),
                "attention.wo": _Scattering(),
                "ffn_norm": SequenceParallelNorm(),
                "feed_forward": _Gathered(),
                "feed_forward.w1": ColwiseParallel(),
                "feed_forward.w3": ColwiseParallel(),
                "feed_forward.w2": _Scattering(),
            }.items()
        }
    # Models without a gate, a norm or a final norm have fewer modules.
    modules = {name for name, _ in model.named_modules()}
    for name, _ in model.named_parameters():
        module, _, own = name.rpartition(".")
        if module not in plan or own not in ("weight", "bias"):
            raise ValueError(f"{name} is not sharded by this plan: it is not a parameter of a Transformer")
    return {name: style for name, style in plan.items() if name in modules}
