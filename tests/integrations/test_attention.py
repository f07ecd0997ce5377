"""``attn_implementation="foundry"``: masks, packed sequences, and arguments that are refused."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from any_family import any_family
from patching import IDS, close, logits
from slow import rest_slow
from tiny_hf import draw
from torch import Tensor
from transformers import StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask, create_chunked_causal_mask

import foundry_kernels as fk
import foundry_kernels.integrations.attention.functions as ours
from foundry_kernels.integrations.adapters.tiny import tiny_model
from foundry_kernels.integrations.attention.documents import Documents
from foundry_kernels.integrations.attention.functions import attention, attention_or_sdpa
from foundry_kernels.integrations.attention.plan import AttentionPlan, DenseMask

TRIANGLE = torch.ones(12, 12, dtype=torch.bool).tril().expand(2, 1, 12, 12)


def causal_mask(model: Any, make: Any = create_causal_mask, **options: Any) -> Tensor | None:
    given: dict[str, Any] = {"attention_mask": None, "past_key_values": None, **options}
    return make(config=model.config, inputs_embeds=torch.zeros(2, 12, 64), **given)


# What is supported -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [0, 3])
def test_a_layout_allows_what_the_mask_allows(first: int) -> None:
    """All rows with the tokens start .. end - 1, as one batch, and a key that is not there yet."""
    queries, keys = 4, first + 5
    spans = [(start, end) for start, end in itertools.combinations(range(first + queries + 1), 2)]
    padding = torch.zeros(len(spans) + 1, keys, dtype=torch.bool)  # the last row has no token at all
    for row, (start, end) in enumerate(spans):
        padding[row, start:end] = True
    for traced in (False, True):
        layout = AttentionPlan.of_padding(padding, len(padding), queries, keys, first, "cpu", traced).mask()
        assert torch.equal(seen(layout, len(padding), queries, keys), expected(padding, queries, first))


def expected(padding: Tensor, queries: int, first: int) -> Tensor:
    """``[B, T, S]``: a token sees the tokens up to itself; padding sees nothing."""
    at = torch.arange(queries) + first
    causal = torch.arange(padding.shape[1]) <= at[:, None]
    return causal & padding[:, None] & padding[:, at][..., None]


def seen(layout: Tensor, batch: int, queries: int, keys: int) -> Tensor:
    """``[B, T, S]``: which key each query sees under a causal mask within the sequences of `layout`."""
    allowed = torch.zeros(batch * queries, batch * keys, dtype=torch.bool)
    of_queries, of_keys = layout[0, 0].tolist()
    assert of_queries[-1] == batch * queries
    assert of_keys[-1] == batch * keys
    for (q0, q1), (k0, k1) in zip(itertools.pairwise(of_queries), itertools.pairwise(of_keys), strict=True):
        for q in range(q0, q1):
            allowed[q, k0 : max(k1 - (q1 - 1 - q), k0)] = True
    rows = allowed.view(batch, queries, batch, keys)
    inside = torch.eye(batch, dtype=torch.bool)[:, None, :, None]
    assert not (rows & ~inside).any(), "a query sees another row's keys"
    return (rows & inside).any(2)


def test_padding_is_never_read() -> None:
    q, k, v = (torch.randn(2, 2, 6, 8, requires_grad=True) for _ in range(3))
    padding = torch.ones(2, 6, dtype=torch.bool)
    padding[0, :2] = padding[1, 4:] = False
    layout = AttentionPlan.of_padding(padding, 2, 6, 6, 0, "cpu", False).mask()
    with torch.no_grad():
        for x in (q, k, v):
            x.masked_fill_(~padding[:, None, :, None], torch.nan)
    module = torch.nn.Module()
    out, weights = attention(module, q, k, v, layout, scaling=0.3)
    assert weights is None
    assert out.shape == (2, 6, 2, 8)
    assert out[padding].isfinite().all()
    assert not out[~padding].any()
    out.sum().backward()
    for x in (q, k, v):
        assert x.grad is not None
        assert not x.grad.transpose(1, 2)[~padding].any()
        assert x.grad.transpose(1, 2)[padding].any()


def test_a_mask_of_ones_costs_nothing() -> None:
    model = tiny_model("llama", attn_implementation="foundry")
    assert causal_mask(model) is None
    assert causal_mask(model, attention_mask=torch.ones(2, 12)) is None
    padded = causal_mask(model, attention_mask=torch.ones(2, 12).index_fill(1, torch.tensor([0]), 0))
    assert padded is not None
    assert padded.shape == (1, 1, 2, 11)
    assert padded.dtype == torch.int32


def test_a_static_cache_without_a_mask() -> None:
    """Keys that are longer than what is valid, twice: an empty cache and a continued one."""
    model = tiny_model("llama")

    def run() -> Tensor:
        cache = StaticCache(config=model.config, max_cache_len=32)
        with torch.no_grad():
            first = model(IDS[:, :7], past_key_values=cache).logits
            return torch.cat([first, model(IDS[:, 7:], past_key_values=cache).logits], 1)

    plain = run()
    with fk.patch(model):
        assert close(run(), plain)
        assert close(run(), logits(model))


@pytest.mark.parametrize("family", rest_slow(["gemma3", "llama"]))
def test_beam_search(family: str) -> None:
    model = tiny_model(family)
    mask = torch.ones_like(IDS)
    mask[0, :3] = 0
    options: dict[str, Any] = {"num_beams": 3, "max_new_tokens": 4, "do_sample": False, "attention_mask": mask}
    plain = model.generate(IDS, **options)
    with fk.patch(model):
        assert torch.equal(model.generate(IDS, **options), plain)


def test_bidirectional_attention() -> None:
    model = tiny_model("llama", attn_implementation="foundry")
    assert causal_mask(model, create_bidirectional_mask) is None
    q, k, v = (torch.randn(2, 2, 6, 8) for _ in range(3))
    module = torch.nn.Module()
    plain = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
    torch.testing.assert_close(attention(module, q, k, v, None, is_causal=False)[0], plain)
    module.is_causal = False
    torch.testing.assert_close(attention(module, q, k, v, None)[0], plain)


@pytest.mark.parametrize("keys", [3, 5, 8])
def test_queries_and_keys_are_aligned_as_for_sdpa_where_there_is_no_row(keys: int) -> None:
    """By the first of each, but for a single query; a family of the table aligns the last."""
    module: Any = torch.nn.Module()
    module.config = SimpleNamespace(model_type="bart")
    q, k, v = (torch.randn(2, 2, n, 8) for n in (5, keys, keys))
    for queries in (q, q[:, :, :1]):
        expected = sdpa_attention_forward(module, queries, k, v, None)[0]
        assert close(attention(module, queries, k, v, None)[0], expected)
    module.config.model_type = "llama"
    if keys > 5:
        assert not close(attention(module, q, k, v, None)[0], sdpa_attention_forward(module, q, k, v, None)[0])


def test_queries_that_are_the_same_for_a_batch() -> None:
    q, k = torch.randn(1, 2, 5, 8), torch.randn(3, 2, 7, 8)
    out, _ = attention(torch.nn.Module(), q, k, k, None, is_causal=False)
    assert close(out, attention(torch.nn.Module(), q.expand(3, -1, -1, -1), k, k, None, is_causal=False)[0])


@pytest.mark.parametrize("how", rest_slow(["kernels", "sdpa", "compiled"]))
@torch.no_grad()
def test_a_model_that_cuts_its_first_queries_off(how: str) -> None:
    """Gemma 4 keeps the last tokens alone in its last layers, with or without a mask, and asks "sdpa" by its name."""
    model = any_family("gemma4_text")
    if model is None:
        pytest.skip("this release does not have it")
    ids, padding = draw(), torch.ones(2, 11, dtype=torch.long)
    padding[0, :3] = 0

    def run() -> list[Tensor]:
        # 5 tokens are fewer than the window.
        calls = [(n, keep, mask) for n in (5, 11) for keep in (1, 3) for mask in (None, padding)]
        masks = [None if mask is None else mask[:, :n] for n, _, mask in calls]
        found = [
            model(ids[:, :n], attention_mask=m, logits_to_keep=k) for (n, k, _), m in zip(calls, masks, strict=True)
        ]
        cache = StaticCache(config=model.config, max_cache_len=32)
        found.append(model(ids, cache=cache, logits_to_keep=3))
        first = model(ids[:, :5], use_cache=True)
        return [out.logits for out in (*found, model(ids[:, 5:], cache=first.cache, logits_to_keep=3))]

    expected = run()
    with fk.patch(model, dense_masks="sdpa" if how == "sdpa" else "kernels") as handle:
        assert "Gemma4TextAttention" in {e.module_class for e in handle.report().replaced}
        if how == "compiled":
            compiled = torch.compile(model, backend="eager", fullgraph=True)
            assert close(compiled(ids, logits_to_keep=3).logits, expected[6])
        else:
            assert all(map(close, run(), expected))


def test_dropout_in_training_alone() -> None:
    """Of a padded batch too, which is packed then: padding drops nothing, and no real token sees it."""
    model = tiny_model("llama", attention_dropout=0.5)
    plain = logits(model)
    mask = torch.ones_like(IDS)
    mask[1, 8:] = 0
    with fk.patch(model):
        assert close(logits(model), plain)
        model.train()

        def run(seed: int, ids: Tensor = IDS, **options: Any) -> Tensor:
            torch.manual_seed(seed)
            return model(ids, **options).logits.detach()

        assert torch.equal(run(0), run(0))
        assert not close(run(0), run(1))
        assert not close(run(0), plain)
        other = IDS.masked_fill(mask == 0, 3)
        assert torch.equal(run(0, attention_mask=mask)[mask.bool()], run(0, other, attention_mask=mask)[mask.bool()])


@pytest.mark.parametrize("dims", [4, 5])
def test_the_plan_of_a_mask_goes_to_another_device_with_it(dims: int) -> None:
    """As accelerate moves what layers of a model on several devices get."""
    totals = torch.tensor([0, 2, 4], dtype=torch.int32)
    documents = Documents(totals, totals, 1, 4, 4, "position_ids")
    mask = AttentionPlan().separated(documents, 4).mask(dims)
    assert mask.dim() == dims
    assert vars(mask).keys() == {"_foundry_plan", "to"}
    assert mask.to("cpu") is mask
    for moved in (mask.to("meta", non_blocking=True), mask.to("meta").to("meta", torch.int64)):
        plan = AttentionPlan.of(moved)
        assert moved.shape == mask.shape
        assert plan.documents is documents
        assert plan.totals is not None
        assert plan.totals.device.type == "meta"
    assert AttentionPlan.of(mask > 0).is_callers  # what a model derives from it


# Dense masks, and what is refused -----------------------------------------------------------------------------------


def test_dense_masks_and_padding_between_tokens() -> None:
    model, between = tiny_model("llama"), torch.ones_like(IDS)
    between[1, 5] = 0
    of_pairs = TRIANGLE.clone()
    of_pairs[:, :, 8:, 2:4] = False
    for mask, message in (
        (of_pairs, r"is dense, \(2, 1, 12, 12\) torch.bool; use attn_implementation='foundry', or"),
        (between, "padding between the tokens of a row"),
    ):
        real = between.bool() if mask is between else torch.ones_like(IDS).bool()
        plain = logits(model, attention_mask=mask)
        with fk.patch(model, dense_masks="refuse"), pytest.raises(DenseMask, match=message):
            logits(model, attention_mask=mask)
        for dense_masks in ("kernels", "sdpa"):
            with fk.patch(model, dense_masks=dense_masks):
                assert close(logits(model, attention_mask=mask)[real], plain[real])


def test_masks_that_are_not_causal() -> None:
    """Made as for SDPA, or refused."""
    model = tiny_model("llama", attn_implementation="foundry", attention_chunk_size=4)
    blocks = torch.tensor([[-1] * 4 + [0] * 4 + [-1] * 4]).expand(2, -1)
    some = torch.ones(2, 12).index_fill(1, torch.tensor([0]), 0)

    def diagonal(batch: Any, head: Any, q: Any, k: Any) -> Any:
        return q == k

    for make, options, message in (
        (create_causal_mask, {"block_sequence_ids": blocks}, "not causal"),
        (create_causal_mask, {"block_sequence_ids": blocks, "attention_mask": some}, "not causal"),
        (create_causal_mask, {"or_mask_function": diagonal}, "a mask function of the model or the caller"),
        (create_causal_mask, {"and_mask_function": diagonal}, "a mask function of the model or the caller"),
        (create_bidirectional_mask, {"attention_mask": some}, "is bidirectional"),
        (create_chunked_causal_mask, {}, "is chunked"),
    ):
        model.config._attn_implementation = "foundry_or_error"
        with pytest.raises(DenseMask, match=message):
            causal_mask(model, make, **options)
        model.config._attn_implementation = "sdpa"
        expected = causal_mask(model, make, **options)
        assert expected is not None
        for name in ("foundry_or_sdpa", "foundry"):
            model.config._attn_implementation = name
            dense = causal_mask(model, make, **options)
            assert dense is not None
            if name == "foundry" and make is create_causal_mask and "attention_mask" in options:
                expected = expected & some[:, None, :, None].bool()  # a token that is padding sees nothing
            assert torch.equal(dense, expected)


@pytest.mark.parametrize("family", rest_slow(["bloom", "llama", "gemma2", "gpt2", "falcon"], 2))
def test_padding_does_not_depend_on_the_other_rows(family: str) -> None:
    model = tiny_model(family)
    mask = torch.ones_like(IDS)
    mask[0, 8:] = mask[1, 5] = 0
    with fk.patch(model):
        together = logits(model, attention_mask=mask)
        for row in range(2):
            alone = model(IDS[row : row + 1], attention_mask=mask[row : row + 1]).logits
            assert close(alone, together[row : row + 1])


def test_a_large_mask_carries_its_tiles() -> None:
    """So that the kernels of all layers skip the empty ones; attention is the same without."""
    model = tiny_model("llama", attn_implementation="foundry", attention_chunk_size=64)
    given: dict[str, Any] = {"attention_mask": None, "past_key_values": None, "config": model.config}
    mask = create_chunked_causal_mask(inputs_embeds=torch.zeros(1, 200, 64), **given)
    assert isinstance(mask, Tensor)
    tiles = AttentionPlan.of(mask).tiles
    assert tiles is not None
    assert torch.equal(tiles.dense(), mask)
    assert int((tiles.at(200, 200).tiles == 0).sum()) == 12  # of 4 x 4 all but the diagonal
    q, k, v = (torch.randn(1, 2, 200, 8) for _ in range(3))
    module = torch.nn.Module()
    assert close(attention(module, q, k, v, mask)[0], attention(module, q, k, v, mask.clone())[0])


def test_a_dense_mask_with_what_sdpa_lacks() -> None:
    q, k, v = torch.randn(3, 2, 1, 12, 4)
    for name, value in (("softcap", 5.0), ("s_aux", torch.zeros(1))):
        with pytest.raises(ValueError, match=f"{name} must be None where attention_mask is dense"):
            attention_or_sdpa(torch.nn.Module(), q, k, v, TRIANGLE, **{name: value})


def test_arguments_that_concern_no_attention_are_ignored_or_left_to_who_passed_them(monkeypatch):
    q = torch.randn(1, 2, 4, 8)
    module = torch.nn.Linear(2, 2)
    expected = attention(module, q, q, q, None)[0]
    for function in (attention, attention_or_sdpa, ours.attention_or_eager):
        out, _ = function(module, q, q, q, None, made_up=0.5, position_ids=torch.arange(4)[None], use_cache=True)
        assert torch.equal(out, expected)
        for name in ("head_mask", "block_table", "cache"):
            with pytest.raises(ValueError, match=f"{name} must be None"):
                function(module, q, q, q, None, **{name: torch.ones(2)})
    dense = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    seen = []

    def eager(module, query, key, value, mask, **kwargs):
        seen.append(kwargs)
        return query.transpose(1, 2), None

    monkeypatch.setattr(ours, "_own_eager", lambda module: eager)
    attention_or_sdpa(module, q, q, q, dense, scaling=0.5, position_ids=torch.arange(4)[None])
    assert seen == []
    for options in ({"softcap": 5.0}, {"alibi_slopes": torch.ones(2)}):
        attention_or_sdpa(module, q, q, q, dense, **options)
        assert seen.pop() == options
