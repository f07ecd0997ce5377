"""The dimensions of the tensors of the kernels' operators, from which `foundry_kernels.distributed` makes rules.

Elements are independent; but the last dimension of a packed gate is not that of the output. With dropout nothing is
sharded: which elements are dropped depends on the number of a row and a column, and a device does not know how many
come before its own.
"""

from foundry_kernels.core.contract import Dims, Options

OPERATORS = ("glu_fwd", "glu_bwd")


def sharding(args: Options) -> Dims:
    packed, drops = args.get("up") is None, args.get("dropout_seed") is not None
    dims = {"gate": "...p", "y": "...n"} if packed else dict.fromkeys(("gate", "up", "y"), "...n")
    return dims | {"dropout_seed": "..."}, "" if drops else "..." if packed else "...n"
