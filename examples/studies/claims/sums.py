"""Parameter counts that tutorials print, and the correct ones."""

from __future__ import annotations

import dataclasses

from foundry_kernels.models import ModelConfig

#: A tutorial's small model: width 256, 4 layers, 8 heads, 4 key-value heads, 8,192 tokens. The tutorial counts
#: feed-forward matrices of 256 x 341, two thirds of 2d, although the rule is two thirds of 4d. Its sum is 2.08 M.
SMALL = ModelConfig(256, 4, 8, n_kv_heads=4, vocab_size=8192)
COUNTED_WIDTH = 2 * 2 * SMALL.dim // 3
LLAMA = ModelConfig.llama("llama-2-7b")


def shares(config: ModelConfig) -> dict[str, float]:
    """The shares of attention, the feed-forward part, and embedding plus head of all parameters."""
    of = config.parameters_by_part().shares
    return {
        "embedding and head": of["embedding"] + of["head"],
        "attention": of["attention"],
        "feed-forward": of["feed_forward"],
    }


def rows() -> list[list[str]]:
    """The rows of the table: the claim, the correct number, and its calculation."""
    tied = dataclasses.replace(SMALL, tie_embeddings=True)
    narrow = dataclasses.replace(SMALL, hidden_dim=COUNTED_WIDTH).parameters_by_part()
    vocabulary = f"{SMALL.vocab_size:,} x {SMALL.dim}"
    attention = SMALL.parameters_by_part()["attention"] // SMALL.n_layers
    block = f"{attention:,} + 3 x {SMALL.dim} x {SMALL.ffn_width} + 2 x {SMALL.dim}"
    llama = ", ".join(f"{part.replace('_', '-')} {count:,}" for part, count in LLAMA.parameters_by_part().items())
    return [
        [
            f"a model of 2.08 M (width {SMALL.dim}, {SMALL.n_layers} layers, {SMALL.n_heads} heads, {SMALL.kv_heads} "
            f"for keys and values, {SMALL.vocab_size:,} tokens)",
            f"{SMALL.n_parameters:,}",
            f"2 x {vocabulary} + {SMALL.n_layers} x ({block}) + {SMALL.dim}: embedding and head; in each layer "
            "attention, feed-forward part and norms; the last norm",
        ],
        [
            "the same with a tied head",
            f"{tied.n_parameters:,}",
            f"{vocabulary} = {SMALL.n_parameters - tied.n_parameters:,} fewer",
        ],
        [
            f"its feed-forward matrices are {SMALL.dim} x {COUNTED_WIDTH}",
            f"{SMALL.dim} x {SMALL.ffn_width}",
            f"two thirds of 4d, up to a multiple of {SMALL.multiple_of}; {COUNTED_WIDTH} is two thirds of 2d, and with "
            f"it all but embedding and head would be {narrow.total - narrow['embedding'] - narrow['head']:,}",
        ],
        [
            "a third of a LLaMA is attention, two thirds are feed-forward",
            ", ".join(f"{name} {share:.1%}" for name, share in shares(LLAMA).items()),
            f"of LLaMA-2-7B's {LLAMA.n_parameters:,}: {llama}",
        ],
    ]
