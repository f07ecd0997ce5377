"""The dimensions of the tensors of the kernels' operators, of which `foundry_kernels.distributed` makes rules.

Sequences and heads may be sharded, the query heads of a group together with their key-value head. Of packed sequences
only heads may. What a score function reads is the same on all devices. A mask is sharded with sequences and heads along
the dimensions in which it is not broadcast.
"""

from typing import Any

from foundry_kernels.core.contract import Dims, Options

OPERATORS = ("flash_attention_fwd", "flash_attention_bwd")

_DENSE = {"q": "bhtd", "k": "bhsd", "v": "bhse", "out": "bhte", "sinks": "h"}
_DENSE |= dict.fromkeys(("lse", "entropy", "max_logit"), "bht")
_PACKED = {"q": "thd", "k": "shd", "v": "she", "out": "the", "sinks": "h", "cu_seqlens_q": "c", "cu_seqlens_k": "c"}
_PACKED |= dict.fromkeys(("lse", "entropy", "max_logit"), "ht")
_PAGES = {"k": "xyhd", "v": "xyhe", "block_table": "nm", "seqused_k": "n", "leftpad_k": "n"}
_MASKS = ("attn_mask", "mask_tiles")
_SAME = {"mask_bits": "nw", "dropout_seed": "...", "dscore": "..."}


def sharding(args: Options) -> Dims:
    packed, alibi_slopes = args.get("cu_seqlens_q") is not None, args.get("alibi_slopes")
    per_sequence = alibi_slopes is not None and alibi_slopes.ndim == 2
    if packed:
        pages = {} if args.get("block_table") is None else _PAGES
        return _PACKED | pages | _SAME | {"alibi_slopes": "nh" if per_sequence else "h", "dropout_heads": "nh"}, "h"
    masks = {name: _mask_letters(mask) for name in _MASKS if (mask := args.get(name)) is not None}
    if "attn_mask" in masks:
        masks["dbias"] = masks["attn_mask"]
    return _DENSE | _SAME | masks | {"alibi_slopes": "bh" if per_sequence else "h", "dropout_heads": "bh"}, "bh"


def _mask_letters(mask: Any) -> str:
    """The letters of [b, h, t, s], of which the first may be missing, digits where there is one element for all."""
    letters = "bhts"[4 - len(mask.shape) :]
    return "".join(letter if n > 1 else str(i) for i, (letter, n) in enumerate(zip(letters, mask.shape, strict=True)))
