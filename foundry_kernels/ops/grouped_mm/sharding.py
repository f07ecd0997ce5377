"""The dimensions of the tensors of the operators, from which `foundry_kernels.distributed` makes rules.

The columns of the matrices may be sharded; the gradient of x is then a sum. Groups may not, because the sharding of the
tensors does not tell which groups' rows a device has. The inner dimension may not, because a sum over it is rounded
once.
"""

OPERATORS = ("grouped_mm_fwd", "grouped_mm_bwd")
#: The matmul that other operators use on a CPU.
UNSHARDED = ("matmul_",)
DIMS = {"x": "mk", "weight": "ekn", "offs": "e", "y": "mn"}
ALONG = "n"
