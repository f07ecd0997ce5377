"""The operators are for inference on one device: they take no DTensors."""

UNSHARDED = ("decode_linear", "decode_linear_", "decode_block")
