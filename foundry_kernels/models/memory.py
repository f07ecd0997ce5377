"""The memory of a training step, from a configuration."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from foundry_kernels.core.checks import check_int
from foundry_kernels.models.config import ModelConfig
from foundry_kernels.models.count import Parts
from foundry_kernels.models.transformer import Transformer
from foundry_kernels.nn import MLP, Attention, GatedDeltaNet, GatedMLP, LayerNorm, MoE, RMSNorm
from foundry_kernels.nn._backend import Backend

#: Numbers that an optimizer stores for each parameter, in the parameter's dtype, as in torch.
OPTIMIZERS = {"adamw": 2, "adam": 2, "sgd": 0, "sgd_momentum": 1}
_PARTS: dict[str, Any] = {
    "attention": (Attention, GatedDeltaNet),
    "feed_forward": (GatedMLP, MLP, MoE),
    "norms": (RMSNorm, LayerNorm),
}


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes of a training step, each by part of the model.

    Attributes:
        weights, gradients, optimizer: for the parameters; see :func:`foundry_kernels.models.count.parameters_by_part`.
        activations: tensors that the forward pass saves for the backward pass, by the module that saves them first.
            "norms" includes the residual stream. "head" includes everything that the loss saves: with fused kernels the
            gradients of the last hidden states and the head's matrix, without them the logits.
    """

    weights: Parts
    gradients: Parts
    optimizer: Parts
    activations: Parts

    @property
    def total(self) -> int:
        return sum(parts.total for parts in (self.weights, self.gradients, self.optimizer, self.activations))


def training_bytes(
    config: ModelConfig,
    batch: int,
    length: int,
    *,
    dtype: torch.dtype = torch.float32,
    autocast: torch.dtype | None = None,
    optimizer: str | float = "adamw",
    backend: Backend = "auto",
    context_length: int | None = None,
    device: str = "cpu",
) -> TrainingMemory:
    """Returns the bytes that a training step of ``[batch, length]`` tokens holds at the start of its backward pass: the
    weights, their gradients (which exist from the second micro-batch on), the optimizer's state and the saved
    activations.

    Activations are counted, not estimated: the forward pass and the loss run on fake tensors, and the storages that
    autograd saves are added up, each once, without the parameters. So the count is exact for every configuration and
    backend, and takes the host time of one forward pass.

    Not counted are temporary tensors of the running operation, such as gradients of activations and a chunk of the
    logits (the peak of a model with 4 layers is less than 20 % above the total, with more layers less), the tables of
    positions, and the allocator's overhead.

    Args:
        batch, length: number of sequences, and tokens of each.
        dtype: the dtype of parameters and gradients and, without autocast, of activations.
        autocast: the dtype of ``torch.autocast``, whose copies of the weights count as activations of their part; None
            is no autocast.
        optimizer: "adamw", "adam", "sgd" or "sgd_momentum", with torch's state, or bytes for each parameter: 12 for
            float32 moments and a float32 copy of the weights.
        backend: as for :class:`Transformer`. "auto" is what this installation runs on `device`: fused kernels, or the
            reference without them.
        context_length: for a model with `context_dim`, the tokens of the context; None is `length`. The context's
            gradients are not counted.
        device: the device of the fake tensors: "cpu", or "cuda" if torch has a GPU.

    Raises:
        TypeError, ValueError: as :class:`Transformer` and its forward pass; an unknown optimizer.
        BackendUnavailable: a named backend does not support the device or dtype.
    """
    check_int("batch", batch, 1)
    check_int("length", length, 1)
    for name, given in (("dtype", dtype), ("autocast", autocast)):
        if not isinstance(given, torch.dtype) and (name, given) != ("autocast", None):
            raise TypeError(f"{name} must be a torch.dtype; got {given!r:.60}")
    parameters = config.parameters_by_part()
    weights = parameters.times(dtype.itemsize)
    if isinstance(optimizer, str):
        if optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer must be one of {', '.join(OPTIMIZERS)} or bytes; got {optimizer!r}")
        state = weights.times(OPTIMIZERS[optimizer])
    elif optimizer < 0:
        raise ValueError(f"optimizer must be at least 0 bytes for each parameter; got {optimizer}")
    else:
        state = Parts({name: round(optimizer * number) for name, number in parameters.items()})
    activations = _activations(config, batch, length, dtype, autocast, backend, context_length, device)
    return TrainingMemory(weights, weights.times(1), state, activations)


def _activations(
    config: ModelConfig,
    batch: int,
    length: int,
    dtype: torch.dtype,
    autocast: torch.dtype | None,
    backend: Backend,
    context_length: int | None,
    device: str,
) -> Parts:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), torch.enable_grad():
        model = Transformer(config, backend, device=device, dtype=dtype)
        tokens = torch.zeros(batch, length, dtype=torch.int64, device=device)
        context = None
        if config.context_dim is not None:
            shape = (batch, length if context_length is None else context_length, config.context_dim)
            context = torch.zeros(shape, dtype=dtype, device=device)
        mode = contextlib.nullcontext() if autocast is None else torch.autocast(device, autocast)
        with mode, kept_by_part(model) as kept:
            held = model(tokens, tokens if config.head else None, context=context)
        del held
    return kept


@contextlib.contextmanager
def kept_by_part(model: nn.Module) -> Iterator[Parts]:
    """In this block, adds up the bytes that autograd saves in the model's forward passes, by the part that saves them
    first; each storage counts once, and parameters and buffers do not count."""
    parts = Parts(dict.fromkeys(("embedding", "attention", "feed_forward", "norms", "head"), 0))
    own = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
    seen: dict[int, Any] = {}  # keeps storages alive, so that their keys stay unique
    now = ["embedding"]

    def pack(x: Tensor) -> Tensor:
        memory = x.untyped_storage()
        if memory._cdata not in own and memory._cdata not in seen:
            seen[memory._cdata] = memory
            parts[now[-1]] += memory.nbytes()
        return x

    def enter(part: str) -> Any:
        return lambda *_: now.append(part)

    def leave(*_: Any) -> None:
        now.pop()

    def end_of_blocks(*_: Any) -> None:
        now[0] = "head"

    with contextlib.ExitStack() as hooks:
        for module in model.modules():
            for part in (name for name, kinds in _PARTS.items() if isinstance(module, kinds)):
                for handle in (module.register_forward_pre_hook(enter(part)), module.register_forward_hook(leave)):
                    hooks.callback(handle.remove)
        last = list(model.layers)[-1]  # type: ignore[arg-type]
        hooks.callback(last.register_forward_hook(end_of_blocks).remove)
        hooks.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x))
        yield parts


ModelConfig.training_bytes = training_bytes
