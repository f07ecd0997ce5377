"""The dimensions of the tensors of the kernels' operators, from which `foundry_kernels.distributed` makes rules.

Tokens are independent of each other, each with all of its classes. The operators return each token's loss. The sum of a
reduced loss is PyTorch's, which then needs the other devices.
"""

from foundry_kernels.core.contract import Dims, Options

OPERATORS = ("kl_div_fwd", "kl_div_bwd")
UNSHARDED = ("kl_div_fwd_bwd_",)


def sharding(args: Options) -> Dims:
    return {"logits": "...v", "teacher_logits": "...v", "target": "...", "loss": "..."}, (
        "..." if args.get("reduction", "none") == "none" else ""
    )
