"""The dimensions of the tensors of the kernels' operators, from which `foundry_kernels.distributed` makes rules.

Elements are independent; the gradient of the bias is a sum over rows.
"""

OPERATORS = ("bias_act_fwd", "bias_act_bwd")
DIMS = {"x": "...n", "y": "...n", "bias": "n"}
ALONG = "...n"
