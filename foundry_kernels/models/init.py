"""The initial weights of a model."""

from __future__ import annotations

import torch
from torch import nn

from foundry_kernels.models.config import ModelConfig
from foundry_kernels.nn import (
    MLP,
    Experts,
    GatedMLP,
    LayerNorm,
    RelativeBias,
    RMSNorm,
    Router,
)
from foundry_kernels.nn._tables import FixedTables
from foundry_kernels.nn.linear_attention import LinearMixer
from foundry_kernels.nn.self_attention import SelfAttention


@torch.no_grad()
def init_weights(model: nn.Module, config: ModelConfig, generator: torch.Generator | None = None) -> None:
    """Sets embeddings to N(0, init_std), norms to 1 and biases to 0, computes tables, and draws projections (including
    the head and routers) from a normal distribution with mean 0. Its standard deviation follows from ``config.init``:

    - "normal": `init_std`.
    - "xavier": ``sqrt(2 / (fan_in + fan_out))``, for each expert's matrices separately.
    - "depth_scaled": `init_std`, and ``init_std / sqrt(2 n_layers)`` for projections that write to the residual stream:
      the last one of attention and of linear attention, `w2` of feed-forward blocks and `down_proj` of experts.

    Glorot and Bengio, "Understanding the difficulty of training deep feedforward neural networks", AISTATS 2010;
    Radford et al., "Language Models are Unsupervised Multitask Learners" (GPT-2), 2019, section 2.3, with the factor of
    Megatron-LM.
    """
    std = config.init_std
    into_stream = std / (2 * config.n_layers) ** 0.5 if config.init == "depth_scaled" else std
    last = {m.output_projection for m in model.modules() if isinstance(m, SelfAttention | LinearMixer)}
    last |= {module.w2 for module in model.modules() if isinstance(module, GatedMLP | MLP)}

    def deviation(fan_in: int, fan_out: int, writes: bool = False) -> float:
        if config.init == "xavier":
            return float((2.0 / (fan_in + fan_out)) ** 0.5)
        return into_stream if writes else std

    for module in model.modules():
        if isinstance(module, nn.Linear):
            own = deviation(module.in_features, module.out_features, module in last)
            nn.init.normal_(module.weight, 0.0, own, generator=generator)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, 0.0, std, generator=generator)
        elif isinstance(module, Router):
            module.reset_parameters(deviation(module.dim, module.n_experts), generator)
        elif isinstance(module, Experts):
            up, down = (deviation(module.dim, module.width, writes) for writes in (False, True))
            module.reset_parameters(up, generator, down_std=down)
        elif isinstance(module, LinearMixer):
            module.reset_parameters(generator)
            bound = module.conv_size**-0.5  # as of nn.Conv1d, whose own method takes no generator
            for conv in (part for part in module.children() if isinstance(part, nn.Conv1d)):
                for parameter in conv.parameters():
                    nn.init.uniform_(parameter, -bound, bound, generator=generator)
        elif isinstance(module, RelativeBias):
            module.reset_parameters(std, generator)
        elif isinstance(module, RMSNorm | LayerNorm | FixedTables):
            module.reset_parameters()
