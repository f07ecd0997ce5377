"""The dimensions of the tensors of the kernels' operators, from which `foundry_kernels.distributed` makes rules.

Tokens are independent of each other, each with all of its classes.
"""

OPERATORS = ("log_probs_fwd", "log_probs_bwd")
UNSHARDED = ("log_probs_bwd_classes_",)

DIMS = {"logits": "...v", "stats": "...n"} | dict.fromkeys(("target", "log_probs", "entropy", "lse", "lse_low"), "...")
