"""PEFT's layers in a patched model: those that it has when it is patched, and those that it gets later.

PEFT puts a layer of its own around another one whenever an adapter is added or loaded. A hook of PyTorch's sees each
module that becomes part of another; it patches such a layer if the other one is part of a patched model, whose modules
know by which arguments it was patched.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from foundry_kernels.integrations.adapters.base import PATCHABLE, Adapter, State, with_companions
from foundry_kernels.integrations.adapters.experts import LoraExperts
from foundry_kernels.integrations.adapters.lora import LoraLinear
from foundry_kernels.integrations.adapters.lora_layers import OWN, SHARDED
from foundry_kernels.integrations.adapters.table import row_of
from foundry_kernels.integrations.patching import swap
from foundry_kernels.integrations.patching.arguments import Arguments
from foundry_kernels.integrations.patching.report import NOT_NAMED, Entry
from foundry_kernels.nn._backend import plan

#: The attribute of each module of a patched model that has the arguments.
AROUND = "_foundry_arguments"


def is_one(module: nn.Module) -> bool:
    """Whether a module is a layer that PEFT has put around another one."""
    return any(
        base.__name__ == "BaseTunerLayer" and base.__module__ == "peft.tuners.tuners_utils"
        for base in type(module).__mro__
    )


def _backends(row: Adapter, module: nn.Module, arguments: Arguments) -> dict[str, str]:
    wanted = PATCHABLE if arguments.ops is None else arguments.ops
    return plan(arguments.backend, with_companions([op for op in row.ops(module) if op in wanted]))


def patch(module: nn.Module, arguments: Arguments) -> bool:
    """Patches a layer of PEFT for which there is an operation, and returns whether it did. Any module of a patched
    model remembers the arguments."""
    vars(module)[AROUND] = arguments
    row = row_of(module) if is_one(module) and not swap.is_patched(module) else None
    if not isinstance(row, (LoraLinear, LoraExperts)) or not (backends := _backends(row, module, arguments)):
        return False
    swap.apply(module, row, State(backends))
    return True


def forget(model: nn.Module) -> None:
    for module in model.modules():
        vars(module).pop(AROUND, None)


def _joined(parent: nn.Module, name: str, module: Any) -> None:
    arguments = vars(parent).get(AROUND)
    if arguments is not None and isinstance(module, nn.Module) and is_one(module):
        patch(module, arguments)


register_module_module_registration_hook(_joined)


def entries(model: nn.Module, arguments: Arguments) -> Iterator[tuple[Entry, dict[str, str]]]:
    """Yields what the layers of PEFT run on while their adapters are as they are, and the backends."""
    for name, module in model.named_modules():
        if not is_one(module):
            continue
        row: Any = getattr(type(module), "_foundry_row", None) if swap.is_patched(module) else row_of(module)
        cls = type(module).__name__
        if not isinstance(row, (LoraLinear, LoraExperts)):
            yield Entry(name, cls, reason=row or f"{OWN}no operation for this class"), {}
        elif not swap.is_patched(module):
            ops = row.ops(module)
            named = arguments.ops is None or any(op in arguments.ops for op in ops)
            later = f"{OWN}it is in a module that the model got after the patch"
            yield Entry(name, cls, reason=later if named else f"{NOT_NAMED} {' or '.join(ops)}"), {}
        elif (reason := row.why_own(module)) == SHARDED:
            own = f"{OWN}{SHARDED} in a call"
            yield Entry(name, cls, row.ops(module), own, "row"), _backends(row, module, arguments)
        elif reason is not None:
            yield Entry(name, cls, reason=f"{OWN}{reason}"), {}
        else:
            yield Entry(name, cls, row.ops(module), by="row"), _backends(row, module, arguments)
