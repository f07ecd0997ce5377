"""The dimensions of the tensors of the kernels' operators, from which `foundry_kernels.distributed` makes rules.

Tokens are independent; the gradients of weight and bias are sums over them. A reduced loss is a sum that the public
function leaves to torch where the tokens are sharded, so here it never is.
"""

from collections.abc import Mapping
from typing import Any

OPERATORS = ("linear_cross_entropy_fwd", "linear_cross_entropy_bwd")
UNSHARDED = ("accumulate_product_", "accumulate_product24_")

_OF_TOKENS = ("target", "loss", "lse", "lse_low", "z_loss", "dscale", "predicted")


def sharding(args: Mapping[str, Any]) -> tuple[dict[str, str], str]:
    dims = {"hidden": "...d", "weight": "vd", "bias": "v", "class_weight": "v"} | dict.fromkeys(_OF_TOKENS, "...")
    return dims, "..." if args.get("reduction", "mean") == "none" else ""
