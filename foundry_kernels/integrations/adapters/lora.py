"""PEFT's linear layers with LoRA; see `lora_layers.py` for the calls that run on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from foundry_kernels.integrations.adapters.base import Adapter, split_names
from foundry_kernels.integrations.adapters.lora_layers import CLASSES, OP, served, together


@dataclass(frozen=True)
class LoraLinear(Adapter):
    """A linear layer of PEFT. Its classes differ in how the layer below is called and merged, which stays."""

    names = split_names(
        "VARIANT_KWARG_KEYS _cast_input_dtype _check_forward_args _mixed_batch_forward active_adapters base_layer "
        "clone disable_adapters dtype forward is_autocast_enabled keys lora_A lora_B lora_dropout lora_variant merged "
        "pop quant_linear_module scaling to torch unmerge weight"
    )
    arguments = split_names("self x args kwargs")
    transparent: ClassVar[bool] = True

    def ops(self, module: nn.Module) -> tuple[str, ...]:
        return (OP,)

    def members(self, original: type) -> dict[str, Any]:
        return {"forward": _lora_forward, "_foundry_lora": True}

    def why_own(self, module: nn.Module) -> str | None:
        """Returns the reason why PEFT's own forward runs while the adapters are as they are, or None."""
        found = served(module)
        return found if isinstance(found, str) else None


def _lora_forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    plain = not args and all(value is None for value in kwargs.values())
    found = together(x, [self]) if plain else None
    return self._foundry_original.forward(self, x, *args, **kwargs) if found is None else found[0]


_LORA = LoraLinear()

LORA = dict.fromkeys(CLASSES, _LORA)
