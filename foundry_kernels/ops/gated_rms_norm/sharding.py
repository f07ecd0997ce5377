"""The dimensions of the tensors of the kernels' operators, from which `foundry_kernels.distributed` makes rules.

A row is normalised on one device; rows may be sharded over devices.
"""

from collections.abc import Mapping
from typing import Any

OPERATORS = ("gated_rms_norm_fwd", "gated_rms_norm_bwd")

_DIMS = dict.fromkeys(("x", "gate", "y"), "...n") | dict.fromkeys(("weight", "w"), "n") | {"rstd": "..."}


def sharding(args: Mapping[str, Any]) -> tuple[dict[str, str], str]:
    return _DIMS, "..."
