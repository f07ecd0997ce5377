"""The dimensions of the tensors of the kernels' operators, from which `foundry_kernels.distributed` makes rules.

A row is normalised on one device; rows may be divided over devices.
"""

from collections.abc import Mapping
from typing import Any

OPERATORS = ("rms_norm_fwd", "rms_norm_bwd", "layer_norm_fwd", "layer_norm_bwd")

_DIMS = (
    dict.fromkeys(("x", "residual", "y", "h"), "...n")
    | dict.fromkeys(("weight", "w", "bias", "b"), "n")
    | dict.fromkeys(("mean", "rstd"), "...")
)


def sharding(args: Mapping[str, Any]) -> tuple[dict[str, str], str]:
    return _DIMS, "..."
