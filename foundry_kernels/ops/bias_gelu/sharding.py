"""The dimensions of the tensors of the kernels' operators, from which `foundry_kernels.distributed` makes rules.

Elements are independent; the gradient of the bias is a sum over rows. With dropout nothing is sharded: which elements
are dropped depends on the number of a row and a column, and a device does not know how many come before its own.
"""

from collections.abc import Mapping
from typing import Any

OPERATORS = ("bias_act_fwd", "bias_act_bwd")


def sharding(args: Mapping[str, Any]) -> tuple[dict[str, str], str]:
    dims = {"x": "...n", "y": "...n", "bias": "n", "dropout_seed": "..."}
    return dims, "...n" if args.get("dropout_seed") is None else ""
