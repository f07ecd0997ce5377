"""Models whose blocks decode in one call, and a record of the blocks that did."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import foundry_kernels as fk
from foundry_kernels.models import ModelConfig, Transformer, blocks, transformer
from foundry_kernels.models.decode_block import decode, decode_all

DTYPES = [torch.float32, torch.bfloat16, torch.float16]

#: Differences of blocks: heads, their width, rotation, windows, norms, gates.
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {"dim": 64, "n_heads": 4},
    "grouped": {"dim": 256, "n_heads": 4, "n_kv_heads": 1, "rope_interleaved": False},
    "heads-of-96": {"dim": 96, "n_heads": 3, "n_kv_heads": 3, "head_dim": 96, "hidden_dim": 130},
    "heads-of-128": {"dim": 128, "n_heads": 4, "n_kv_heads": 2, "head_dim": 128, "rope_dim": 64},
    "window": {"dim": 64, "n_heads": 2, "sliding_window": 5, "attention_scale": 0.3},
    "gemma": {
        "dim": 64,
        "n_heads": 2,
        "activation": "geglu_tanh",
        "norm_weight_offset": 1.0,
        "norm_round_before_weight": True,
    },
    "geglu": {"dim": 64, "n_heads": 2, "activation": "geglu"},
    "threads": {"dim": 512, "n_heads": 8, "n_kv_heads": 4, "hidden_dim": 1111, "max_seq_len": 1200},
}


def make(dtype: torch.dtype = torch.float32, **changes: Any) -> Transformer:
    torch.manual_seed(0)
    options: dict[str, Any] = {"dim": 64, "n_layers": 2, "n_heads": 4, "vocab_size": 97, "max_seq_len": 64}
    return Transformer(ModelConfig(**options | changes), dtype=dtype).eval()


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch, allowed: bool = True, together: bool = False) -> Iterator[list[bool]]:
    """Yields whether each block was one call or, with `together`, all blocks. Unless `allowed`, there are no such
    calls."""
    taken: list[bool] = []

    def call(*args: Any) -> Any:
        found = decode(*args) if allowed else None
        taken.append(found is not None)
        return found

    def call_all(layers: Any, *args: Any) -> Any:
        found = decode_all(layers, *args) if allowed and together else None
        taken.extend([True] * len(layers) if found is not None else [])
        return found

    with monkeypatch.context() as patch:
        patch.setattr(blocks, "decode", call)
        patch.setattr(transformer, "decode_all", call_all)
        yield taken


def draw_tokens(batch: int, count: int) -> Tensor:
    return torch.randint(97, (batch, count), generator=torch.Generator().manual_seed(count))


def arguments(**changes: Any) -> list[Any]:
    """Of the operator `decode_block`, for two sequences of three tokens behind five."""
    randn = torch.Generator().manual_seed(0)
    shapes = [(32, 24), (16, 24), (16, 24), (24, 32), (40, 24), (40, 24), (24, 40)]
    weights = [torch.randn(shape, generator=randn) / 5 for shape in shapes]
    cos, sin = fk.rope_table(8, 16)
    given: dict[str, Any] = {
        "branch": torch.randn(2, 3, 24, generator=randn), "stream": torch.randn(2, 3, 24, generator=randn),
        "weights": weights, "norms": [torch.ones(24), torch.ones(24)], "cos": cos, "sin": sin,
        "k_cache": torch.zeros(2, 2, 9, 8), "v_cache": torch.zeros(2, 2, 9, 8), "eps": 1e-6, "weight_offset": 0.0,
        "round_before_weight": False, "interleaved": False, "n_heads": 4, "start": 5, "scale": 0.4,
        "window_left": None, "activation": "silu", "block_table": None, "lengths": None,
    }  # fmt: skip
    return list((given | changes).values())
