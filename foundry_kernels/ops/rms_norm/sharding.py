"""The dimensions of the tensors of the kernels' operators, from which `foundry_kernels.distributed` makes rules.

A row is normalised on one device; rows may be sharded over devices.
"""

OPERATORS = (
    *("rms_norm_fwd", "rms_norm_bwd", "rms_norm_dropout_bwd"),
    *("layer_norm_fwd", "layer_norm_bwd", "layer_norm_dropout_bwd"),
)

DIMS = (
    dict.fromkeys(("x", "residual", "y", "h"), "...n")
    | dict.fromkeys(("weight", "w", "bias", "b"), "n")
    | dict.fromkeys(("mean", "rstd"), "...")
)
