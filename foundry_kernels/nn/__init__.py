"""Thin modules over the operations: parameters and shapes here, arithmetic in `foundry_kernels.ops`.

Every module takes `backend`: the name of a backend, or a mapping from operations to names (see `_backend.plan`).
"""

from foundry_kernels.nn.attention import Attention, ContextKeyValues
from foundry_kernels.nn.gated_delta_net import GatedDeltaNet
from foundry_kernels.nn.kimi_delta import KimiDeltaAttention
from foundry_kernels.nn.latent_attention import LatentAttention
from foundry_kernels.nn.linear_attention import GatedDeltaState
from foundry_kernels.nn.loss import LinearCrossEntropy
from foundry_kernels.nn.mamba2 import Mamba2
from foundry_kernels.nn.mlp import MLP, GatedMLP
from foundry_kernels.nn.moe import Experts, MoE
from foundry_kernels.nn.multihead import MultiheadAttention
from foundry_kernels.nn.norm import LayerNorm, RMSNorm
from foundry_kernels.nn.positions import AlibiSlopes, SinusoidalEmbedding, alibi_slopes
from foundry_kernels.nn.relative import RelativeBias
from foundry_kernels.nn.rotary import RotaryEmbedding
from foundry_kernels.nn.router import Router, RouterStats, load_balancing_loss, router_z_loss, update_selection_biases
from foundry_kernels.nn.self_attention import KeyValueStore
from foundry_kernels.nn.swiglu import SwiGLU

__all__ = [
    "MLP",
    "AlibiSlopes",
    "Attention",
    "ContextKeyValues",
    "Experts",
    "GatedDeltaNet",
    "GatedDeltaState",
    "GatedMLP",
    "KeyValueStore",
    "KimiDeltaAttention",
    "LatentAttention",
    "LayerNorm",
    "LinearCrossEntropy",
    "Mamba2",
    "MoE",
    "MultiheadAttention",
    "RMSNorm",
    "RelativeBias",
    "RotaryEmbedding",
    "Router",
    "RouterStats",
    "SinusoidalEmbedding",
    "SwiGLU",
    "alibi_slopes",
    "load_balancing_loss",
    "router_z_loss",
    "update_selection_biases",
]
