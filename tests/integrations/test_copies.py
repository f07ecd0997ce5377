"""Every family, patched: copies, pickles, and a second model of its config."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from patching import IDS, KINDS, close, logits, saved
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModel, AutoModelForCausalLM

import foundry_kernels as fk
from foundry_kernels.integrations.adapters.table import PATCHED
from foundry_kernels.integrations.adapters.tiny import tiny_model
from foundry_kernels.integrations.patching.patch import DENSE_MASKS

LEFT, HOLE = torch.ones_like(IDS), torch.ones_like(IDS)
LEFT[0, :4] = HOLE[1, 5] = 0


WAYS: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": saved,
}


@pytest.mark.parametrize("family", [f if f in KINDS else pytest.param(f, marks=pytest.mark.slow) for f in PATCHED])
def test_copies(family: str) -> None:
    model = tiny_model(family)
    plain = logits(model)
    handle = fk.patch(model)
    expected = logits(model)
    others = [copied(model) for copied in WAYS.values()]
    for other in others:
        assert [type(m) for m in other.modules()] == [type(m) for m in model.modules()]
        assert torch.equal(logits(other), expected)
        assert torch.equal(logits(other, attention_mask=LEFT), logits(model, attention_mask=LEFT))
    handle.undo()
    for other in (*others, *(copied(model) for copied in WAYS.values())):
        if other in others:
            assert fk.patch(other).report() == handle.report()
            fk.unpatch(other)
        assert [type(m) for m in other.modules()] == [type(m) for m in model.modules()]
        assert torch.equal(logits(other), plain)


def test_loaded_where_nothing_was_patched_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is like a new one, which has not imported what `patch` imports."""
    model = tiny_model("llama")
    fk.patch(model)
    expected, pickled = logits(model), pickle.dumps(model)
    name = "foundry_kernels.integrations.attention.functions"
    monkeypatch.setattr(fk.integrations.attention, "functions", sys.modules[name])  # to be restored
    monkeypatch.delitem(sys.modules, name)
    for interface in (AttentionInterface, AttentionMaskInterface):
        monkeypatch.delitem(interface._global_mapping, "foundry")
    assert torch.equal(logits(pickle.loads(pickled)), expected)


QUICK = {(family, i % len(DENSE_MASKS)) for i, family in enumerate(KINDS)}


@pytest.mark.parametrize(
    ("family", "dense_masks"),
    [  # each kind with one of them
        pytest.param(family, dense_masks, marks=() if (family, j) in QUICK else pytest.mark.slow)
        for family in PATCHED
        for j, dense_masks in enumerate(DENSE_MASKS)
    ],
)
def test_a_second_model_of_the_config(family: str, dense_masks: str, tmp_path: Path) -> None:
    """It computes what the first does, while that is patched and afterwards."""
    model = tiny_model(family)
    own = model.config._attn_implementation
    plain, masked = logits(model), logits(model, attention_mask=LEFT)[LEFT.bool()]

    def second(make: Callable[[Any], Any]) -> None:
        other = make(model.config).eval()
        other.load_state_dict(model.state_dict())
        assert close(logits(other), plain)
        assert close(logits(other, attention_mask=LEFT)[LEFT.bool()], masked)
        assert close(logits(model), plain)
        model.save_pretrained(tmp_path)
        assert AutoConfig.from_pretrained(tmp_path)._attn_implementation is None
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
        assert loaded.config._attn_implementation == own
        assert torch.equal(logits(loaded), plain)

    with fk.patch(model, dense_masks=dense_masks):
        second(type(model))
        second(AutoModelForCausalLM.from_config)
        if dense_masks == "sdpa":
            logits(model, attention_mask=HOLE)
    assert {m.config._attn_implementation for m in model.modules() if hasattr(m, "config")} == {own}
    second(AutoModelForCausalLM.from_config)


@pytest.mark.parametrize("family", ["bloom", "falcon"])
def test_the_config_of_a_model_whose_attention_has_no_name(family: str) -> None:
    """Its layers see what is set in the model's config, and the model itself what it was."""
    model = tiny_model(family)
    own = model.config._attn_implementation
    plain = logits(model)
    with fk.patch(model):
        model.config.use_cache = False
        assert model(IDS).past_key_values is None
        assert model.config._attn_implementation == own
        assert model.transformer.config._attn_implementation == "foundry"
        other = copy.deepcopy(model)
        other.config.use_cache = True
        assert other.transformer.config.use_cache
        assert not model.transformer.config.use_cache
    assert type(model.transformer.config) is type(model.config)
    assert not model.transformer.config.use_cache
    assert torch.equal(logits(model), plain)


@pytest.mark.parametrize("family", ["bloom", "falcon"])
def test_a_decoder_by_itself(family: str) -> None:
    model = tiny_model(family).transformer
    with torch.no_grad():
        plain = model(IDS).last_hidden_state
        with fk.patch(model):
            assert close(model(IDS).last_hidden_state, plain)
        assert torch.equal(model(IDS).last_hidden_state, plain)


def test_attention_by_name_is_refused_where_the_model_has_none() -> None:
    """BLOOM's own attention would take the absence of a mask for no mask."""
    model = tiny_model("bloom", attn_implementation="foundry")
    with pytest.raises(ValueError, match=r"attn_implementation='foundry'.*bloom.*foundry_kernels.patch"):
        logits(model)
    decoder = AutoModel.from_config(tiny_model("bloom").config)
    fk.patch(decoder)
    second = AutoModel.from_config(decoder.config)
    with pytest.raises(ValueError, match=r"attn_implementation='foundry'.*bloom.*foundry_kernels.patch"):
        second(IDS)
