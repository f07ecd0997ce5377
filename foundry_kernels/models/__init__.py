"""A Llama-style decoder over the modules of `foundry_kernels.nn`."""

from foundry_kernels.models.cache import KVCache
from foundry_kernels.models.config import ModelConfig
from foundry_kernels.models.generate import generate
from foundry_kernels.models.transformer import Transformer

__all__ = ["KVCache", "ModelConfig", "Transformer", "generate"]
