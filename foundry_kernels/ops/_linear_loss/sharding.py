"""The dimensions of the tensors of the losses' operators, from which `foundry_kernels.distributed` makes rules.

Tokens are independent; the gradients of weight and bias are sums over them. A reduced loss is a sum that the public
function leaves to torch where the tokens are sharded, so here it never is.
"""

from __future__ import annotations

from collections.abc import Callable

from foundry_kernels.core.contract import Dims, Options
from foundry_kernels.ops._linear_loss.problem import Loss


def rules(loss: Loss, **constants: str) -> tuple[tuple[str, ...], Callable[[Options], Dims]]:
    """The members `OPERATORS` and `sharding` of a loss's module. constants: their dimensions."""
    dims = {"hidden": "...d", "weight": "vd", "bias": "v", "low": "...r", "up": "vr", "drows": "...n"} | constants
    dims |= dict.fromkeys(("target", "dscale", *loss.results), "...")

    def sharding(args: Options) -> Dims:
        return dims, "" if loss.reduced and args.get("reduction", "mean") != "none" else "..."

    return (f"{loss.name}_fwd", f"{loss.name}_bwd"), sharding
