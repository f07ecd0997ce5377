"""The dimensions of the tensors of the kernels' operators, from which `foundry_kernels.distributed` makes rules.

Sequences and heads are independent of each other, the heads of v that share a head of q together. Of packed documents
only heads may be sharded.
"""

from foundry_kernels.core.contract import Dims, Options

OPERATORS = ("gated_delta_rule_fwd", "gated_delta_rule_bwd", "gated_delta_rule_step")

_SEQUENCE = {"q": "bhtk", "k": "bhtk", "v": "bhtv", "out": "bhtv", "g": "bht", "beta": "bht", "states": "bhckv"}
_STEP = {"q": "bhk", "k": "bhk", "v": "bhv", "out": "bhv", "g": "bh", "beta": "bh", "state": "bhkv"}


def sharding(args: Options) -> Dims:
    channels = args.get("g") is not None and len(args["g"].shape) == len(args["q"].shape)
    gates = {"A_log": "h", "dt_bias": "hk" if channels else "h"}
    if "state" in args:
        return _STEP | gates | ({"g": "bhk"} if channels else {}), "bh"
    packed = args.get("cu_seqlens") is not None
    state = "nhkv" if packed else "bhkv"
    decay = {"g": "bhtk"} if channels else {}
    return _SEQUENCE | decay | gates | {
        "initial_state": state,
        "final_state": state,
        "cu_seqlens": "m",
    }, "h" if packed else "bh"
