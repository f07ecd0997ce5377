"""The dimensions of the tensors of the kernels' operators, of which `foundry_kernels.distributed` makes rules.

Sequences and heads may be divided, the query heads of a group together with their key-value head; of packed sequences
heads only.
"""

from collections.abc import Mapping
from typing import Any

OPERATORS = (
    "flash_attention_fwd",
    "flash_attention_bwd",
    "flash_attention_varlen_fwd",
    "flash_attention_varlen_bwd",
)

_DENSE = {"q": "bhtd", "k": "bhsd", "v": "bhse", "out": "bhte", "sinks": "h"}
_PACKED = {"q": "thd", "k": "shd", "v": "she", "out": "the", "sinks": "h", "cu_seqlens_q": "c", "cu_seqlens_k": "c"}
_ROWS = ("lse", "entropy", "max_logit", "delta")


def sharding(args: Mapping[str, Any]) -> tuple[dict[str, str], str]:
    slopes = args.get("alibi_slopes")
    alibi = {"alibi_slopes": "bh" if slopes is not None and slopes.ndim == 2 else "h"}
    if args.get("cu_seqlens_q") is not None:
        return _PACKED | alibi | dict.fromkeys(_ROWS, "ht"), "h"
    return _DENSE | alibi | dict.fromkeys(_ROWS, "bht"), "bh"
