"""Trainers wrap layers by their class, which they look up by its name in the model."""

from __future__ import annotations

from typing import Any

import pytest
from patching import BUILDABLE
from tiny_encoders import FAMILIES as ENCODERS
from tiny_encoders import tiny_encoder
from torch import nn

import foundry_kernels as fk
from foundry_kernels.integrations.adapters.tiny import tiny_model


def wrapped(model: nn.Module) -> dict[str, list[str]]:
    """The modules that are wrapped by the name of a class, as accelerate's FSDP does it: the class is the first one of
    this name, and its instances are wrapped."""
    classes: dict[str, type] = {}
    for module in model.modules():
        classes.setdefault(type(module).__name__, type(module))
    return {
        name: [path for path, module in model.named_modules() if isinstance(module, cls)]
        for name, cls in classes.items()
    }


@pytest.mark.parametrize("family", [*BUILDABLE, *ENCODERS, "torch"])
def test_classes_are_found_by_their_names(family: str) -> None:
    model: Any = nn.Transformer(16, 2, 2, 2, 32) if family == "torch" else None
    if model is None:
        model = tiny_model(family) if family in BUILDABLE else tiny_encoder(family)
    expected = wrapped(model)
    with fk.patch(model) as handle:
        report, found = handle.report(), wrapped(model)
    in_part = {e.module_class for e in report.replaced} & {e.module_class for e in report.left}
    assert in_part == ({"CLIPMLP"} if family == "clip" else set())  # no layer
    assert found.keys() == expected.keys()
    for name in expected.keys() - in_part:
        assert found[name] == expected[name], name
    assert wrapped(model) == expected
