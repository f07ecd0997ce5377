"""The dimensions of the tensors of the kernels' operators, from which `foundry_kernels.distributed` makes rules.

Tokens are independent of each other, each with all of its classes.
"""

from collections.abc import Mapping
from typing import Any

OPERATORS = ("kl_div_fwd", "kl_div_bwd")
UNSHARDED = ("kl_div_fwd_bwd_",)


def sharding(args: Mapping[str, Any]) -> tuple[dict[str, str], str]:
    return {"logits": "...v", "teacher_logits": "...v", "target": "...", "loss": "..."}, "..."
