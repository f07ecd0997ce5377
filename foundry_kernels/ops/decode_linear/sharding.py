"""The operators are for inference on one device: they take no DTensors, nor does the one that refuses the backward pass
of such calls (`foundry_kernels.core.inference`)."""

UNSHARDED = ("decode_linear", "decode_block", "refuse_backward")
