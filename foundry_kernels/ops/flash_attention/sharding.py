"""The dimensions of the tensors of the kernels' operators, of which `foundry_kernels.distributed` makes rules.

Sequences and heads may be divided, the query heads of a group together with their key-value head; of packed sequences
heads only.
"""

from collections.abc import Mapping
from typing import Any

OPERATORS = ("flash_attention_fwd", "flash_attention_bwd")

_DENSE = {"q": "bhtd", "k": "bhsd", "v": "bhse", "out": "bhte", "g": "bhte", "sinks": "h"}
_PACKED = {"q": "thd", "k": "shd", "v": "she", "out": "the", "g": "the", "sinks": "h"}
_STARTS = ("cu_seqlens_q", "cu_seqlens_k", "starts_q", "starts_k")
_ROWS = ("lse", "entropy", "max_logit")


def sharding(args: Mapping[str, Any]) -> tuple[dict[str, str], str]:
    packed = any(args.get(name) is not None for name in _STARTS)
    # Triton's operators take packed sequences as one batch of heads, [1, H, total, D].
    dims = dict(_DENSE if args["q"].ndim == 4 else _PACKED)
    dims |= dict.fromkeys(_ROWS, "bht" if args["q"].ndim == 4 else "ht") | dict.fromkeys(_STARTS, "c")
    for name in ("alibi_slopes", "slopes"):
        given = args.get(name)
        dims[name] = "h" if given is None or given.ndim == 1 else "zh" if packed else "bh"
    return dims, "h" if packed else "bh"
