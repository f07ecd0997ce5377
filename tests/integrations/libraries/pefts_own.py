"""A plugin of pytest: PEFT's own tests with each model patched before it gets adapters, whose layers are thus patched
when they are added. `test_peft.py` runs it."""

from __future__ import annotations

import sys
import types
from typing import Any

from peft import PeftModel

import foundry_kernels as fk

# PEFT's tests import it, and those that are run here do not use it.
sys.modules.setdefault("diffusers", types.ModuleType("diffusers"))
sys.modules["diffusers"].StableDiffusionPipeline = type("StableDiffusionPipeline", (), {})  # type: ignore[attr-defined]


theirs = PeftModel.__init__


def _of_a_patched_model(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
    if any("_foundry" in vars(module) for module in model.modules()):
        fk.unpatch(model)
    fk.patch(model)
    theirs(self, model, *args, **kwargs)


PeftModel.__init__ = _of_a_patched_model


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """A part of the cases, which differ in the model's layers and the adapter's options."""
    items[:] = [item for item in items if "-LoraConfig-" in item.nodeid][::40]
