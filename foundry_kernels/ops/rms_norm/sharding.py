"""The dimensions of the tensors of the kernels' operators, from which `foundry_kernels.distributed` makes rules.

A row is normalised on one device; rows may be sharded over devices. With dropout they may not: which elements are
dropped depends on the number of a row, and a device does not know how many rows come before its own.
"""

from collections.abc import Mapping
from typing import Any

OPERATORS = (
    *("rms_norm_fwd", "rms_norm_bwd", "rms_norm_dropout_bwd"),
    *("layer_norm_fwd", "layer_norm_bwd", "layer_norm_dropout_bwd"),
)

_DIMS = (
    dict.fromkeys(("x", "residual", "y", "h"), "...n")
    | dict.fromkeys(("weight", "w", "bias", "b"), "n")
    | dict.fromkeys(("mean", "rstd"), "...")
    | {"dropout_seed": "..."}
)


def sharding(args: Mapping[str, Any]) -> tuple[dict[str, str], str]:
    return _DIMS, "..." if args.get("dropout_seed") is None else ""
