"""Parameters of modules that operations use without calling the module: the head of a language model, whose loss
`linear_cross_entropy` computes, and the norms of queries and keys. The tensor-parallel plan sets attributes on these
modules."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from foundry_kernels.core.registry import is_dtensor

#: The attribute of a head that the tensor-parallel plan shards: the number of hooks that the plan added.
PLANNED_HOOKS = "_foundry_planned_hooks"
#: Another attribute of such a head: the mesh, and the placements of a plain input tensor.
PLANNED_INPUT = "_foundry_planned_input"
#: The attribute of a per-head norm whose heads are sharded: the placements of its weight's gradient.
PLANNED_GRADIENT = "_foundry_planned_gradient"


def weight_of_norm(norm: nn.Module, x: Tensor) -> Any:
    """Returns the weight of a norm over x. If the plan has replicated it and x holds the local heads, it is a plain
    tensor too, and its gradient is a partial sum of the weight's gradient."""
    weight: Any = norm.weight
    if is_dtensor(weight) and not is_dtensor(x) and hasattr(norm, PLANNED_GRADIENT):
        return weight.to_local(grad_placements=getattr(norm, PLANNED_GRADIENT))
    return weight


def count_hooks(module: Any) -> int:
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return sum(map(len, hooks))


def matrix_of(head: nn.Module | None) -> tuple[Tensor, Tensor | None] | None:
    """Returns weight and bias of a head that only computes a linear layer; else None.

    A head of another class (quantised), with its own forward or with hooks (accelerate's, or FSDP's on the head
    alone) must be called, which materializes its logits. The hooks of the tensor-parallel plan are allowed: they only
    convert sharded logits into those that the caller gets.
    """
    if type(head) is not nn.Linear or "forward" in vars(head):
        return None
    if count_hooks(head) != getattr(head, PLANNED_HOOKS, 0):
        return None
    return head.weight, head.bias
