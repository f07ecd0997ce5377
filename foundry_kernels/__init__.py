"""Fused kernels for training and running Llama-style models, each tested against a plain PyTorch reference."""

from typing import TYPE_CHECKING

from foundry_kernels._triton import tuning
from foundry_kernels.core import late as _late
from foundry_kernels.core import registry as _registry
from foundry_kernels.core.registry import OPS, BackendUnavailable
from foundry_kernels.ops.bias_gelu import bias_gelu, bias_relu, bias_silu
from foundry_kernels.ops.combine_experts import combine_experts
from foundry_kernels.ops.cross_entropy import cross_entropy
from foundry_kernels.ops.flash_attention import flash_attention, flash_attention_varlen
from foundry_kernels.ops.flash_attention.attention_mask import AttentionMask
from foundry_kernels.ops.gated_delta_rule import (
    delta_rule,
    gated_delta_rule,
    gated_delta_rule_step,
    gated_linear_attention,
)
from foundry_kernels.ops.gated_rms_norm import gated_rms_norm
from foundry_kernels.ops.grouped_mm import grouped_mm
from foundry_kernels.ops.kl_div import kl_div
from foundry_kernels.ops.linear_cross_entropy import linear_cross_entropy
from foundry_kernels.ops.linear_kl_div import linear_kl_div
from foundry_kernels.ops.linear_log_probs import linear_log_probs
from foundry_kernels.ops.log_probs import log_probs
from foundry_kernels.ops.lora_linear import lora_linear, lora_linears
from foundry_kernels.ops.rms_norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from foundry_kernels.ops.rope import RopeScaling, qk_norm_rope, rope, rope_table
from foundry_kernels.ops.short_conv1d import short_conv1d, short_conv1d_step
from foundry_kernels.ops.ssd import ssd, ssd_step
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
    "delta_rule",
    "flash_attention",
    "flash_attention_varlen",
    "gated_delta_rule",
    "gated_delta_rule_step",
    "gated_linear_attention",
    "gated_rms_norm",
    "geglu",
    "glu",
    "grouped_mm",
    "kl_div",
    "layer_norm",
    "linear_cross_entropy",
    "linear_kl_div",
    "linear_log_probs",
    "log_probs",
    "lora_linear",
    "lora_linears",
    "losses",
    "models",
    "nn",
    "patch",
    "qk_norm_rope",
    "reglu",
    "rms_norm",
    "rope",
    "rope_table",
    "short_conv1d",
    "short_conv1d_step",
    "ssd",
    "ssd_step",
    "swiglu",
    "unpatch",
]

if TYPE_CHECKING:
    from foundry_kernels import compat as compat
    from foundry_kernels import diagnostics as diagnostics
    from foundry_kernels import distributed as distributed
    from foundry_kernels import integrations as integrations
    from foundry_kernels import losses as losses
    from foundry_kernels import models as models
    from foundry_kernels.compat.batch_invariant import batch_invariant as batch_invariant
    from foundry_kernels.integrations.patching.handle import unpatch as unpatch
    from foundry_kernels.integrations.patching.patch import patch as patch
del TYPE_CHECKING

#: What takes time to import and many programs do without (DTensor alone takes half a second).
_FOLDERS = ("compat", "diagnostics", "distributed", "integrations", "losses", "models", "nn")
__getattr__, __dir__ = _late.names(
    __name__,
    {folder: f"{__name__}.{folder}" for folder in _FOLDERS}
    | {"batch_invariant": f"{__name__}.compat.batch_invariant", "patch": f"{__name__}.integrations.patching.patch"}
    | {"unpatch": f"{__name__}.integrations.patching.handle"},
)
_late.provide({name: f"{__name__}.integrations.convert.{name}" for name in ("from_hf", "seq2seq")})
_late.provide({"by_name": f"{__name__}.integrations.attention.by_name"})
_late.provide({name: f"{__name__}.models.{name}" for name in ("memory", "mixers")})
_late.provide({"sharding": f"{__name__}.distributed.sharding"})
_registry.when_dtensor_is_used(lambda: _late.module_above("sharding"))
_late.when_imported("transformers.modeling_utils", lambda: _late.module_above("by_name").register())
tuning.start()
