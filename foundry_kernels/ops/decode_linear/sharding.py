"""The operator is for inference on one device: it takes no DTensors."""

UNSHARDED = ("decode_linear",)
