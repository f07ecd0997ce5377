"""Layers in the form that the Hub's `kernels` asks for: no state, no constructor, the arguments of what they replace.

`kernelize` of that library puts their forwards into modules of transformers, by the names that these have there:
"RMSNorm" and "rotary_pos_emb". `foundry_kernels.integrations.trainers.hub` writes the folder that it loads them from.
"""

from __future__ import annotations

from torch import Tensor, nn

from foundry_kernels.ops.rms_norm import rms_norm
from foundry_kernels.ops.rope import rope

__all__ = ["RMSNorm", "RotaryPosEmb"]


class RMSNorm(nn.Module):
    """The norm of Llama, Mistral, Qwen and most others: the result is rounded before it is multiplied by the weight."""

    can_torch_compile = True
    has_backward = True

    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        return rms_norm(hidden_states, self.weight, self.variance_epsilon, round_before_weight=True)


class RotaryPosEmb(nn.Module):
    """The rotation of queries and keys by tables ``[B, T, R]`` of two equal halves."""

    can_torch_compile = True
    has_backward = True

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        half = cos.shape[-1] // 2
        if unsqueeze_dim == 2:  # [B, T, H, D]
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        q, k = rope(q, k, cos[..., :half], sin[..., :half])
        return (q.transpose(1, 2), k.transpose(1, 2)) if unsqueeze_dim == 2 else (q, k)
