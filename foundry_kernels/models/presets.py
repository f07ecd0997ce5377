"""Sizes and choices of published models: fields of :class:`ModelConfig`."""

from __future__ import annotations

from typing import Any

from foundry_kernels.ops.rope import RopeScaling

_META = {"norm_eps": 1e-5, "rope_interleaved": True}  # for checkpoints of Meta and Mistral
_LLAMA_2 = {"max_seq_len": 4096, "multiple_of": 256}
_LLAMA_3 = {"vocab_size": 128256, "max_seq_len": 8192, "rope_base": 500000.0, "n_kv_heads": 8}
_LLAMA_3_1 = {**_LLAMA_3, "max_seq_len": 131072, "rope_scaling": RopeScaling("llama3", 8.0, 8192, 1.0, 4.0)}
_LLAMA_3_2 = {**_LLAMA_3_1, "rope_scaling": RopeScaling("llama3", 32.0, 8192, 1.0, 4.0), "tie_embeddings": True}
# The widths are relative to `dim`, as in Meta's files, so that they follow a changed `dim`.
_8B = {"dim": 4096, "n_layers": 32, "n_heads": 32, "multiple_of": 1024, "ffn_dim_multiplier": 1.3}
_70B = {"dim": 8192, "n_layers": 80, "n_heads": 64, "multiple_of": 4096, "ffn_dim_multiplier": 1.3}
_FALCON_40B = {"shared_attention_norm": False, "n_kv_heads": 8}


def _shape(dim: int, n_layers: int, n_heads: int, **others: Any) -> dict[str, Any]:
    return {"dim": dim, "n_layers": n_layers, "n_heads": n_heads, **others}


#: The common fields of all sizes of a family.
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {
        "vocab_size": 50257,
        "max_seq_len": 1024,
        "positions": "learned",
        "norm": "layer_norm",
        "activation": "gelu_tanh",
        "attention_bias": True,
        "mlp_bias": True,
        "tie_embeddings": True,
    },
    "llama": _META,
    "bloom": {
        "vocab_size": 250880,
        "max_seq_len": 2048,
        "positions": "alibi",
        "norm": "layer_norm",
        "embedding_norm": True,
        "activation": "gelu_tanh",
        "attention_bias": True,
        "mlp_bias": True,
        "tie_embeddings": True,
    },
    "falcon": {
        "vocab_size": 65024,
        "max_seq_len": 2048,
        "norm": "layer_norm",
        "activation": "gelu",
        "parallel_residual": True,
        "shared_attention_norm": True,
        "n_kv_heads": 1,
        "tie_embeddings": True,
    },
    "mixtral": {**_META, "n_kv_heads": 8, "rope_base": 1e6, "n_experts": 8, "top_k": 2},
}

SIZES: dict[str, dict[str, dict[str, Any]]] = {
    "gpt2": {
        "small": _shape(768, 12, 12),
        "medium": _shape(1024, 24, 16),
        "large": _shape(1280, 36, 20),
        "xl": _shape(1600, 48, 25),
    },
    "llama": {
        "llama-2-7b": _shape(4096, 32, 32, **_LLAMA_2),
        "llama-2-13b": _shape(5120, 40, 40, **_LLAMA_2),
        "llama-2-70b": {**_LLAMA_2, **_70B, "n_kv_heads": 8},
        "llama-3-8b": {**_8B, **_LLAMA_3},
        "llama-3-70b": {**_70B, **_LLAMA_3},
        "llama-3.1-8b": {**_8B, **_LLAMA_3_1},
        "llama-3.1-70b": {**_70B, **_LLAMA_3_1},
        "llama-3.2-1b": _shape(2048, 16, 32, multiple_of=256, ffn_dim_multiplier=1.5, **_LLAMA_3_2),
        "llama-3.2-3b": _shape(3072, 28, 24, multiple_of=256, **_LLAMA_3_2),
    },
    "bloom": {
        "560m": _shape(1024, 24, 16),
        "1b1": _shape(1536, 24, 16),
        "1b7": _shape(2048, 24, 16),
        "3b": _shape(2560, 30, 32),
        "7b1": _shape(4096, 30, 32),
        "176b": _shape(14336, 70, 112),
    },
    "falcon": {
        "7b": _shape(4544, 32, 71),
        "40b": _shape(8192, 60, 128, **_FALCON_40B),
        "180b": _shape(14848, 80, 232, **_FALCON_40B),
    },
    "mixtral": {
        "8x7b": {**_8B, "max_seq_len": 32768, "load_balancing_coef": 0.02},
        "8x22b": _shape(6144, 56, 48, multiple_of=256, max_seq_len=65536, load_balancing_coef=0.001),
    },
}


def names() -> dict[str, tuple[str, str]]:
    """Family and size of each preset by name, such as "gpt2-small" and "llama-2-7b"."""
    return {
        size if size.startswith(family) else f"{family}-{size}": (family, size)
        for family, sizes in SIZES.items()
        for size in sizes
    }


def fields(family: str, size: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of a size, with `changes`.

    Raises:
        ValueError: an unknown size.
    """
    if size not in SIZES[family]:
        raise ValueError(f"size must be one of {', '.join(SIZES[family])}; got {size!r}")
    return choices(family, {**SIZES[family][size], **changes})


def choices(family: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of a family, with `changes`; without its order of rotary pairs if positions are not rotary."""
    found = {**FAMILIES[family], **changes}
    if found.get("positions", "rope") != "rope" and "rope_interleaved" not in changes:
        found.pop("rope_interleaved", None)
    return found
