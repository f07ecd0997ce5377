"""One folder an operation. Importing this package registers them all."""

from foundry_kernels.ops import (
    bias_gelu,
    combine_experts,
    cross_entropy,
    decode_linear,
    flash_attention,
    grouped_mm,
    kl_div,
    linear_cross_entropy,
    linear_kl_div,
    linear_log_probs,
    log_probs,
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
    "kl_div",
    "linear_cross_entropy",
    "linear_kl_div",
    "linear_log_probs",
    "log_probs",
    "rms_norm",
    "rope",
    "swiglu",
]
