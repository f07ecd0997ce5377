"""The operators are for inference on one device: they take no DTensors."""

UNSHARDED = ("decode_linear", "decode_block")
