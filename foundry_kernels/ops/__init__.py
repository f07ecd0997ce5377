"""One folder an operation. Importing this package registers them all."""

from foundry_kernels.ops import (
    bias_gelu,
    combine_experts,
    cross_entropy,
    decode_linear,
    flash_attention,
    grouped_mm,
    linear_cross_entropy,
    rms_norm,
    rope,
    swiglu,
)

__all__ = [
    "bias_gelu",
    "combine_experts",
    "cross_entropy",
    "decode_linear",
    "flash_attention",
    "grouped_mm",
    "linear_cross_entropy",
    "rms_norm",
    "rope",
    "swiglu",
]
