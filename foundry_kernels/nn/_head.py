"""Parameters as operations need them that a module is a part of, without its call: the head of a language model, whose
loss `linear_cross_entropy` computes, and the norms of queries and keys. The tensor-parallel plan leaves marks here."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from foundry_kernels.core.registry import is_dtensor

#: The attribute of a head that the tensor-parallel plan divides: how many hooks the plan gave it.
PLANNED_HOOKS = "_foundry_planned_hooks"
#: Another: the mesh, and how what the head is called with lies on it where it comes as a plain tensor.
PLANNED_INPUT = "_foundry_planned_input"
#: The attribute of a norm of each head, of which a device has some: the placements of its weight's gradient.
PLANNED_GRADIENT = "_foundry_planned_gradient"


def weight_of_norm(norm: nn.Module, x: Tensor) -> Any:
    """The weight of a norm over x. Where the plan has replicated it and x is a device's own heads, it is a plain tensor
    too, and its gradient a part of the weight's."""
    weight: Any = norm.weight
    if is_dtensor(weight) and not is_dtensor(x) and hasattr(norm, PLANNED_GRADIENT):
        return weight.to_local(grad_placements=getattr(norm, PLANNED_GRADIENT))
    return weight


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
