"""The memory that a training step saves for its backward pass, measured on a model without data."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from foundry_kernels.models.config import ModelConfig
from foundry_kernels.models.count import Parts
from foundry_kernels.models.transformer import Transformer
from foundry_kernels.nn import MLP, GatedMLP, LayerNorm, MoE, RMSNorm
from foundry_kernels.nn._backend import Backend
from foundry_kernels.nn.linear_attention import LinearMixer
from foundry_kernels.nn.self_attention import SelfAttention

_PARTS: dict[str, Any] = {
    "attention": (SelfAttention, LinearMixer),
    "feed_forward": (GatedMLP, MLP, MoE),
    "norms": (RMSNorm, LayerNorm),
}


def activations(
    config: ModelConfig,
    batch: int,
    length: int,
    dtype: torch.dtype,
    autocast: torch.dtype | None,
    backend: Backend,
    context_length: int | None,
    device: str,
) -> Parts:
    """Returns the bytes of `TrainingMemory.activations`; see `foundry_kernels.models.count.training_bytes`."""
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
