"""A plugin of pytest: PEFT's own tests with each model patched as soon as it has an adapter. `test_peft.py` runs it."""

from __future__ import annotations

import sys
import types
from typing import Any

import transformers  # noqa: F401  # which asks whether diffusers is there
from peft import PeftModel

import foundry_kernels as fk

# PEFT's tests import it, and those that are run here do not use it.
sys.modules.setdefault("diffusers", types.ModuleType("diffusers"))
sys.modules["diffusers"].StableDiffusionPipeline = type("StableDiffusionPipeline", (), {})  # type: ignore[attr-defined]


def _patching(name: str) -> None:
    theirs = getattr(PeftModel, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = theirs(self, *args, **kwargs)
        if any("_foundry" in vars(module) for module in self.modules()):
            fk.unpatch(self)
        fk.patch(self)
        return result

    setattr(PeftModel, name, method)


_patching("__init__")
_patching("add_adapter")


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """A part of the cases, which differ in the model's layers and the adapter's options."""
    items[:] = [item for item in items if "-LoraConfig-" in item.nodeid][::40]
