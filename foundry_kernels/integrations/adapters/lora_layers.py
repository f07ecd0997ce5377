"""Calls of PEFT's linear layers with LoRA, on `lora_linear`.

Supported: one active adapter of two plain linear layers, without biases, over a layer of any kind. The layer below is
read where it is a plain linear layer, and called where it is not (quantised, sharded, with hooks). Anything else
runs PEFT's own forward. Each call decides, since adapters are added, switched, disabled, merged and deleted while a
model is patched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from foundry_kernels.core.autocast import autocast_dtype
from foundry_kernels.core.registry import is_dtensor
from foundry_kernels.nn._layers import is_linear, is_observed
from foundry_kernels.nn._linear_layers import Layers
from foundry_kernels.ops.lora_linear import lora_linear, lora_linears

OP = "lora_linear"

#: How the reason begins for a layer that is left as long as its adapters are as they are.
OWN = "its own forward runs: "
#: The reason that a call may find otherwise: fully_shard has the whole adapter during a forward pass alone.
SHARDED = "its adapter is sharded"

#: The classes of PEFT, by file. Others run as they are: they return more than a tensor.
CLASSES = frozenset(
    (f"peft.tuners.lora.{home}", name)
    for home, names in {
        "layer": ("Linear",),
        "bnb": ("Linear4bit", "Linear8bitLt"),
        "gptq": ("GPTQLoraLinear",),
        "awq": ("AwqLoraLinear",),
        "aqlm": ("AqlmLoraLinear",),
        "eetq": ("EetqLoraLinear",),
        "hqq": ("HqqLoraLinear",),
    }.items()
    for name in names
)


class Served(NamedTuple):
    """The active adapter of a layer, and the probability of its dropout."""

    a: Tensor
    b: Tensor
    scale: float
    dropout: float

    def low(self, x: Tensor) -> Tensor:
        """``scale * dropout(x) A^T``, in the dtype of the adapter."""
        dropped = nn.functional.dropout(x, self.dropout) if self.dropout else x
        return nn.functional.linear(dropped.to(self.a.dtype), self.a) * self.scale

    def fits(self, x: Tensor) -> bool:
        low = autocast_dtype(x) or x.dtype
        return all(w.dtype in (low, torch.float32) and w.device == x.device for w in (self.a, self.b))

    def draws_alike(self, weight: Tensor) -> bool:
        """Whether devices that share a sharded weight's rows drop the same."""
        return not (self.dropout and is_dtensor(weight))


def only_adapter(layer: Any) -> tuple[str, str]:
    """Returns the name of the one adapter that a call of a layer of PEFT adds, or "" and what it does instead."""
    if layer.disable_adapters:
        return "", "its adapters are disabled"
    if layer.merged:
        return "", "its adapters are merged"
    names = [name for name in layer.active_adapters if name in layer.lora_A]
    return (names[0], "") if len(names) == 1 else ("", f"{len(names) or 'none'} of its adapters are active")


def served(layer: Any) -> Served | str:
    """Returns the adapter that a call of a layer of PEFT adds, or what it does instead."""
    name, reason = only_adapter(layer)
    if not name:
        return reason
    variants = getattr(layer, "lora_variant", {})
    if name in variants:
        return f"its adapter is a {type(variants[name]).__name__}"
    a, b, drop = layer.lora_A[name], layer.lora_B[name], layer.lora_dropout[name]
    if not (is_linear(a) and is_linear(b)) or type(drop) not in (nn.Dropout, nn.Identity) or is_observed(drop):
        return "a part of its adapter is no plain layer, or has hooks"
    if a.bias is not None or b.bias is not None:
        return "its adapter has a bias"
    if is_dtensor(a.weight) or is_dtensor(b.weight):
        return SHARDED
    if not getattr(layer, "cast_input_dtype_enabled", True):
        return "its input is not cast"
    dropout = drop.p if type(drop) is nn.Dropout and drop.training else 0.0
    return "its dropout drops all" if dropout >= 1.0 else Served(a.weight, b.weight, layer.scaling[name], dropout)


def of_head(head: Any) -> tuple[nn.Module, Served | None]:
    """Returns the layer below a head with an adapter, and the adapter if one is added; of any other layer the layer
    itself. Where a call does something else, it is the head, which is no plain layer then."""
    kind = type(head)
    known = getattr(kind, "_foundry_lora", False) or (kind.__module__, kind.__qualname__) in CLASSES
    if not known or is_observed(head):
        return head, None
    if head.merged != head.disable_adapters:  # a disabled one that is merged is unmerged first
        return head.base_layer, None
    found = None if head.disable_adapters else served(head)
    return (head, None) if isinstance(found, str) else (head.base_layer, found)


def _backend_and_adapter(layer: Any, x: Tensor) -> tuple[str, Served] | None:
    state = vars(layer).get("_foundry")  # none once the patch is undone, if a wrapper has derived its own class
    backend = None if state is None else state.backends.get(OP)
    if backend is None or is_dtensor(x):
        return None
    found = served(layer)
    return None if isinstance(found, str) or not found.fits(x) else (backend, found)


def _matrix_of(base: Any, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Returns weight and bias of a layer that need not be called."""
    if not is_linear(base) or is_dtensor(base.weight):
        return None, None
    dtypes = {w.dtype for w in (base.weight, base.bias) if w is not None}
    return (base.weight, base.bias) if autocast_dtype(x) is not None or dtypes == {x.dtype} else (None, None)


def together(x: Tensor, layers: Sequence[Any]) -> tuple[Tensor, ...] | None:
    """Returns the results of layers of PEFT that read the same x; None where their own forwards must run."""
    of_layers = [_backend_and_adapter(layer, x) for layer in layers]
    found = [known for known in of_layers if known is not None]
    if len(found) < len(layers):
        return None
    backends, adapters = {backend for backend, _ in found}, [adapter for _, adapter in found]
    if len(layers) > 1 and (len(backends) > 1 or any(adapter.dropout for adapter in adapters)):
        return None  # each layer of PEFT has a mask of its own
    matrices = [_matrix_of(layer.base_layer, x) for layer in layers]
    bases = [layer.base_layer(x) if w is None else None for layer, (w, _) in zip(layers, matrices, strict=True)]
    options: Any = {"dropout_p": adapters[0].dropout, "backend": found[0][0]}
    dtype = autocast_dtype(x) or x.dtype
    if len(layers) > 1 and all(base is None or base.dtype == dtype for base in bases):
        weights, biases = [w for w, _ in matrices], [bias for _, bias in matrices]
        a, b, scales = [each.a for each in adapters], [each.b for each in adapters], [each.scale for each in adapters]
        return lora_linears(x, weights, a, b, biases, scales=scales, bases=bases, **options)
    results = []
    for own, (w, bias), base in zip(adapters, matrices, bases, strict=True):
        read = x if base is None else x.to(base.dtype)
        results.append(lora_linear(read, w, own.a, own.b, bias, scale=own.scale, base=base, **options))
    return tuple(results)


def each_of(layers: Layers, x: Tensor, *modules: Any) -> tuple[Tensor, ...]:
    """Returns the results of linear layers that read the same x, those of PEFT by one call."""
    shared = [m for m in modules if getattr(type(m), "_foundry_lora", False) and not is_observed(m)]
    found = together(x, shared) if len(shared) > 1 else None
    if found is None:
        return layers.each(x, *modules)
    results = {id(m): y for m, y in zip(shared, found, strict=True)}
    return tuple(results[id(m)] if id(m) in results else layers.linear(x, m) for m in modules)


def remade(x: Tensor, layer: Any, make: Callable[..., Tensor], *sources: Any) -> AbstractContextManager[Any]:
    """A block in which `layer` reads x, and autograd saves the tensors of `sources`, which are saved anyway, in place
    of x. The backward pass gets ``make(*sources)``."""
    adapts = getattr(type(layer), "_foundry_lora", False)
    if not adapts or is_compiling() or is_dtensor(x) or not (x.requires_grad and torch.is_grad_enabled()):
        return nullcontext()
    return _saving(x, make, sources)


def _saving(x: Tensor, make: Callable[..., Tensor], sources: tuple[Any, ...]) -> AbstractContextManager[Any]:
    around, around_back = torch._C._autograd._top_saved_tensors_default_hooks(True) or (_same, _same)
    at, shape = x.data_ptr(), x.shape
    tensors = [isinstance(source, Tensor) for source in sources]

    def pack(saved: Tensor) -> Any:
        if saved.data_ptr() == at and saved.shape == shape:
            return _Sources(around(s) if is_tensor else s for s, is_tensor in zip(sources, tensors, strict=True))
        return around(saved)

    def unpack(packed: Any) -> Tensor:
        if type(packed) is not _Sources:
            found: Tensor = around_back(packed)
            return found
        with torch.no_grad():
            return make(*[around_back(s) if is_tensor else s for s, is_tensor in zip(packed, tensors, strict=True)])

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


class _Sources(tuple[Any, ...]):
    """What the hooks around make of the sources; they may make tuples too."""


def _same(x: Any) -> Any:
    return x
