"""The dimensions of the tensors of the kernels' operators, from which `foundry_kernels.distributed` makes rules.

Tokens are independent; the gradients of weight and bias are sums over them.
"""

from collections.abc import Mapping
from typing import Any

OPERATORS = ("linear_log_probs_fwd", "linear_log_probs_bwd")

_OF_TOKENS = ("target", "log_probs", "entropy", "lse", "lse_low")


def sharding(args: Mapping[str, Any]) -> tuple[dict[str, str], str]:
    return {"hidden": "...d", "weight": "vd", "bias": "v", "drows": "...n"} | dict.fromkeys(_OF_TOKENS, "..."), "..."
