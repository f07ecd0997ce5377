"""RoPE's tables: against closed forms and transformers' scalings."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import foundry_kernels as fk
from foundry_kernels.ops.rope import RopeScaling, rope_table, table


def test_table_is_exact_at_late_positions() -> None:
    cos, sin = rope_table(128, 131072, base=500000.0)
    assert cos.shape == sin.shape == (131072, 64)
    assert cos.dtype == sin.dtype == torch.float32
    for p, i in ((0, 0), (1, 0), (131071, 0), (131071, 1), (100003, 40), (131071, 63)):
        angle = p * 500000.0 ** (-2 * i / 128)
        assert cos[p, i].item() == pytest.approx(math.cos(angle), abs=1e-7)
        assert sin[p, i].item() == pytest.approx(math.sin(angle), abs=1e-7)


LLAMA_3_1 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
TRAINED = {"original_max_position_embeddings": 4096}
#: Name, base, head dimension, share of it that is rotated, length of the table (below 100 rows: the trained length
#: matters only to dynamic scaling), and Hugging Face's parameters.
PUBLISHED: list[tuple[str, float, int, float, int, dict[str, Any]]] = [
    ("linear", 10000.0, 128, 0.5, 2, {"rope_type": "linear", "factor": 4.0}),
    ("llama-3.1-8b", 500000.0, 128, 1.0, 2, LLAMA_3_1),
    ("llama-3.2-1b", 500000.0, 64, 1.0, 2, LLAMA_3_1 | {"factor": 32.0}),
    ("dynamic-100", 10000.0, 128, 1.0, 100, {"rope_type": "dynamic", "factor": 2.0}),
    ("dynamic-101", 10000.0, 128, 1.0, 101, {"rope_type": "dynamic", "factor": 2.0}),
    ("dynamic-300", 10000.0, 128, 0.25, 300, {"rope_type": "dynamic", "factor": 4.0}),
    ("qwen3-yarn", 1e6, 128, 1.0, 2, {"factor": 4.0, "original_max_position_embeddings": 32768}),
    ("gpt-oss", 150000.0, 64, 1.0, 2, TRAINED | {"factor": 32.0, "truncate": False}),
    ("deepseek-v3", 10000.0, 64, 1.0, 2, TRAINED | {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0}),
    ("deepseek-v2-lite", 10000.0, 64, 1.0, 2, TRAINED | {"factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.5}),
    ("given-factor", 10000.0, 128, 0.5, 2, TRAINED | {"factor": 16.0, "attention_factor": 1.25, "beta_fast": 20.0}),
    ("yarn-short", 10000.0, 64, 1.0, 2, {"factor": 2.0, "original_max_position_embeddings": 4}),
    ("yarn-factor-1", 10000.0, 64, 1.0, 2, TRAINED | {"factor": 1.0}),
]


@pytest.mark.parametrize(
    ("base", "width", "share", "length", "parameters"), [p[1:] for p in PUBLISHED], ids=[p[0] for p in PUBLISHED]
)
def test_scalings_are_those_of_transformers(
    base: float, width: int, share: float, length: int, parameters: dict[str, Any]
) -> None:
    """The frequencies and the attention factor of transformers' own functions."""
    parameters = {"rope_type": "yarn"} | parameters
    trained = 100 if parameters["rope_type"] == "dynamic" else parameters.get("original_max_position_embeddings", 4096)
    config = transformers.LlamaConfig(
        hidden_size=4 * width,
        num_attention_heads=4,
        head_dim=width,
        max_position_embeddings=trained,
        rope_parameters={**parameters, "rope_theta": base, "partial_rotary_factor": share},
    )
    expected, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, "cpu", seq_len=length)
    if parameters["rope_type"] == "dynamic":
        parameters = {**parameters, "original_max_position_embeddings": trained}
    rotary = int(width * share)
    assert expected.shape == (rotary // 2,)
    cos, sin = rope_table(rotary, max(length, 2), base=base, scaling=RopeScaling(**parameters))
    torch.testing.assert_close(torch.atan2(sin[1], cos[1]), expected, rtol=2e-5, atol=1e-9)  # theirs are float32
    torch.testing.assert_close(torch.hypot(cos, sin), torch.full_like(cos, factor), rtol=1e-6, atol=0)


def test_table_follows_the_device() -> None:
    assert rope_table(4, 3, device="meta")[0].device.type == "meta"
    with torch.device("meta"):
        assert rope_table(4, 3)[1].device.type == "meta"
    assert rope_table(4, 0)[0].shape == (0, 2)
    assert fk.rope_table is rope_table


@pytest.mark.slow
def test_compiles_whole() -> None:
    """With each scaling; with dynamic shapes, where numbers are symbols, in parts that are checkpointed too."""
    common = {"factor": 2.0, "original_max_position_embeddings": 8}
    scalings = [None, RopeScaling("linear", 2.0), RopeScaling("dynamic", **common), RopeScaling("yarn", **common)]
    scalings += [RopeScaling("yarn", **common, beta_fast=4.0, mscale=0.7, mscale_all_dim=1.5, truncate=False)]
    scalings += [RopeScaling("llama3", **common, low_freq_factor=1.0, high_freq_factor=4.0)]
    assert {s.rope_type for s in scalings if s is not None} == set(table._PARAMETERS)

    def tables(length: int, base: float, scalings: list[RopeScaling | None], recomputed: bool) -> list[Any]:
        calls = [partial(rope_table, 8, length, base=base, scaling=scaling) for scaling in scalings]
        return [checkpoint(call, use_reentrant=False) if recomputed else call() for call in calls]

    for dynamic in (False, True):
        compiled = torch.compile(tables, fullgraph=True, dynamic=dynamic, backend="eager")
        for length in (10, 12) if dynamic else (10,):
            given = length, 500.0, scalings * (1 + dynamic)
            assert all(map(torch.equal, *map(tree_leaves, (compiled(*given, dynamic), tables(*given, False)))))
