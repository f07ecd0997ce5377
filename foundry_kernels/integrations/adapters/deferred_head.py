"""What stands for a head whose logits are not computed, and what a forward returns in their place."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from foundry_kernels.core.autocast import autocast_dtype
from foundry_kernels.integrations.adapters.deferral import Deferral, HeadCall, current
from foundry_kernels.integrations.adapters.deferred import DeferredLogits
from foundry_kernels.integrations.adapters.head import readable_matrix_of
from foundry_kernels.integrations.adapters.lora_layers import of_head


def head_property(name: str) -> property:
    """Returns the attribute of a model by which its forward gets its head."""

    def get(self: Any) -> Any:
        head = self._modules.get(name)
        if head is None:
            if name in self._modules:
                return None
            raise AttributeError(name)  # then nn.Module.__getattr__ looks for it, and says what there is
        deferral = current()
        return head if deferral is None or deferral.head is not head else DeferredHead(deferral, head)

    def put(self: Any, value: Any) -> None:  # of what is no module: nn.Module handles those itself
        vars(self)[name] = value

    return property(get, put)


class DeferredHead:
    """Stands for a head in a call whose logits are deferred."""

    def __init__(self, deferral: Deferral, head: nn.Module) -> None:
        self._deferral, self._head = deferral, head

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        matrix = readable_matrix_of(self._head)
        if kwargs or len(args) != 1 or matrix is None or not self._deferral.is_same_run():
            return self._head(*args, **kwargs)
        hidden, (weight, bias) = args[0], matrix
        if not isinstance(hidden, Tensor) or hidden.is_nested or not _fits(hidden, weight, bias):
            return self._head(hidden)
        adapter = of_head(self._head)[1]
        if adapter is not None and not (adapter.fits(hidden) and adapter.draws_alike(weight)):
            return self._head(hidden)
        call = HeadCall(self._deferral, self._head, hidden, weight, bias, adapter)
        self._deferral.calls.append(call)
        return DeferredLogits(call, call.rows, autocast_dtype(hidden) or hidden.dtype)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._head, name)


def _fits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Returns whether a linear layer would take its input; else it says itself why not."""
    if hidden.dim() < 1 or hidden.shape[-1] != weight.shape[-1] or hidden.device != weight.device:
        return False
    others = [x.dtype for x in (weight, bias) if x is not None]
    return hidden.is_floating_point() and (
        autocast_dtype(hidden) is not None or all(dtype == hidden.dtype for dtype in others)
    )


def finished(out: Any, drop: bool) -> Any:
    """Returns what a forward has returned, without deferred logits: None in their place where a loss was computed from
    them, else the logits. drop: whether a tuple lacks them in place of None, as transformers' tuples do."""
    if isinstance(out, DeferredLogits):
        return None if out.made is None and out.call.lost else out.tensor()
    if isinstance(out, dict):
        if not _any_deferred(out.values()):
            return out
        found = {k: finished(v, drop) for k, v in out.items()}
        return found if type(out) is dict else type(out)(**found)
    if dataclasses.is_dataclass(out) and not isinstance(out, type):
        own = {f.name: getattr(out, f.name) for f in dataclasses.fields(out) if f.init}
        if not _any_deferred(own.values()):
            return out
        return dataclasses.replace(out, **{k: finished(v, drop) for k, v in own.items()})
    if isinstance(out, (tuple, list)):
        if not _any_deferred(out):
            return out
        values = [finished(x, drop) for x in out]
        if hasattr(out, "_fields"):
            return type(out)(*values)
        gone = [isinstance(x, DeferredLogits) and y is None for x, y in zip(out, values, strict=True)]
        return type(out)(x for x, without in zip(values, gone, strict=True) if not (drop and without))
    return out


def _any_deferred(values: Iterable[Any]) -> bool:
    for x in values:
        if isinstance(x, DeferredLogits):
            return True
        if isinstance(x, (tuple, list)) and _any_deferred(x):
            return True
        if isinstance(x, dict) and _any_deferred(x.values()):
            return True
    return False
