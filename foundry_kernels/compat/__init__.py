"""Attention, losses, norms and activations with the signatures and layouts of PyTorch and flash-attn.

The functions `flash_attn_*`, `apply_rotary_emb*` and those of `bert_padding` have flash-attn 2's signatures, with
tokens before heads; those of `flash_attn_3` have FlashAttention 3's and those of `fla` flash-linear-attention's;
`scaled_dot_product_attention`, `varlen_attn`, `flex_attention`, `cross_entropy`, `linear_cross_entropy` and
`layer_norm` have PyTorch's; `selective_log_softmax` and `entropy_from_logits` have TRL's; `causal_conv1d_*`, `mamba_*`,
`selective_state_update`, `rmsnorm_fn` and `RMSNormGated` have those of causal-conv1d and mamba_ssm. `use_sdpa` replaces
PyTorch's `scaled_dot_product_attention` in the whole process, `use_flex_attention` its `flex_attention`. Functions that
compute take one more argument, `backend`, and are a thin layer over :func:`foundry_kernels.flash_attention` and similar
functions. They refuse unsupported arguments, and
the error names an alternative.
"""

from foundry_kernels.compat import bert_padding, fla, flash_attn_3, torch_flash
from foundry_kernels.compat.activation import gelu, silu
from foundry_kernels.compat.flash_attn import flash_attn_func, flash_attn_varlen_func
from foundry_kernels.compat.flex import flex_attention
from foundry_kernels.compat.flex_switch import use_flex_attention
from foundry_kernels.compat.kvcache import flash_attn_with_kvcache
from foundry_kernels.compat.log_probs import entropy_from_logits, selective_log_softmax
from foundry_kernels.compat.loss import cross_entropy, linear_cross_entropy
from foundry_kernels.compat.mamba import (
    causal_conv1d_fn,
    causal_conv1d_update,
    mamba_chunk_scan_combined,
    selective_state_update,
)
from foundry_kernels.compat.mamba_block import RMSNormGated, mamba_split_conv1d_scan_combined, rmsnorm_fn
from foundry_kernels.compat.norm import layer_norm, rms_norm
from foundry_kernels.compat.packed import (
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from foundry_kernels.compat.rotary import apply_rotary_emb, apply_rotary_emb_kv_, apply_rotary_emb_qkv_
from foundry_kernels.compat.sdpa import scaled_dot_product_attention
from foundry_kernels.compat.sdpa_switch import use_sdpa
from foundry_kernels.compat.varlen import varlen_attn

torch_flash.register()

__all__ = [
    "RMSNormGated",
    "apply_rotary_emb",
    "apply_rotary_emb_kv_",
    "apply_rotary_emb_qkv_",
    "bert_padding",
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "cross_entropy",
    "entropy_from_logits",
    "fla",
    "flash_attn_3",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "flex_attention",
    "gelu",
    "layer_norm",
    "linear_cross_entropy",
    "mamba_chunk_scan_combined",
    "mamba_split_conv1d_scan_combined",
    "rms_norm",
    "rmsnorm_fn",
    "scaled_dot_product_attention",
    "selective_log_softmax",
    "selective_state_update",
    "silu",
    "use_flex_attention",
    "use_sdpa",
    "varlen_attn",
]
