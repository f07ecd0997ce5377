"""Sums that tutorials print about parameters, and what they come to."""

from __future__ import annotations

import dataclasses
from functools import cache

import torch

from foundry_kernels.models import ModelConfig, Transformer

#: A tutorial's small model: width 256, 4 layers, 8 heads that share 4 for keys and values, 8,192 tokens. It counts
#: feed-forward matrices of 256 x 341, two thirds of 2d where the rule is two thirds of 4d, and calls the sum 2.08 M.
SMALL = ModelConfig(256, 4, 8, n_kv_heads=4, vocab_size=8192)
COUNTED_WIDTH = 2 * 2 * SMALL.dim // 3
LLAMA = ModelConfig.llama("llama-2-7b")


@cache
def parts(config: ModelConfig) -> dict[str, int]:
    """Parameters by what they are of, counted in the model itself (on the meta device, which holds no numbers)."""
    with torch.device("meta"):
        model = Transformer(config)
    found = dict.fromkeys(("embeddings and head", "attention", "feed-forward", "norms"), 0)
    for name, weight in model.named_parameters():
        part = (
            "attention" if ".attention." in name
            else "feed-forward" if ".feed_forward." in name
            else "norms" if "norm" in name
            else "embeddings and head"
        )  # fmt: skip
        found[part] += weight.numel()
    return found


def shares(config: ModelConfig) -> dict[str, float]:
    """Parts of all parameters."""
    counted = parts(config)
    total = sum(counted.values())
    return {name: count / total for name, count in counted.items()}


def rows() -> list[list[str]]:
    """What is claimed, what it comes to, and how that is counted."""
    tied, narrow = (
        dataclasses.replace(SMALL, **change) for change in ({"tie_embeddings": True}, {"hidden_dim": COUNTED_WIDTH})
    )
    of, both = parts(SMALL), SMALL.dim * SMALL.vocab_size
    blocks = sum(count for name, count in parts(narrow).items() if name != "embeddings and head")
    llama = shares(LLAMA)
    shape = (
        f"width {SMALL.dim}, {SMALL.n_layers} layers, {SMALL.n_heads} heads ({SMALL.kv_heads} for keys and values), "
        f"{SMALL.vocab_size:,} tokens"
    )
    block = f"{of['attention'] // SMALL.n_layers:,} + 3 x {SMALL.dim} x {SMALL.ffn_width} + 2 x {SMALL.dim}"
    sums = (
        f"2 x {SMALL.vocab_size:,} x {SMALL.dim} + {SMALL.n_layers} x ({block}) + {SMALL.dim}: embedding and head, "
        f"blocks of attention, feed-forward and norms, the last norm"
    )
    return [
        [f"a model of 2.08 M ({shape})", f"{SMALL.n_parameters:,}", sums],
        ["the same with a tied head", f"{tied.n_parameters:,}", f"{SMALL.vocab_size:,} x {SMALL.dim} = {both:,} fewer"],
        [
            f"its feed-forward matrices are {SMALL.dim} x {COUNTED_WIDTH}",
            f"{SMALL.dim} x {SMALL.ffn_width}",
            f"two thirds of 4d, up to a multiple of {SMALL.multiple_of}; {COUNTED_WIDTH} is two thirds of 2d, and with "
            f"it the blocks alone, without embeddings, are {blocks:,}",
        ],
        [
            "attention is a third of a LLaMA, feed-forward two thirds",
            ", ".join(f"{name} {share:.1%}" for name, share in llama.items() if share >= 0.001),
            f"of LLaMA-2-7B's {LLAMA.n_parameters:,}: "
            + ", ".join(f"{name} {count:,}" for name, count in parts(LLAMA).items()),
        ],
    ]  # fmt: skip
