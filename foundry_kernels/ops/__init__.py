"""One folder an operation. Importing this package registers them all."""

from foundry_kernels.ops import flash_attention, rms_norm, rope, swiglu

__all__ = ["flash_attention", "rms_norm", "rope", "swiglu"]
