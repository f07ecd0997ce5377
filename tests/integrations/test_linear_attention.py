"""Linear attention in patched models: documents of several rows, caches, what is refused, and what the report says."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from patching import close
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
    apply_activation_checkpointing,
)

import foundry_kernels as fk
from foundry_kernels.integrations.adapters.tiny import tiny_model
from foundry_kernels.integrations.families import FAMILIES

FAMILY = pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid"])
IDS = torch.randint(3, 128, (2, 12), generator=torch.Generator().manual_seed(0))
TOTALS = torch.tensor([0, 4, 5, 12, 20, 24], dtype=torch.int32)
#: The same documents.
GIVEN: dict[str, dict[str, Any]] = {
    "lengths": {"cu_seq_lens_q": TOTALS, "cu_seq_lens_k": TOTALS, "max_length_q": 8, "max_length_k": 8},
    "positions": {"position_ids": torch.tensor([[*range(4), 0, *range(7)], [*range(8), *range(4)]])},
}


def layer_of(model: Any) -> Any:
    return next(m for m in model.modules() if type(m).__name__.endswith("GatedDeltaNet"))


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def recomputed_by_transformers(model: Any) -> None:
    model.train().gradient_checkpointing_enable({"use_reentrant": False})


def recomputed_by_wrappers(model: Any) -> None:
    """As FSDP does it."""
    apply_activation_checkpointing(model, check_fn=lambda m: type(m).__name__.endswith("DecoderLayer"))
    assert sum(isinstance(m, CheckpointWrapper) for m in model.modules()) == 2


@FAMILY
@pytest.mark.parametrize("recompute", [None, recomputed_by_transformers, recomputed_by_wrappers])
@pytest.mark.parametrize("way", GIVEN)
def test_gradients_of_packed_rows_are_those_of_documents(
    family: str, way: str, recompute: Callable[[Any], None] | None
) -> None:
    model = tiny_model(family)
    given = {"position_ids": GIVEN["positions"]["position_ids"], **GIVEN[way], "use_cache": False}
    pieces = IDS.view(1, -1).split(TOTALS.diff().tolist(), 1)
    alone = torch.cat([model(piece).logits for piece in pieces], 1).view(2, 12, -1)
    weights = torch.randn(alone.shape, generator=torch.Generator().manual_seed(1))
    expected = gradients(model, (alone * weights).sum())
    with fk.patch(model) as handle:
        assert handle.report().mixing == ()
        if recompute is not None:
            recompute(model)
        packed = model(IDS, **given).logits
        assert close(packed, alone)
        found = gradients(model, (packed * weights).sum())
    found = {name.replace("_checkpoint_wrapped_module.", ""): gradient for name, gradient in found.items()}
    assert found.keys() == expected.keys()
    largest = max(float(x.norm()) for x in expected.values())
    for name, gradient in expected.items():
        assert float((found[name] - gradient).norm()) <= 1e-4 * max(float(gradient.norm()), 1e-2 * largest), name


@FAMILY
@torch.no_grad()
def test_a_cache_that_either_filled(family: str) -> None:
    """A prompt read with or without a patch, then single tokens and several, with or without: one cache object."""
    model = tiny_model(family)

    def logits(patched: tuple[bool, ...]) -> Tensor:
        cache, found = None, []
        for use, part in zip(patched, IDS.split((3, 1, 1, 4, 1, 1, 1), 1), strict=True):
            handle = fk.patch(model) if use else None
            out = model(part, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            found.append(out.logits)
            if handle is not None:
                handle.undo()
        return torch.cat(found, 1)

    expected = logits((False,) * 7)
    assert close(logits((True,) * 7), expected)
    assert close(logits((True, False, True, False, True, True, False)), expected)
    assert close(logits((False, True, False, True, False, True, True)), expected)


@FAMILY
def test_states_are_those_of_transformers(family: str) -> None:
    model = tiny_model(family)
    caches = []
    for patched in (False, True):
        handle = fk.patch(model) if patched else None
        with torch.no_grad():
            cache = model(IDS[:, :2], use_cache=True).past_key_values  # fewer tokens than taps
            model(IDS[:, 2:3], past_key_values=cache)
        caches.append(cache)
        if handle is not None:
            handle.undo()
    theirs, ours = (cache.layers[0] for cache in caches)
    assert ours.conv_states[0].shape == theirs.conv_states[0].shape
    assert close(ours.conv_states[0], theirs.conv_states[0])
    assert close(ours.recurrent_states[0], theirs.recurrent_states[0])


@FAMILY
@torch.no_grad()
def test_documents_on_a_cache_are_refused(family: str) -> None:
    model = tiny_model(family)
    fk.patch(model)
    cache = model(IDS[:, :4], use_cache=True).past_key_values
    keys = torch.tensor([0, 6, 12, 18, 24], dtype=torch.int32)
    queries = torch.tensor([0, 2, 8, 10, 16], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": queries, "cu_seq_lens_k": keys, "max_length_q": 6, "max_length_k": 6}
    with pytest.raises(ValueError, match="begins a document on a cache that is not empty"):
        model(IDS[:, 4:], past_key_values=cache, **lengths)
    with pytest.raises(ValueError, match="begins a document on a cache that is not empty"):
        model(IDS[:, 4:], past_key_values=cache, position_ids=torch.tensor([[4, 5, 6, 7, 0, 1, 2, 3]] * 2))


@FAMILY
@torch.no_grad()
def test_lengths_of_one_document_a_row_continue_a_cache(family: str) -> None:
    model = tiny_model(family)
    expected = model(IDS).logits[:, 4:]
    fk.patch(model)
    cache = model(IDS[:, :4], use_cache=True).past_key_values
    queries, keys = (torch.tensor([0, n, 2 * n], dtype=torch.int32) for n in (8, 12))
    lengths = {"cu_seq_lens_q": queries, "cu_seq_lens_k": keys, "max_length_q": 8, "max_length_k": 12}
    assert close(model(IDS[:, 4:], past_key_values=cache, **lengths).logits, expected)


@FAMILY
@torch.no_grad()
def test_a_layer_that_is_called_by_itself(family: str) -> None:
    model = tiny_model(family)
    layer, x = layer_of(model), torch.randn(2, 12, 64, generator=torch.Generator().manual_seed(2))
    expected = layer(x)
    pieces = x.view(1, 24, 64).split(TOTALS.diff().tolist(), 1)
    alone = torch.cat([layer(piece) for piece in pieces], 1).view(2, 12, 64)
    fk.patch(model)
    assert close(layer(x), expected)
    assert close(layer(x, **GIVEN["lengths"]), alone)


def test_the_report_and_which_operations() -> None:
    model = tiny_model("qwen3_5")
    with fk.patch(model) as handle:
        entry = next(e for e in handle.report().replaced if e.module_class == "Qwen3_5GatedDeltaNet")
        assert (entry.name, entry.ops) == ("model.layers.0.linear_attn", ("gated_delta_rule",))
        assert handle.report().backends.keys() >= {"gated_delta_rule", "gated_delta_rule_step", "short_conv1d"}
        assert "Qwen3_5GatedDeltaNet" in str(handle.report())
    others = ("rms_norm", "swiglu", "flash_attention")
    with fk.patch(model, ops=others) as handle:
        assert not [e for e in handle.report().replaced if e.module_class == "Qwen3_5GatedDeltaNet"]
        assert any("Qwen3_5GatedDeltaNet  may mix documents" in line for line in handle.report().mixing)
        with pytest.raises(ValueError, match="Qwen3_5GatedDeltaNet may mix"):
            model(IDS, **GIVEN["lengths"])


@FAMILY
@pytest.mark.parametrize("ops", [("gated_delta_rule",), ("rms_norm",), ("swiglu",), ("gated_delta_rule", "swiglu")])
def test_some_operations(family: str, ops: tuple[str, ...]) -> None:
    model = tiny_model(family)
    expected = model(IDS).logits
    with fk.patch(model, ops=ops) as handle:
        assert {op for e in handle.report().replaced for op in e.ops} <= {*ops}
        assert close(model(IDS).logits, expected)


def test_linear_attention_alone_keeps_documents_apart() -> None:
    """Attention is then transformers' own, which reads position ids too."""
    model = tiny_model("qwen3_5")
    pieces = IDS.view(1, -1).split(TOTALS.diff().tolist(), 1)
    alone = torch.cat([model(piece).logits for piece in pieces], 1).view(2, 12, -1)
    with fk.patch(model, ops=["gated_delta_rule"]):
        assert close(model(IDS, **GIVEN["positions"], use_cache=False).logits, alone)


def test_an_activation_without_a_kernel() -> None:
    model = tiny_model("qwen3_5", hidden_act="gelu")
    report = fk.patch(model).report()
    (left,) = (e for e in report.left if e.module_class == "Qwen3_5GatedDeltaNet")
    assert left.reason == "its activation is gelu, which the convolution's kernel does not have"
    assert any("may mix documents" in line for line in report.mixing)


@FAMILY
def test_copies_and_pickles(family: str) -> None:
    model = tiny_model(family)
    fk.patch(model)
    expected = model(IDS, **GIVEN["lengths"]).logits
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(layer_of(other)) is type(layer_of(model))
        assert torch.equal(other(IDS, **GIVEN["lengths"]).logits, expected)


def test_a_model_of_images_and_text() -> None:
    """Its language model is the same; documents of text are kept apart there too."""
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    from foundry_kernels.integrations.adapters.tiny import tiny_config

    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
    config = Qwen3_5Config(text_config=tiny_config("qwen3_5").to_dict(), vision_config=vision)
    torch.manual_seed(0)
    model = Qwen3_5ForConditionalGeneration(config).eval()
    with torch.no_grad():
        expected = model(IDS).logits
        fk.patch(model)
        assert FAMILIES["qwen3_5"].name in type(layer_of(model)).__name__
        assert close(model(IDS).logits, expected)
        alone = [model(piece).logits for piece in IDS.view(1, -1).split(TOTALS.diff().tolist(), 1)]
        given = {**GIVEN["lengths"], **GIVEN["positions"]}
        assert close(model(IDS, **given).logits, torch.cat(alone, 1).view(2, 12, -1))
