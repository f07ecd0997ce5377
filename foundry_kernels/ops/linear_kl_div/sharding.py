"""The dimensions of the tensors of the kernels' operators, from which `foundry_kernels.distributed` makes rules.

Tokens are independent; the gradients of weight and bias are sums over them. A reduced loss is a sum that the public
function leaves to torch where the tokens are sharded, so here it never is.
"""

from collections.abc import Mapping
from typing import Any

OPERATORS = ("linear_kl_div_fwd", "linear_kl_div_bwd")

_DIMS = {
    "hidden": "...d", "weight": "vd", "bias": "v", "target": "...", "loss": "...", "dscale": "...",
    "teacher_hidden": "...e", "teacher_weight": "ve", "teacher_bias": "v", "teacher_logits": "...v",
}  # fmt: skip


def sharding(args: Mapping[str, Any]) -> tuple[dict[str, str], str]:
    return _DIMS, "..." if args.get("reduction", "mean") == "none" else ""
