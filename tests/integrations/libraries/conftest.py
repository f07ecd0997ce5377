"""What the tests of several libraries share."""

from __future__ import annotations

from typing import Any

import pytest

from foundry_kernels.integrations.adapters import lora_layers


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many layers each call of the operation had."""
    found: list[int] = []
    one, several = lora_layers.lora_linear, lora_layers.lora_linears

    def counted(x: Any, w: Any, a: Any, *rest: Any, **options: Any) -> Any:
        found.append(len(a) if isinstance(a, (tuple, list)) else 1)
        return (several if isinstance(a, (tuple, list)) else one)(x, w, a, *rest, **options)

    monkeypatch.setattr(lora_layers, "lora_linear", counted)
    monkeypatch.setattr(lora_layers, "lora_linears", counted)
    return found
