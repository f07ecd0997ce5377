"""The activation modules of PyTorch and of transformers that a gated kernel has."""

from __future__ import annotations

from torch import nn

#: Classes of activations that a gated kernel has, by module and name: the operation and the approximation of GELU.
ACTIVATIONS = {
    ("torch.nn.modules.activation", "SiLU"): ("swiglu", ""),
    ("transformers.activations", "SiLUActivation"): ("swiglu", ""),
    ("transformers.activations", "GELUActivation"): ("geglu", "none"),
    ("transformers.activations", "GELUTanh"): ("geglu", "tanh"),
}


def activation(act: object) -> tuple[str, str] | None:
    """(operation, approximation of GELU) of an activation module, or None where no kernel has it."""
    if isinstance(act, nn.GELU):
        return "geglu", act.approximate
    found = ACTIVATIONS.get((type(act).__module__, type(act).__qualname__))
    return None if found == ("geglu", "none") and getattr(act, "act", None) is not nn.functional.gelu else found
