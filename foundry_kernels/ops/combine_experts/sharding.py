"""The dimensions of the tensors of the kernels' operators, from which `foundry_kernels.distributed` makes rules.

Tokens and columns may be sharded; the rows of x, which any token may name, may not. With sharded tokens the gradient
of x is a sum over devices, with sharded columns that of the weights.
"""

OPERATORS = ("combine_experts_fwd", "combine_experts_bwd")
DIMS = {"x": "md", "weights": "tk", "slots": "tk", "y": "td"}
ALONG = "td"
