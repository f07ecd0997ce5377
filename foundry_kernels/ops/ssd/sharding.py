"""The dimensions of the tensors of the step's operator, from which `foundry_kernels.distributed` makes rules. Sequences
run on the operators of linear attention."""

from collections.abc import Mapping
from typing import Any

OPERATORS = ("ssd_step",)


def sharding(args: Mapping[str, Any]) -> tuple[dict[str, str], str]:
    """Heads are not sharded: those of a group share B and C."""
    of_D = {"D": "h" if args.get("D") is not None and args["D"].dim() == 1 else "hp"}
    token = {"x": "bhp", "dt": "bh", "A": "h", "B": "bgn", "C": "bgn", "z": "bhp", "dt_bias": "h", "y": "bhp"}
    return token | of_D | {"state": "bhpn"}, "b"
