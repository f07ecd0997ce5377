"""The dimensions of the tensors of the kernels' operators, from which `foundry_kernels.distributed` makes rules.

Sequences and heads may be sharded; tokens only where each brings its own position, since a part of a sequence that has
none would count from 0.
"""

from foundry_kernels.core.contract import Dims, Options

OPERATORS = ("rope_apply", "qk_norm_rope_fwd", "qk_norm_rope_bwd")
UNSHARDED = ("rope_append", "position_rows")

_DIMS = (
    dict.fromkeys(("q", "k", "q_out", "k_out"), "bhtd")
    | dict.fromkeys(("q_weight", "k_weight"), "d")
    | dict.fromkeys(("q_rstd", "k_rstd"), "bht")
)


def sharding(args: Options) -> Dims:
    cos, positions = args["cos"], args.get("positions")
    tables = "btr" if cos.ndim == 3 else "pr"
    position_dims = "bt" if positions is not None and positions.ndim == 2 else "t"
    own_positions = cos.ndim == 3 or positions is not None
    return _DIMS | {"cos": tables, "sin": tables, "positions": position_dims}, "bht" if own_positions else "bh"
