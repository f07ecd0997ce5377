"""The head of a language model: where it is, and whether operations can read its parameters in place of a call."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from foundry_kernels.core.registry import is_dtensor
from foundry_kernels.integrations.adapters.lora_layers import of_head
from foundry_kernels.integrations.modules import is_model
from foundry_kernels.nn._head import PLANNED_INPUT, count_hooks, matrix_of


def matrix_of_head(head: Any) -> tuple[Tensor, Tensor | None] | None:
    """`matrix_of`, also of the layer below an adapter (`of_head`), and of a head that transformers' `tp_plan` has
    sharded by its classes."""
    return matrix_of(of_head(head)[0]) if _sharded_by_transformers(head) is None else (head.weight, head.bias)


def readable_matrix_of(head: Any) -> tuple[Tensor, Tensor | None] | None:
    """The same in a call. None also of a sharded head whose input is unknown: who knows how the tokens lie?"""
    found = matrix_of_head(head)
    return None if found is None or (is_dtensor(found[0]) and not _input_of(head)) else found


def on_mesh(hidden: Tensor, head: nn.Module) -> Tensor:
    """Returns what the head would make of its input, whose classes are sharded over devices."""
    if is_dtensor(hidden):
        return hidden
    mesh, layouts = _input_of(head)
    tensor = importlib.import_module("torch.distributed.tensor")
    made: Tensor = tensor.DTensor.from_local(hidden, mesh, layouts, run_check=False)
    return made


def _input_of(head: nn.Module) -> Any:
    """The mesh of a vocab-sharded head, and the placements of a plain tensor on it; None if they are unknown."""
    if (known := _sharded_by_transformers(head)) is not None:
        return known["mesh"], (known["self"].input_layouts,)
    return getattr(of_head(head)[0], PLANNED_INPUT, None)


def replicated(x: Tensor, like: Any) -> Tensor:
    """Returns x, which every device has, on the mesh of `like`."""
    tensor = importlib.import_module("torch.distributed.tensor")
    made: Tensor = tensor.DTensor.from_local(
        x, like.device_mesh, [tensor.Replicate()] * like.device_mesh.ndim, run_check=False
    )
    return made


def _sharded_by_transformers(head: Any) -> Mapping[str, Any] | None:
    """What the forward knows that the style "colwise_gather_output" has given the head in place of its own: the style
    (`self`), `module` and `mesh`. None where the head has another."""
    if type(head) is not nn.Linear or "forward" not in vars(head) or count_hooks(head):
        return None
    style = sys.modules.get("transformers.distributed.tensor_parallel")
    if style is None or not inspect.isfunction(head.forward):
        return None
    known = inspect.getclosurevars(head.forward).nonlocals
    theirs = getattr(known.get("original_forward"), "__func__", None) is nn.Linear.forward
    given: Any = known.get("self")
    if not theirs or type(given) is not style.ColwiseParallel or known.get("module") is not head:
        return None
    replicated = given.input_layouts.is_replicate() and given.output_layouts.is_replicate()
    return known if replicated and is_dtensor(known["module"].weight) else None


def head_at(model: nn.Module, path: str) -> nn.Module | None:
    """Returns the head of `model`, or None if the logits must be made as they are: its parameters cannot be read, or a
    module between the two has hooks, which see logits."""
    module: Any = model
    names = path.split(".")
    for n, name in enumerate(names):
        if n and (count_hooks(module) or "forward" in vars(module)):
            return None
        module = module._modules.get(name)
        if module is None:
            return None
    return None if matrix_of_head(module) is None else module


def path_of_head(model: Any) -> str | None:
    """Returns the path of a model's head in the model, or None if it has none of its own: of a model of transformers,
    the layer that gives its output embeddings; of any other a linear layer of its own, with as many outputs as an
    embedding in it has rows."""
    if is_model(model):
        try:
            head = model.get_output_embeddings()
        except (AttributeError, NotImplementedError):
            return None
        found = (name for name, module in model.named_modules() if module is head and name)
        return next(found, None) if isinstance(head, nn.Module) else None
    rows = {module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)}
    names = [n for n, m in model.named_children() if isinstance(m, nn.Linear) and m.out_features in rows]
    return names[0] if len(names) == 1 else None
