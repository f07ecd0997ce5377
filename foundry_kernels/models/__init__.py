"""Models built from the modules of `foundry_kernels.nn`: LLaMA, GPT-2, BLOOM, Falcon and related decoders, encoders,
and encoder-decoders.

The files lie on four floors: a configuration (`fields` to `config`), the parts of a model (caches, blocks, losses and
`model`, the base class that these know), generation, and whole models (`transformer`, `encoder_decoder`).
"""

from foundry_kernels.models.cache import KVCache
from foundry_kernels.models.config import ModelConfig
from foundry_kernels.models.context import Context
from foundry_kernels.models.encoder_decoder import EncoderDecoder
from foundry_kernels.models.generate import generate
from foundry_kernels.models.generator import GeneratedToken, Generator
from foundry_kernels.models.hybrid_cache import HybridCache
from foundry_kernels.models.log_probs import LogProbs
from foundry_kernels.models.paged_cache import PagedKVCache
from foundry_kernels.models.pages import OutOfPages
from foundry_kernels.models.sampling import GenerationStats
from foundry_kernels.models.transformer import Transformer

__all__ = [
    "Context",
    "EncoderDecoder",
    "GeneratedToken",
    "GenerationStats",
    "Generator",
    "HybridCache",
    "KVCache",
    "LogProbs",
    "ModelConfig",
    "OutOfPages",
    "PagedKVCache",
    "Transformer",
    "generate",
]
