"""One folder an operation. Importing this package registers them all."""

from foundry_kernels.ops import cross_entropy, flash_attention, linear_cross_entropy, rms_norm, rope, swiglu

__all__ = ["cross_entropy", "flash_attention", "linear_cross_entropy", "rms_norm", "rope", "swiglu"]
