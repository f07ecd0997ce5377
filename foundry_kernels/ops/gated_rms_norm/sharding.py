"""The dimensions of the tensors of the kernels' operators, from which `foundry_kernels.distributed` makes rules.

A row is normalised on one device; rows may be sharded over devices.
"""

OPERATORS = ("gated_rms_norm_fwd", "gated_rms_norm_bwd")

DIMS = dict.fromkeys(("x", "gate", "y"), "...n") | dict.fromkeys(("weight", "w"), "n") | {"rstd": "..."}
