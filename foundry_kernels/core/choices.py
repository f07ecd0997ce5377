"""The choices of modules and of a model's configuration: valid names, and checks that numbers fit each other."""

from __future__ import annotations

#: Gated activations; `nn.mlp` has the function of each.
GATES = ("swiglu", "geglu", "geglu_tanh", "glu", "reglu")
#: Activations without a gate; `nn.mlp` has the function of each.
ACTIVATIONS = ("gelu", "gelu_tanh", "silu", "relu")
#: How a router's logits become scores.
SCORINGS = ("softmax", "sigmoid")
#: Initializations of projections; see `models.init`.
INITS = ("normal", "xavier", "depth_scaled")


def why_no_buckets(buckets: int, max_distance: int, causal: bool) -> str | None:
    """Returns the reason why this bucket configuration is invalid, or None."""
    sides = 1 if causal else 2
    if buckets < 2 * sides or buckets % (2 * sides):
        where = "" if causal else " in both directions"
        return f"buckets must be a multiple of {2 * sides}{where}; got {buckets}"
    if max_distance <= buckets // (2 * sides):
        return f"max_distance must be above {buckets // (2 * sides)}, half of a direction's buckets; got {max_distance}"
    return None


def why_no_groups(n_experts: int, top_k: int, n_groups: int | None, top_groups: int | None) -> str | None:
    """Returns the reason why this grouping of experts is invalid, or None."""
    if n_groups is None or top_groups is None:
        return (
            None if n_groups is top_groups else f"n_groups and top_groups need each other; got {n_groups}, {top_groups}"
        )
    if n_groups < 1 or n_experts % n_groups or n_experts // n_groups < 2:
        return f"n_groups must divide n_experts={n_experts} into groups of two or more; got {n_groups}"
    if not 1 <= top_groups <= n_groups:
        return f"top_groups must be in 1 .. n_groups={n_groups}; got {top_groups}"
    if top_k > top_groups * (n_experts // n_groups):
        return f"top_groups must hold top_k={top_k} experts; {top_groups} hold {top_groups * (n_experts // n_groups)}"
    return None
