"""The dimensions of the tensors of the thin matmuls, from which `foundry_kernels.distributed` makes rules.

Rows may be sharded, and so may the wide side, in both ways of tensor parallelism: in a layer whose outputs are sharded
"m" of `lora_up`; in one whose inputs are, "k" of `lora_down`, whose result is then a partial sum and is reduced while
it is r wide. With dropout nothing is sharded: which elements are dropped depends on the number of a row and a column.
"""

from collections.abc import Mapping
from typing import Any

OPERATORS = ("lora_down", "lora_up", "lora_outer")
#: Overwrites its first argument; DTensors take `lora_up`.
UNSHARDED = ("lora_up_",)


def sharding(args: Mapping[str, Any]) -> tuple[dict[str, str], str]:
    dims = {"x": "nk", "a": "rk", "t": "nr", "down": "nr", "base": "nm", "y": "nm", "b": "mr", "dropout_seed": "..."}
    dims["douter"] = "kr" if args.get("transposed") else "rk"
    return dims, "nkm" if args.get("dropout_seed") is None else ""
