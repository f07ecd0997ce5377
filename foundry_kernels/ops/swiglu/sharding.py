"""The dimensions of the tensors of the kernels' operators, from which `foundry_kernels.distributed` makes rules.

Elements are independent; but the last dimension of a packed gate is not that of the output.
"""

from collections.abc import Mapping
from typing import Any

OPERATORS = ("glu_fwd", "glu_bwd")


def sharding(args: Mapping[str, Any]) -> tuple[dict[str, str], str]:
    if args.get("up") is None:
        return {"gate": "...p", "y": "...n"}, "..."
    return dict.fromkeys(("gate", "up", "y"), "...n"), "...n"
