"""Records what the layers of a model do while they do it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from foundry_kernels.diagnostics.health import Health, LayerHealth
from foundry_kernels.diagnostics.ranks import effective_rank, qk_ranks
from foundry_kernels.models import Transformer
from foundry_kernels.nn import Attention

#: Rows of activations whose rank is taken: the singular values of more take long and say the same.
_ROWS = 512


def check_model(model: object) -> Transformer:
    if not isinstance(model, Transformer):
        raise TypeError(f"model must be a foundry_kernels.models.Transformer; got {type(model).__name__}")
    return model


def attentions_of(model: Transformer) -> list[Attention]:
    return [cast(Attention, block.attention) for block in model.layers]


class Recorder:
    """What `record` yields. Every forward pass replaces what the one before left."""

    def __init__(self, model: Transformer) -> None:
        self.model = model
        self._rows: list[tuple[Tensor, Tensor] | None] = [None] * len(model.layers)
        self._activations: list[Tensor | None] = [None] * len(model.layers)

    def _attended(self, index: int, attention: Attention, result: Any) -> Tensor:
        out, entropy, max_logit = taken(attention, result)
        keys = torch.arange(1, entropy.shape[-1] + 1, device=entropy.device)
        if not attention.causal:
            keys = torch.full_like(keys, entropy.shape[-1])
        if attention.sliding_window is not None:
            keys = keys.clamp_max(attention.sliding_window)
        most = keys.log().mean().clamp_min(math.ulp(1.0))
        self._rows[index] = entropy.mean((0, 2)) / most, max_logit.amax((0, 2))
        return out

    def _passed(self, index: int, branch: Tensor | None, stream: Tensor) -> None:
        stream = stream.detach() if branch is None else stream.detach() + branch.detach()
        rows = stream.flatten(0, -2)
        self._activations[index] = rows[:: max(1, rows.shape[0] // _ROWS)][:_ROWS]

    def health(self) -> Health:
        """Returns the health of the last forward pass and, where a backward pass followed, of its gradients.

        Raises:
            RuntimeError: there was no forward pass.
        """
        layers = []
        attentions = attentions_of(self.model)
        for block, attention, rows, activations in zip(
            self.model.layers, attentions, self._rows, self._activations, strict=True
        ):
            if rows is None or activations is None:
                raise RuntimeError("nothing was recorded: no forward pass ran inside `record`")
            layers.append(
                LayerHealth(
                    entropy=rows[0].tolist(),
                    max_logit=rows[1].tolist(),
                    qk_rank=qk_ranks(attention).tolist(),
                    activation_rank=float(effective_rank(activations)),
                    most_ranks=min(activations.shape),
                    gradient_norm=_gradient_norm(block),
                )
            )
        return Health(layers, head_dim=self.model.config.head_width)


def _gradient_norm(module: nn.Module) -> float | None:
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    return float(nn.utils.get_total_norm(grads)) if grads else None


@contextmanager
def record(model: Transformer) -> Iterator[Recorder]:
    """Records the forward passes of `model` while it lasts; the results of the model do not change.

    Args:
        model: a :class:`foundry_kernels.models.Transformer`. Not one that was compiled, whose layers are not called,
            nor with a cache. Entropies are compared with those of all keys before a token and in its window: with
            masks, lengths or packed sequences they look lower than they are.

    Yields:
        a :class:`Recorder`, whose `health()` says what was seen.

    Raises:
        TypeError: another model.
    """
    recorder = Recorder(check_model(model))
    hooks = []
    for index, (block, attention) in enumerate(zip(model.layers, attentions_of(model), strict=True)):
        hooks += [
            attention.register_forward_pre_hook(with_statistics, with_kwargs=True),
            attention.register_forward_hook(
                lambda module, _, result, index=index: recorder._attended(index, module, result)
            ),
            block.register_forward_hook(lambda _, __, result, index=index: recorder._passed(index, *result[:2])),
        ]
    try:
        yield recorder
    finally:
        for hook in hooks:
            hook.remove()


def with_statistics(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Asks attention for its statistics, as a hook before it; one behind it is to give them to `taken`."""
    return args, kwargs | {"return_stats": True}


_latest: WeakKeyDictionary[nn.Module, tuple[Tensor, Tensor]] = WeakKeyDictionary()


def taken(attention: nn.Module, result: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(y, entropy, max_logit) of a result of attention, from which another hook may have taken the last two."""
    if isinstance(result, Tensor):
        return result, *_latest[attention]
    y, entropy, max_logit = result
    _latest[attention] = entropy, max_logit
    return y, entropy, max_logit
