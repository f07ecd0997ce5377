"""One folder an operation. Importing this package registers them all."""

import importlib

FOLDERS = (
    "bias_gelu",
    "combine_experts",
    "cross_entropy",
    "decode_linear",
    "flash_attention",
    "gated_delta_rule",
    "gated_rms_norm",
    "grouped_mm",
    "kl_div",
    "linear_cross_entropy",
    "linear_kl_div",
    "linear_log_probs",
    "log_probs",
    "lora_linear",
    "rms_norm",
    "rope",
    "short_conv1d",
    "ssd",
    "swiglu",
)
for _folder in FOLDERS:
    importlib.import_module(f"{__name__}.{_folder}")
