"""Checks whether calling a module does what its class does and nothing more."""

from __future__ import annotations

from torch import nn


def is_observed(module: nn.Module) -> bool:
    """Whether calling the module does something else too: it has hooks, or a `forward` of its own."""
    own = module.__dict__
    return bool(
        own["_forward_pre_hooks"]
        or own["_forward_hooks"]
        or own["_backward_pre_hooks"]
        or own["_backward_hooks"]
        or "forward" in own
    )


def is_linear(layer: nn.Module) -> bool:
    """Whether calling `layer` is `F.linear` with its weight and bias and nothing more."""
    return type(layer) is nn.Linear and not is_observed(layer)


def is_plain(layer: nn.Module) -> bool:
    """Whether calling `layer` is `F.linear` with its weight and nothing more."""
    # The attribute would be looked for in four places. A bias that is no parameter counts as one.
    return type(layer) is nn.Linear and layer._parameters.get("bias", layer) is None and not is_observed(layer)
