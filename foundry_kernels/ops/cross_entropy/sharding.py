"""The dimensions of the tensors of the kernels' operators, of which `foundry_kernels.distributed` makes rules.

Tokens are independent of each other, each with all of its classes. A reduced loss is a sum over tokens that the public
function leaves to torch where the logits are sharded, so here it never is.
"""

from foundry_kernels.core.contract import Dims, Options

OPERATORS = ("cross_entropy_fwd", "cross_entropy_bwd")
UNSHARDED = ("cross_entropy_bwd_classes_",)

_OF_TOKENS = ("target", "loss", "lse", "lse_low", "z_loss")


def sharding(args: Options) -> Dims:
    dims = {"logits": "...v", "weight": "v", "total_weight": "..."} | dict.fromkeys(_OF_TOKENS, "...")
    return dims, "..." if args.get("reduction", "mean") == "none" else ""
