"""The dimensions of the tensors of the kernels' operators, from which `foundry_kernels.distributed` makes rules.

Tokens are independent of each other, each with all of its classes.
"""

from collections.abc import Mapping
from typing import Any

OPERATORS = ("log_probs_fwd", "log_probs_bwd")
UNSHARDED = ("log_probs_bwd_classes_",)

_OF_TOKENS = ("target", "log_probs", "entropy", "lse", "lse_low")


def sharding(args: Mapping[str, Any]) -> tuple[dict[str, str], str]:
    return {"logits": "...v", "stats": "...n"} | dict.fromkeys(_OF_TOKENS, "..."), "..."
