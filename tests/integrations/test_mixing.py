"""Packed documents where only a part of a model keeps them apart, and what the report says of such parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from any_family import any_family
from packed import BY_POSITIONS, GIVEN, IDS, LENGTHS, ONES, OTHERS, POSITIONS, leaks
from patching import close
from tiny_encoders import tiny_encoder
from tiny_hf import SIZES, randomise
from torch import nn

import foundry_kernels as fk
from foundry_kernels.integrations.adapters.tiny import tiny_config, tiny_model
from foundry_kernels.integrations.attention.documents import OTHER_NAMES
from foundry_kernels.integrations.patching.mixing import mixers

WAYS = OTHERS | {"positions": BY_POSITIONS["positions, mask"]}


pytestmark = pytest.mark.usefixtures("no_gradients")


def pair(left: str) -> Any:
    """A model of images and text; the attention of its part `left` is left."""
    model = tiny_encoder("clip")
    getattr(model.config, f"{left}_config")._attn_implementation = "eager"
    return model


def test_half_a_model_that_is_left() -> None:
    images = torch.randn(1, 3, 16, 16)
    ids = IDS % 30
    for left in ("vision", "text"):
        model = pair(left)
        plain = model(ids, images)
        report = fk.patch(model).report()
        kept = {"vision": (), "text": ("   2  CLIPAttention  may mix documents: such calls raise",)}[left]
        assert report.mixing == kept
        assert close(model(ids, images).logits_per_image, plain.logits_per_image)
        for name, given in WAYS.items():
            if left == "vision":
                assert not leaks(lambda ids, text=model.text_model, **given: text(ids % 30, **given), **given), name
                model(ids, images, **given)
                continue
            for arguments in ((ids, images), (ids,)):
                with pytest.raises(ValueError, match="several documents per row, which CLIPAttention may mix"):
                    (model if len(arguments) == 2 else model.text_model)(*arguments, **given)


def test_images_have_no_documents() -> None:
    """Five patches beside five tokens of two documents."""
    model = tiny_encoder("clip")
    ids, images = IDS[:, :5] % 30, torch.randn(1, 3, 16, 16)
    expected = model(ids, images).image_embeds
    fk.patch(model)
    for given in (
        {"position_ids": torch.tensor([[0, 1, 0, 1, 2]])},
        {"attention_mask": torch.tensor([[1, 1, 2, 2, 2]])},
    ):
        assert close(model(ids, images, **given).image_embeds, expected)


MIXED: dict[str, tuple[str, dict[str, Any]]] = {
    "MobileBertEmbeddings": (
        "MobileBert",
        {"embedding_size": 32, "intra_bottleneck_size": 32, "true_hidden_size": 32, "intermediate_size": 48},
    ),
    "FNetBasicFourierTransform": ("FNet", {"intermediate_size": 48}),
}


@pytest.mark.parametrize("name", MIXED)
def test_modules_that_take_no_mask(name: str) -> None:
    """Embeddings of three tokens each, and a transform of the row."""
    family, options = MIXED[name]
    config = getattr(transformers, f"{family}Config")(**SIZES, **options)
    model = randomise(getattr(transformers, f"{family}Model")(config))
    expected = model(IDS)[0]
    report = fk.patch(model).report()
    assert any(f"{name}  may mix documents" in line for line in report.mixing)
    assert close(model(IDS)[0], expected)
    for given in WAYS.values():
        with pytest.raises(ValueError, match=f"several documents per row, which {name} may mix"):
            model(IDS, **given)


class Halved(transformers.LlamaForCausalLM):
    """Its inner model gets every other token."""

    def forward(self, input_ids: Any, **given: Any) -> Any:
        return self.model(input_ids[:, ::2])


def test_a_model_that_gets_other_rows() -> None:
    model = Halved(tiny_config("llama")).eval()
    fk.patch(model)
    assert model(IDS)[0].shape[1] == 9
    for given in WAYS.values():
        with pytest.raises(ValueError, match="several documents per row, and LlamaModel gets other rows"):
            model(IDS, **given)


def test_without_attention_documents_are_left_to_the_model() -> None:
    model = tiny_model("llama")
    expected = model(IDS, position_ids=POSITIONS, use_cache=False).logits
    assert leaks(model, attention_mask=ONES, position_ids=POSITIONS)
    report = fk.patch(model, ops=["rms_norm", "swiglu"]).report()
    assert report.mixing == ()
    assert close(model(IDS, position_ids=POSITIONS, use_cache=False).logits, expected)
    assert leaks(model, attention_mask=ONES, position_ids=POSITIONS)


def test_an_attention_that_is_eager_by_choice() -> None:
    model = tiny_model("llama", attn_implementation="eager")
    with fk.patch(model) as handle:
        assert handle.report().mixing == ("   2  LlamaAttention  may mix documents: such calls raise",)
        with pytest.raises(ValueError, match="LlamaAttention may mix"):
            model(IDS, position_ids=POSITIONS)
    fk.patch(model, ops=["flash_attention"])
    assert not leaks(model, position_ids=POSITIONS)


@pytest.mark.parametrize("name", sorted(OTHER_NAMES))
def test_lengths_by_other_names(name: str) -> None:
    """Alone and beside the names that are read; by name, too."""
    by_name = transformers.AutoModelForCausalLM.from_config(tiny_config("llama"), attn_implementation="foundry").eval()
    patched = tiny_model("llama")
    fk.patch(patched)
    for model in (patched, by_name):
        for given in ({}, GIVEN):
            with pytest.raises(ValueError, match=f"^{name} must be None: documents are given by cu_seq_lens_q, "):
                model(IDS, **given, **{name: torch.tensor([0, 5, 14, 18])})
        model(IDS, **{name: None})


def test_generation_of_models_that_refuse_documents() -> None:
    """Padded prompts are no documents, whatever cache a model has."""
    ids = IDS[:, :12].view(2, 6)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    for family in ("mamba", "gpt_neo"):
        if (model := any_family(family)) is None:
            continue
        options = {"attention_mask": mask, "max_new_tokens": 3, "do_sample": False, "pad_token_id": 2}
        expected = model.generate(ids, **options)
        with fk.patch(model) as handle:
            assert handle.report().mixing
            assert torch.equal(model.generate(ids, **options), expected), family


class Mixer(nn.Module):
    """A module with the arguments that a test gives it."""

    def __init__(self, *children: nn.Module) -> None:
        super().__init__()
        self.held = nn.ModuleList(children)


def made(name: str, arguments: str, *children: nn.Module) -> nn.Module:
    space: dict[str, Any] = {}
    exec(f"def forward(self, {arguments}): pass", space)
    return type(name, (Mixer,), {"forward": space["forward"]})(*children)


def test_what_a_module_takes_tells_whether_it_mixes() -> None:
    class Model(transformers.PreTrainedModel):
        config_class = transformers.LlamaConfig

        def __init__(self, *children: nn.Module) -> None:
            super().__init__(tiny_config("llama"))
            self.held = nn.ModuleList(children)

        def forward(self, input_ids: Any) -> None:
            pass

    def found(*children: nn.Module) -> list[str]:
        return [type(m).__name__ for m in mixers(Model(*children), (), ())[0]]

    attention, mlp = made("A", "x, attention_mask"), made("MLP", "x")
    assert found(made("Layer", "x, attention_mask, cache", attention, mlp)) == ["A"]
    of_both = made("Layer", "x, attention_mask, cache", attention)
    of_mlp = type(of_both)(mlp)  # hands nothing on, and does nothing else with it
    assert found(of_both, of_mlp) == ["A"]
    assert found(of_mlp) == ["Layer"]
    for argument in ("mask", "past_key_values", "layer_past", "cache_params", "state", "mems", "conv_mask"):
        assert found(made("B", f"x, {argument}=None")) == ["B"]
    for argument in (
        "position_ids",
        "past_key_values_length",
        "hidden_state",
        "use_cache",
        "pixel_mask",
        "cache_position",
    ):
        assert found(made("B", f"x, {argument}=None")) == []
    assert found(made("Embedding", "attention_mask, position_ids"), nn.Conv1d(4, 4, 1), nn.Linear(4, 4)) == []
    assert found(nn.Conv1d(4, 4, 3), nn.GRU(4, 4)) == ["Conv1d", "GRU"]
    assert found(made("Layer", "x, mask", nn.Conv1d(4, 4, 3))) == ["Layer"]
    nested = Model(attention, made("Outer", "images, mask"), made("Adapter", "hidden_states, mask"), Model(mlp))
    assert [type(m).__name__ for m in mixers(nested, (), ())[0]] == ["Adapter"]


def test_documents_by_positions_of_three_axes() -> None:
    """With an image in the second one, and a mask of ones or none."""
    config = transformers.Qwen3VLTextConfig(
        **SIZES, intermediate_size=48, num_key_value_heads=2, head_dim=8,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
    )  # fmt: skip
    model = randomise(transformers.Qwen3VLTextModel(config))
    counted = POSITIONS.expand(3, 1, -1).clone()
    counted[:, 0, 6:12] = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 2, 2, 2], [1, 2, 3, 1, 2, 3]])
    counted[:, 0, 12:14] = torch.tensor([4, 5])
    pieces = zip(IDS.split(LENGTHS, 1), counted.split(LENGTHS, 2), strict=True)
    alone = torch.cat([model(ids, position_ids=positions)[0] for ids, positions in pieces], 1)
    fk.patch(model)
    for given in ({}, {"attention_mask": ONES}, {"use_cache": False}, {"attention_mask": ONES, "use_cache": False}):
        assert close(model(IDS, position_ids=counted, **given)[0], alone)
        both = model(IDS.repeat(2, 1), position_ids=counted.expand(3, 2, -1), **{**given, "attention_mask": None})[0]
        assert close(both, alone.expand(2, -1, -1))
