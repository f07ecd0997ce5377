"""Packed documents in a patched model: nothing of one reaches another, or the call is refused.

Documents of 5, 9 and 4 tokens are in one row; the first is changed, which must not change the logits of the others.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

import pytest
import torch
from any_family import NAMED, WITHOUT_A_ROW, any_family
from packaging.version import Version
from packed import (
    BY_POSITIONS,
    CAUSAL,
    CHANGED,
    DENSE,
    GIVEN,
    IDS,
    LENGTHS,
    ONES,
    OTHERS,
    POSITIONS,
    SEGMENTS,
    leaks,
    refused,
)
from patching import BUILDABLE, BY_KIND, close
from slow import rest_slow
from tiny_encoders import FAMILIES as ENCODERS
from tiny_encoders import tiny_encoder
from torch import Tensor
from transformers import AutoModelForCausalLM, __version__

import foundry_kernels as fk
from foundry_kernels.integrations.adapters.tiny import tiny_config, tiny_model

#: Those of `NAMED` that have layers which are left, and mix tokens.
MAY_REFUSE = ("deepseek_v32", "gemma4_text", "gpt_neo", "lfm2", "minimax")
#: Families with linear attention, which keeps documents apart in a patched model alone.
LINEAR = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid")
#: Releases in which their linear attention is written otherwise, and stays.
BEFORE_LINEAR = Version(__version__) < Version("5.23")


pytestmark = pytest.mark.usefixtures("no_gradients")


def _arguments(model: Any) -> set[str]:
    return set(inspect.signature(model.forward).parameters)


def built(family: str) -> Any:
    model = any_family(family)
    if model is None:
        pytest.skip("sizes do not suffice to build it in this release")
    return model


def refusal_names(layers: tuple[str, ...], model: Any, **given: Any) -> None:
    """Checks that the model refuses a call, and names the layers of these lines of its report."""
    with pytest.raises(ValueError, match="several documents per row") as refusal:
        model(IDS, **given)
    for line in layers:
        assert line.split()[1] in str(refusal.value), given.keys()


# Every family --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", BUILDABLE)
def test_documents_do_not_see_each_other(family: str) -> None:
    model = tiny_model(family)
    if family in LINEAR and BEFORE_LINEAR:
        mixing = fk.patch(model).report().mixing
        assert mixing
        for given in (OTHERS | BY_POSITIONS).values():
            refusal_names(mixing, model, **given)
        return
    with fk.patch(model):
        alone = torch.cat([model(ids).logits for ids in IDS.split(LENGTHS, 1)], 1)
    ways = OTHERS | (BY_POSITIONS if family != "bloom" else {})
    for training in (False, True):
        model.train(training)
        with fk.patch(model) as handle:
            assert handle.report().mixing == ()
            for name, given in ways.items():
                assert not leaks(model, **given), name
                if name in BY_POSITIONS or family == "bloom":  # the others leave positions as they are
                    assert close(model(IDS, **given).logits, alone), name
            for name, given in DENSE.items():
                if family != "bloom":  # which takes no mask of four dimensions
                    assert refused(model, IDS, **given) or not leaks(model, **given), name


@pytest.mark.parametrize(
    "family", [f if f in NAMED else pytest.param(f, marks=pytest.mark.slow) for f in WITHOUT_A_ROW]
)
def test_families_without_a_row(family: str) -> None:
    """A call is refused, or each document is as it is alone."""
    model = built(family)
    by_positions = "position_ids" in _arguments(model)
    mixing = fk.patch(model).report().mixing
    ways = OTHERS | (BY_POSITIONS if by_positions else {})
    if mixing:
        assert family not in NAMED or family in MAY_REFUSE or BEFORE_LINEAR  # of which releases leave more
        assert model(IDS, attention_mask=ONES) is not None
        for name, given in ways.items():
            if name in OTHERS:
                refusal_names(mixing, model, **given)
            else:  # transformers' own masks may keep them apart
                assert refused(model, IDS, **given) or not leaks(model, **given), name
        return
    if by_positions:
        pieces = zip(IDS.split(LENGTHS, 1), POSITIONS.split(LENGTHS, 1), strict=True)
        alone = torch.cat([model(ids, position_ids=positions).logits for ids, positions in pieces], 1)
    for name, given in ways.items():
        assert not leaks(model, **given), name
        # Before 5.23 a short row of Doge gets no mask, and a short document in a long row does.
        if name in BY_POSITIONS and (family != "doge" or Version(__version__) >= Version("5.23")):
            assert close(model(IDS, **given).logits, alone), name


@pytest.mark.parametrize("family", ["llama", *rest_slow(WITHOUT_A_ROW, 0)])
def test_attention_that_is_left(family: str) -> None:
    """It runs the documents that transformers' own masks keep apart: positions alone, without a cache."""
    model = built(family)
    model.set_attn_implementation("eager")
    try:
        model(IDS)
    except RuntimeError:
        pytest.skip("the sizes do not suit its eager attention")
    fk.patch(model)
    alone = {"position_ids": POSITIONS, "use_cache": False}
    assert (family != "llama" and refused(model, IDS, **alone)) or not leaks(model, **alone)
    for given in (alone | {"attention_mask": ONES}, alone | {"use_cache": True}):
        assert refused(model, IDS, **given) or not leaks(model, **given), given.keys()


@pytest.mark.parametrize("family", ENCODERS)
def test_encoders(family: str) -> None:
    """Those of text keep documents apart; encoder-decoders refuse them."""
    if ENCODERS[family][3] != "text":
        return
    model = tiny_encoder(family)
    arguments = _arguments(model)
    report = fk.patch(model).report()
    if not any("flash_attention" in entry.ops for entry in report.replaced):
        pytest.skip("its attention stays in this release")
    ways = {**OTHERS, **({"positions": BY_POSITIONS["positions"]} if "position_ids" in arguments else {})}
    for name, given in ways.items():
        if model.config.is_encoder_decoder:
            assert refused(model, IDS, decoder_input_ids=IDS, **given), name
        else:
            assert not leaks(model, **given), name


def test_documents_of_a_bidirectional_decoder() -> None:
    """With a window in one layer, in either direction."""
    model = tiny_model("gemma3", use_bidirectional_attention=True)
    alone = torch.cat([model(ids).logits for ids in IDS.split(LENGTHS, 1)], 1)
    fk.patch(model)
    for name, given in (OTHERS | BY_POSITIONS).items():
        assert not leaks(model, **given), name
        assert close(model(IDS, **given).logits, alone), name


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "falcon", "opt", *LINEAR])
def test_gradients_of_layers_that_are_computed_again(family: str) -> None:
    """No loss of one document has a gradient in the tokens of another, and all are those without checkpointing."""
    if family in LINEAR and BEFORE_LINEAR:
        pytest.skip("its linear attention stays in this release")
    model = (built(family) if family == "opt" else tiny_model(family)).train()
    fk.patch(model, return_logits=True)
    found = []
    for again in (False, True):
        if again:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        torch.manual_seed(0)  # of dropout
        with torch.enable_grad():
            x = model.get_input_embeddings()(IDS).detach().requires_grad_()
            out = model(inputs_embeds=x, position_ids=POSITIONS, attention_mask=ONES, use_cache=False).logits
            out[:, 5:14].square().sum().backward()
        assert x.grad is not None
        assert not x.grad[:, :5].any()
        assert not x.grad[:, 14:].any()
        assert x.grad[:, 5:14].any()
        found.append(x.grad)
    assert torch.equal(*found)


def test_left_padding_is_no_document() -> None:
    """What `generate` gives for positions of padding repeats itself, and so may those of a hole."""
    model = tiny_model("llama")
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[0, :3] = mask[1, 4] = 0
    positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
    ids = IDS[:, :16].view(2, 8)
    expected = model(ids, attention_mask=mask, position_ids=positions).logits[mask.bool()]
    fk.patch(model)
    assert close(model(ids, attention_mask=mask, position_ids=positions).logits[mask.bool()], expected)


def test_documents_beside_padding() -> None:
    """Padding behind, before and between the tokens of packed rows: each document is as it is alone."""
    model = tiny_model("qwen2")  # with a window in one layer
    ids = torch.cat([IDS, IDS.flip(1)])
    for at in ([14, 15, 16, 17], [0, 1], [7], [0, 1, 7, 17]):
        mask = torch.ones_like(ids)
        mask[0, at] = 0
        given = {"attention_mask": mask, "position_ids": POSITIONS}
        with fk.patch(model):
            out = model(ids, **given).logits
        pieces = zip(ids[:1].split(LENGTHS, 1), mask[:1].split(LENGTHS, 1), POSITIONS.split(LENGTHS, 1), strict=True)
        alone = [model(i, attention_mask=m, position_ids=p).logits for i, m, p in pieces]
        assert close(out[0][mask[0].bool()], torch.cat(alone, 1)[0][mask[0].bool()]), at
        whole = torch.cat([model(i).logits for i in ids[1:].split(LENGTHS, 1)], 1)
        assert close(out[1], whole[0]), at


# Where masks are dense, and models that hand nothing on --------------------------------------------------------------


@pytest.mark.parametrize("dense_masks", ["kernels", "refuse", "sdpa"])
def test_whatever_dense_masks_run_on(dense_masks: str) -> None:
    for family in ("llama", "gemma2", "cohere2"):
        model = built(family) if family == "cohere2" else tiny_model(family)
        fk.patch(model, dense_masks=dense_masks)
        for name, given in (OTHERS | BY_POSITIONS).items():
            if dense_masks == "refuse" and family == "cohere2":
                with pytest.raises(ValueError, match="in a family that has no row"):
                    model(IDS, **given)
            else:
                assert not leaks(model, **given), name


def test_a_model_that_tells_its_attention_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = built("opt")
    home = sys.modules[type(model).__module__]
    monkeypatch.setattr(home, "create_causal_mask", lambda **given: None)
    layer = home.OPTDecoderLayer
    theirs = layer.forward

    def without(self: Any, hidden_states: Tensor, **given: Any) -> Any:
        return theirs(
            self, hidden_states, **{k: v for k, v in given.items() if k in ("attention_mask", "past_key_values")}
        )

    monkeypatch.setattr(layer, "forward", without)
    handle = fk.patch(model)
    assert any("OPTAttention  gets no document boundaries: such calls raise" in line for line in handle.report().mixing)
    assert "several documents in a row" in str(handle.report())
    model(IDS)
    for given in (BY_POSITIONS["positions"], GIVEN):
        with pytest.raises(
            ValueError, match=r"the model passes none of their boundaries to OPTAttention: they would see each other"
        ):
            model(IDS, **given)


# By name, and masks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", BY_KIND)
def test_by_name(family: str) -> None:
    """Without a patch, attention knows what it is given; GPT-2's learned positions are not given to it."""
    if family in ("bloom", "falcon", *LINEAR):
        pytest.skip("its attention has no name, or its linear attention mixes documents without a patch")
    model = AutoModelForCausalLM.from_config(tiny_config(family), attn_implementation="foundry").eval()
    alone = torch.cat([model(ids).logits for ids in IDS.split(LENGTHS, 1)], 1)
    for name, given in BY_POSITIONS.items():
        if "segments" not in name and not (family == "gpt2" and "lengths" not in name):
            assert close(model(IDS, **given).logits, alone), name
    for name in ("lengths", "lengths, mask", "seq_idx"):
        assert not leaks(model, **OTHERS[name]), name


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64, torch.uint8])
def test_masks_of_integers(dtype: torch.dtype) -> None:
    """Four dimensions: refused, as by SDPA, whatever our own masks look like."""
    model = tiny_model("llama")
    fk.patch(model)
    for mask in (CAUSAL, CAUSAL[..., -1:, :], torch.ones(1, 1, 1, 18)):
        with pytest.raises(TypeError, match=rf"attention_mask .*must be bool or floating; got {dtype}"):
            model(IDS, attention_mask=mask.to(dtype))
    with pytest.raises(TypeError, match=r"attention_mask .*must be bool or floating"):
        model(IDS[:, :2], attention_mask=torch.tensor([[[[0, 1], [0, 2]]]], dtype=dtype))


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_masks_carry_their_direction(family: str) -> None:
    """As in transformers: `is_causal` of a module counts where there is no mask; a mask says it itself."""
    model = tiny_model(family, attn_implementation="sdpa" if family == "llama" else "eager")
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    hole = ONES.clone()
    hole[0, 7] = 0
    right = ONES.clone()
    right[0, 14:] = 0
    for given in ({}, {"attention_mask": hole}, {"attention_mask": right}, {"position_ids": POSITIONS}):
        given = {**given, "use_cache": False}
        real = given.get("attention_mask", ONES).bool()
        if family == "gemma2" and not given.keys() - {"use_cache"}:
            continue  # its own eager attention always has a mask
        expected = model(IDS, **given).logits[real]
        with fk.patch(model, ops=["flash_attention"]):
            assert close(model(IDS, **given).logits[real], expected), given.keys()


@pytest.mark.parametrize("family", BY_KIND)
def test_other_arguments_are_ignored_as_without_a_patch(family: str) -> None:
    others: dict[str, Any] = {
        "token_type_ids": torch.zeros_like(IDS),
        "special_tokens_mask": torch.zeros_like(IDS),
        "length": torch.tensor([18]),
        "return_loss": True,
        "made_up": 3,
    }
    model = tiny_model(family)
    # GPT-2 embeds the types of tokens.
    ignored = {name: value for name, value in others.items() if name not in _arguments(model)}
    model(IDS, labels=IDS, **ignored)
    for training in (False, True):
        with fk.patch(model.train(training)):
            expected = model(IDS, labels=IDS).loss
            assert torch.equal(model(IDS, labels=IDS, **ignored).loss, expected)


@pytest.mark.parametrize("family", rest_slow(["llama", "falcon", "gpt_oss", "opt", "qwen3_5"]))
def test_compiled(family: str) -> None:
    """Lengths are honoured without a value read; what would have to be read fails when the graph runs."""
    layers = {"num_hidden_layers": 1} if family == "llama" else {}
    model = built(family) if family == "opt" else tiny_model(family, **layers)
    fk.patch(model)
    run = torch.compile(model, fullgraph=True, backend="eager")
    expected = model(IDS, **GIVEN, use_cache=False).logits
    assert close(run(IDS, **GIVEN, use_cache=False).logits, expected)
    assert close(run(CHANGED, **GIVEN, use_cache=False).logits[:, 5:], expected[:, 5:])
    if family != "llama":
        assert close(run(IDS, **GIVEN, attention_mask=ONES, use_cache=False).logits, expected)
    else:
        with pytest.raises(RuntimeError, match=r"position_ids restart: torch\.compile must be given cu_seq_lens_q"):
            run(IDS, position_ids=POSITIONS, attention_mask=ONES, use_cache=False)
        with pytest.raises(RuntimeError, match=r"segment ids: torch\.compile must be given cu_seq_lens_q"):
            run(IDS, attention_mask=SEGMENTS, use_cache=False)
