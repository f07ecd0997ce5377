"""One folder an operation. Importing this package registers them all."""

from foundry_kernels.ops import (
    bias_gelu,
    combine_experts,
    cross_entropy,
    decode_linear,
    flash_attention,
    gated_delta_rule,
    grouped_mm,
    kl_div,
    linear_cross_entropy,
    linear_kl_div,
    linear_log_probs,
    log_probs,
    rms_norm,
    rope,
    short_conv1d,
    swiglu,
)

__all__ = [
    "bias_gelu",
    "combine_experts",
    "cross_entropy",
    "decode_linear",
    "flash_attention",
    "gated_delta_rule",
    "grouped_mm",
    "kl_div",
    "linear_cross_entropy",
    "linear_kl_div",
    "linear_log_probs",
    "log_probs",
    "rms_norm",
    "rope",
    "short_conv1d",
    "swiglu",
]
