"""The dimensions of the tensors of the kernels' operators, from which `foundry_kernels.distributed` makes rules.

Elements are independent; the gradient of the bias is a sum over rows.
"""

from collections.abc import Mapping
from typing import Any

OPERATORS = ("bias_gelu_fwd", "bias_gelu_bwd")


def sharding(args: Mapping[str, Any]) -> tuple[dict[str, str], str]:
    return {"x": "...n", "y": "...n", "bias": "n"}, "...n"
