"""The dimensions of the tensors of the thin matmuls, from which `foundry_kernels.distributed` makes rules.

Rows may be sharded, and so may the wide side, in both ways of tensor parallelism: in a layer whose outputs are sharded
"m" of `lora_up`; in one whose inputs are, "k" of `lora_down`, whose result is then a partial sum and is reduced while
it is r wide. With dropout nothing is sharded: which elements are dropped depends on the number of a row and a column.
"""

from foundry_kernels.core.contract import Dims, Options

OPERATORS = ("lora_down", "lora_up", "lora_outer")
#: Overwrites its first argument; DTensors take `lora_up`.
UNSHARDED = ("lora_up_",)


def sharding(args: Options) -> Dims:
    dims = {"x": "...k", "a": "rk", "t": "...r", "down": "...r", "base": "...m", "y": "...m", "b": "mr"}
    dims |= {"weight": "mk", "lora_a": "rk", "lora_b": "mr", "bias": "m", "dropout_seed": "..."}
    dims["douter"] = "kr" if args.get("transposed") else "rk"
    if args.get("dropout_seed") is not None:
        return dims, ""
    return dims, "0" if "lora_a" in args else "0km"  # the whole operation is sharded without collectives along rows
