"""The dimensions of the tensors of the losses' operators, from which `foundry_kernels.distributed` makes rules.

Tokens are independent; the gradients of weight and bias are sums over them. A reduced loss is a sum that the public
function leaves to torch where the tokens are sharded, so here it never is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from foundry_kernels.ops._linear_loss.problem import Loss


def rules(
    loss: Loss, **constants: str
) -> tuple[tuple[str, ...], Callable[[Mapping[str, Any]], tuple[dict[str, str], str]]]:
    """The members `OPERATORS` and `sharding` of a loss's module. constants: their dimensions."""
    dims = {"hidden": "...d", "weight": "vd", "bias": "v", "low": "...r", "up": "vr", "drows": "...n"} | constants
    dims |= dict.fromkeys(("target", "dscale", *loss.results), "...")

    def sharding(args: Mapping[str, Any]) -> tuple[dict[str, str], str]:
        return dims, "" if loss.reduced and args.get("reduction", "mean") != "none" else "..."

    return (f"{loss.name}_fwd", f"{loss.name}_bwd"), sharding
