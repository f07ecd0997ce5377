"""A Llama-style model so small that a test builds many, and tokens for it."""

from __future__ import annotations

import torch
from torch import Tensor

from foundry_kernels.models import ModelConfig, Transformer

TINY = ModelConfig(dim=16, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=11, max_seq_len=24)


def make(config: ModelConfig = TINY, backend: str = "reference", **options) -> Transformer:
    """A model whose every parameter matters: wide enough weights, norms away from 1."""
    model = Transformer(config, backend, **options)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(values * 0.3 + (1.0 if parameter.dim() == 1 else 0.0))
    return model


def draw(batch: int = 3, length: int = 7, seed: int = 0) -> Tensor:
    return torch.randint(TINY.vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))
