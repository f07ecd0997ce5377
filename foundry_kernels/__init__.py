"""Fused kernels for training and running Llama-style models, each tested against a plain PyTorch reference."""

import importlib
from typing import TYPE_CHECKING, Any

from foundry_kernels import compat, models, nn
from foundry_kernels._triton import tuning
from foundry_kernels.compat.batch_invariant import batch_invariant
from foundry_kernels.core.registry import OPS, BackendUnavailable, when_dtensor_is_used
from foundry_kernels.integrations import patch, unpatch
from foundry_kernels.ops.bias_gelu import bias_gelu, bias_relu, bias_silu
from foundry_kernels.ops.combine_experts import combine_experts
from foundry_kernels.ops.cross_entropy import cross_entropy
from foundry_kernels.ops.flash_attention import flash_attention, flash_attention_varlen
from foundry_kernels.ops.flash_attention.attention_mask import AttentionMask
from foundry_kernels.ops.grouped_mm import grouped_mm
from foundry_kernels.ops.linear_cross_entropy import linear_cross_entropy
from foundry_kernels.ops.rms_norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from foundry_kernels.ops.rope import RopeScaling, qk_norm_rope, rope, rope_table
from foundry_kernels.ops.swiglu import geglu, glu, reglu, swiglu

__version__ = "0.1.0"

__all__ = [
    "OPS",
    "AttentionMask",
    "BackendUnavailable",
    "RopeScaling",
    "add_layer_norm",
    "add_rms_norm",
    "batch_invariant",
    "bias_gelu",
    "bias_relu",
    "bias_silu",
    "combine_experts",
    "compat",
    "cross_entropy",
    "flash_attention",
    "flash_attention_varlen",
    "geglu",
    "glu",
    "grouped_mm",
    "layer_norm",
    "linear_cross_entropy",
    "models",
    "nn",
    "patch",
    "qk_norm_rope",
    "reglu",
    "rms_norm",
    "rope",
    "rope_table",
    "swiglu",
    "unpatch",
]

tuning.start()
if TYPE_CHECKING:
    from foundry_kernels import distributed as distributed
else:

    def __getattr__(name: str) -> Any:
        """`distributed`, which is imported by its first use: DTensor takes half a second."""
        if name == "distributed":
            return importlib.import_module("foundry_kernels.distributed")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


when_dtensor_is_used(lambda: importlib.import_module("foundry_kernels.distributed.sharding"))
