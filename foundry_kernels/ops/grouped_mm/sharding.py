"""The dimensions of the tensors of the operators, from which `foundry_kernels.distributed` makes rules.

The columns of the matrices may be sharded; the gradient of x is then a sum. Groups may not: whose rows a device has
would not be known from how the tensors are sharded. Neither may the inner dimension: a sum over it is rounded once.
"""

from collections.abc import Mapping
from typing import Any

OPERATORS = ("grouped_mm_fwd", "grouped_mm_bwd")
#: The product that other operators take on a CPU.
UNSHARDED = ("matmul_",)


def sharding(args: Mapping[str, Any]) -> tuple[dict[str, str], str]:
    return {"x": "mk", "weight": "ekn", "offs": "e", "y": "mn"}, "n"
