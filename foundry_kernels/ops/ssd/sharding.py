"""The dimensions of the tensors of the step's operator, from which `foundry_kernels.distributed` makes rules; and those
of sequences, which run on the operators of linear attention, with the rules of these."""

from foundry_kernels.core.contract import Dims, Options

OPERATORS = ("ssd_step",)


def sharding(args: Options) -> Dims:
    """Heads are not sharded: those of a group share B and C."""
    of_heads = {"A": "h", "D": "h" if args.get("D") is None or len(args["D"].shape) == 1 else "hp", "dt_bias": "h"}
    if "state" in args:
        token = {"x": "bhp", "dt": "bh", "B": "bgn", "C": "bgn", "z": "bhp", "y": "bhp"}
        return token | of_heads | {"state": "bhpn"}, "b"
    packed = args.get("cu_seqlens") is not None
    tokens = {"x": "bthp", "dt": "bth", "B": "btgn", "C": "btgn", "z": "bthp", "y": "bthp", "cu_seqlens": "m"}
    return tokens | of_heads | {"initial_states": "mhpn" if packed else "bhpn"}, "" if packed else "b"
