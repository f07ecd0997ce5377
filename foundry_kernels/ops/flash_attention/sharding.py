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

_DENSE = {"q": "bhtd", "k": "bhsd", "v": "bhse", "out": "bhte", "g": "bhte", "sinks": "h"}
_PACKED = {"q": "thd", "k": "shd", "v": "she", "out": "the", "g": "the", "sinks": "h"}
_STARTS = ("cu_seqlens_q", "cu_seqlens_k", "starts_q", "starts_k")
_ROWS = ("lse", "entropy", "max_logit", "delta")


def sharding(args: Mapping[str, Any]) -> tuple[dict[str, str], str]:
    dims = {}
    for name in ("alibi_slopes", "slopes"):
        given = args.get(name)
        dims[name] = "bh" if given is not None and given.ndim == 2 else "h"
    if any(args.get(name) is not None for name in _STARTS):
        return _PACKED | dims | dict.fromkeys(_ROWS, "ht") | dict.fromkeys(_STARTS, "c"), "h"
    return _DENSE | dims | dict.fromkeys(_ROWS, "bht"), "bh"
