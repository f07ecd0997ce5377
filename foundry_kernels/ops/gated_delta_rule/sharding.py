"""The dimensions of the tensors of the kernels' operators, from which `foundry_kernels.distributed` makes rules.

Sequences and heads are independent of each other, the heads of v that share a head of q together. Of packed documents
only heads may be sharded.
"""

from collections.abc import Mapping
from typing import Any

OPERATORS = ("gated_delta_rule_fwd", "gated_delta_rule_bwd")
UNSHARDED = ("gated_delta_rule_step",)


def sharding(args: Mapping[str, Any]) -> tuple[dict[str, str], str]:
    packed = args.get("cu_seqlens") is not None
    documents = "n" if packed else "b"
    dims = {"q": "bhtk", "k": "bhtk", "v": "bhtv", "out": "bhtv", "states": "bhckv", "cu_seqlens": "m"}
    dims |= dict.fromkeys(("g", "beta"), "bht")
    dims |= dict.fromkeys(("initial_state", "final_state"), documents + "hkv")
    return dims, "h" if packed else "bh"
