"""The head of a language model, as `linear_cross_entropy` needs it: a matrix, without the call of the module."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

#: The attribute of a head that the tensor-parallel plan divides: how many hooks the plan gave it.
PLANNED_HOOKS = "_foundry_planned_hooks"
#: Another: the mesh, and how what the head is called with lies on it where it comes as a plain tensor.
PLANNED_INPUT = "_foundry_planned_input"


def count_hooks(module: Any) -> int:
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return sum(map(len, hooks))


def matrix_of(head: nn.Module | None) -> tuple[Tensor, Tensor | None] | None:
    """Weight and bias of a head whose call is the product by them and nothing else; else None.

    A head of another class (LoRA's, a quantised one), with a forward of its own or with hooks (accelerate's, FSDP's on
    the head by itself) must be called, and its logits exist. The hooks of the tensor-parallel plan are known: they
    only turn logits that are sharded over devices into those that the caller gets.
    """
    if type(head) is not nn.Linear or "forward" in vars(head):
        return None
    if count_hooks(head) != getattr(head, PLANNED_HOOKS, 0):
        return None
    return head.weight, head.bias
