"""The dimensions of the tensors of the kernels' operators, from which `foundry_kernels.distributed` makes rules.

Rows of a batch and channels are independent. A gradient of the filter is a sum over the batch. Packed documents are one
row, so only channels are sharded; the states have a document's index in place of the row's.
"""

from foundry_kernels.core.contract import Dims, Options

OPERATORS = ("short_conv1d_fwd", "short_conv1d_bwd")
UNSHARDED = ("short_conv1d_step", "triton_short_conv1d_step")


def sharding(args: Options) -> Dims:
    packed = args.get("cu_seqlens") is not None
    state = "ncs" if packed else "bcs"
    dims = {
        "x": "btc",
        "y": "btc",
        "residual": "btc",
        "weight": "cw",
        "bias": "c",
        "initial_state": state,
        "final_state": state,
    }
    return dims | {"cu_seqlens": "m"}, "c" if packed else "bc"
