"""The dimensions of the tensors of the kernels' operators, of which `foundry_kernels.distributed` makes rules.

Elements are independent of each other; but where the gate holds both halves, its last dimension is not the output's.
"""

from collections.abc import Mapping
from typing import Any

OPERATORS = ("glu_fwd", "glu_bwd")


def sharding(args: Mapping[str, Any]) -> tuple[dict[str, str], str]:
    if args.get("up") is None:
        return {"gate": "...p", "y": "...n"}, "..."
    return dict.fromkeys(("gate", "up", "y"), "...n"), "...n"
