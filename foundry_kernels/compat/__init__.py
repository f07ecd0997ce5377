"""Attention by the signatures and layouts that callers of PyTorch and of flash-attn already write.

`flash_attn_func`, `flash_attn_varlen_func` and `flash_attn_with_kvcache` are those of flash-attn 2.x, with tokens
before heads; `scaled_dot_product_attention` is PyTorch's. Each takes one more argument, `backend`, and is a thin layer
over :func:`foundry_kernels.flash_attention` and its kin: what it cannot serve it refuses, and says what to use instead.
"""

from foundry_kernels.compat.flash_attn import flash_attn_func, flash_attn_varlen_func
from foundry_kernels.compat.kvcache import flash_attn_with_kvcache
from foundry_kernels.compat.sdpa import scaled_dot_product_attention

__all__ = [
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "scaled_dot_product_attention",
]
