"""What runs where a mask is dense: SDPA, a model's own eager attention; and attention that is eager by choice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from patching import IDS, close, gradients, logits
from slow import rest_slow
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, Gemma3Config, Gemma3ForConditionalGeneration, SiglipVisionConfig

import foundry_kernels as fk
from foundry_kernels.integrations.adapters.tiny import tiny_config, tiny_model
from foundry_kernels.integrations.attention.functions import attention_or_eager, attention_or_sdpa
from foundry_kernels.integrations.attention.plan import DenseMask

# A soft cap or sinks, which SDPA lacks -----------------------------------------------------------------------------

HOLE = torch.ones_like(IDS)
HOLE[0, :2] = HOLE[1, 5] = 0
REAL = HOLE.bool()
MASK = torch.ones(1, 1, 12, 12, dtype=torch.bool).tril()
WITHOUT_SDPA = pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])


def loss_gradients(model: Any, **options: Any) -> Tensor:
    """Compares the tokens that predict a token; what a model computes at padding is arbitrary."""
    model.zero_grad()
    before = torch.nn.functional.pad(REAL, (1, 0))[:, :-1]
    model(IDS, labels=IDS.masked_fill(~(REAL & before), -100), **options).loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@WITHOUT_SDPA
def test_padding_with_a_hole(family: str) -> None:
    model = tiny_model(family)
    plain, plain_gradients = logits(model, attention_mask=HOLE)[REAL], loss_gradients(model, attention_mask=HOLE)
    own = pytest.raises(DenseMask, match="own eager attention where there is a soft cap or sinks")
    with fk.patch(model, dense_masks="refuse"), own:
        logits(model, attention_mask=HOLE)
    with fk.patch(model) as handle:
        assert handle.report().dense_masks == ""
        assert close(logits(model, attention_mask=HOLE)[REAL], plain)
        assert close(loss_gradients(model, attention_mask=HOLE), plain_gradients)
    with fk.patch(model, dense_masks="sdpa") as handle:
        assert handle.report().dense_masks == "the model's own eager attention"
        assert str(handle.report()).endswith("calls with dense masks run on the model's own eager attention")
        assert close(logits(model, attention_mask=HOLE)[REAL], plain)
        assert close(loss_gradients(model, attention_mask=HOLE), plain_gradients)


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "llama"])
def test_by_name(family: str) -> None:
    """The modules have their own classes where there is no patch."""
    plain, ours = tiny_model(family), tiny_model(family, attn_implementation="foundry_or_eager")
    assert close(logits(ours, attention_mask=HOLE)[REAL], logits(plain, attention_mask=HOLE)[REAL])
    assert close(logits(ours), logits(plain))
    plain.set_attn_implementation("eager")
    expected = plain(IDS, attention_mask=HOLE, output_attentions=True).attentions
    found = ours(IDS, attention_mask=HOLE, output_attentions=True).attentions
    where = REAL[:, None, :, None]
    assert all(close(a * where, e * where) for a, e in zip(found, expected, strict=True))


@pytest.mark.parametrize("function", [attention_or_sdpa, attention_or_eager])
def test_dropout_goes_to_what_runs_the_call(function: Any) -> None:
    """SDPA and eager attention drop out by torch's own generator."""
    module = tiny_model("llama").train().model.layers[0].self_attn
    q, k = torch.randn(1, 4, 12, 16), torch.randn(1, 2, 12, 16)

    def run(dropout: float) -> Tensor:
        torch.manual_seed(0)
        return function(module, q, k, k, MASK, scaling=0.25, dropout=dropout)[0]

    assert torch.equal(run(0.5), run(0.5))
    assert not close(run(0.5), run(0.0))


def test_no_eager_attention_to_be_found() -> None:
    q, k, v = torch.randn(3, 1, 1, 12, 4)
    with pytest.raises(ValueError, match=r"softcap must be None where .*no eager_attention_forward beside Module"):
        attention_or_sdpa(torch.nn.Module(), q, k, v, MASK, softcap=5.0)
    with pytest.raises(ValueError, match=r"attention_mask is dense: there is no eager_attention_forward beside Module"):
        attention_or_eager(torch.nn.Module(), q, k, v, MASK)


@WITHOUT_SDPA
def test_a_mask_of_numbers(family: str) -> None:
    """Four dimensions, to be added to the scores: taken as it is."""
    model = tiny_model(family)
    mask = torch.full((12, 12), torch.finfo(torch.float32).min).triu(1).expand(2, 1, 12, 12).clone()
    mask[:, :, 8:, 2:4] = -1.5
    plain = logits(model, attention_mask=mask)
    assert not close(plain, logits(model))
    for dense_masks in ("kernels", "sdpa"):
        with fk.patch(model, dense_masks=dense_masks):
            assert close(logits(model, attention_mask=mask), plain)


@pytest.mark.parametrize("autocast", [False, True])
def test_documents_by_a_mask_of_numbers_in_bfloat16(autocast: bool) -> None:
    """The second document sees nothing of the first 64 tokens, a tile of the kernels."""
    dtype = torch.float32 if autocast else torch.bfloat16
    ids = torch.arange(3, 99)[None]
    document = (ids >= 70).int()
    seen = (document[..., None] == document[:, None]).tril()[:, None]
    mask = torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)

    def run(model: Any, low: bool) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            return gradients(model, input_ids=ids, labels=ids, attention_mask=mask.to(model.dtype)).float()

    model = tiny_model("llama", dtype=dtype)
    exact, plain = run(tiny_model("llama", dtype=dtype).float(), False), run(model, autocast)
    with fk.patch(model):
        assert float((run(model, autocast) - exact).norm()) <= 1.1 * float((plain - exact).norm())


@pytest.mark.parametrize("family", rest_slow(["gemma2", "gpt_oss"]))
@pytest.mark.parametrize("dense_masks", rest_slow(["kernels", "sdpa"]))
def test_compiled(family: str, dense_masks: str) -> None:
    model = tiny_model(family)
    plain = logits(model, attention_mask=HOLE)[REAL]
    fk.patch(model, dense_masks=dense_masks)
    counters.clear()
    with torch.no_grad():
        run = torch.compile(model, fullgraph=True, backend="eager")
        assert close(run(IDS, attention_mask=HOLE, use_cache=False).logits[REAL], plain)
    assert not counters["graph_break"]


# Gemma 3 with images -----------------------------------------------------------------------------------------------


def gemma3(**changes: Any) -> Any:
    vision = SiglipVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=8
    )
    tokens = {"mm_tokens_per_image": 4, "image_token_index": 120, "boi_token_index": 121, "eoi_token_index": 122}
    config = Gemma3Config(text_config=tiny_config("gemma3", **changes), vision_config=vision, **tokens)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Gemma3ForConditionalGeneration(config).eval()


TEXT = torch.zeros_like(IDS)
IMAGE = TEXT.index_fill(1, torch.arange(2, 6), 1)
LEFT = torch.ones_like(IDS)
LEFT[0, :3] = 0
ROWS: dict[str, dict[str, Any]] = {
    "alone": {},
    "no cache": {"use_cache": False},
    "padding": {"attention_mask": LEFT},
    "packed": {"position_ids": torch.tensor([[*range(7), *range(5)], [*range(12)]]), "use_cache": False},
}


@pytest.mark.parametrize("how", ROWS)
def test_text_by_its_token_types(how: str) -> None:
    """All zeros: nothing but text, which needs no mask, and none is made."""
    model, kept = gemma3(), ROWS[how].get("attention_mask", torch.ones_like(IDS)).bool()
    plain = logits(model, token_type_ids=TEXT, **ROWS[how])
    with fk.patch(model, dense_masks="refuse"):
        ours = logits(model, token_type_ids=TEXT, **ROWS[how])
        assert close(ours[kept], plain[kept])
        assert torch.equal(ours, logits(model, **ROWS[how]))


@pytest.mark.parametrize("mask", [None, LEFT], ids=["alone", "padding"])
def test_the_tokens_of_an_image_see_each_other(mask: Tensor | None) -> None:
    model, kept = gemma3(), (torch.ones_like(IDS) if mask is None else mask).bool()
    plain = logits(model, token_type_ids=IMAGE, attention_mask=mask)
    assert not close(plain[kept], logits(model, token_type_ids=TEXT, attention_mask=mask)[kept])
    with fk.patch(model, dense_masks="refuse"), pytest.raises(DenseMask, match="is not causal"):
        logits(model, token_type_ids=IMAGE, attention_mask=mask)
    for dense_masks in ("kernels", "sdpa"):
        with fk.patch(model, dense_masks=dense_masks):
            assert close(logits(model, token_type_ids=IMAGE, attention_mask=mask)[kept], plain[kept])


def test_generation_with_token_types() -> None:
    model = gemma3()
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "attention_mask": LEFT}
    for types, dense_masks in ((TEXT, "refuse"), (IMAGE, "sdpa"), (IMAGE, "kernels")):
        plain = model.generate(IDS, token_type_ids=types, **options)
        with fk.patch(model, dense_masks=dense_masks):
            assert torch.equal(model.generate(IDS, token_type_ids=types, **options), plain)


@pytest.mark.slow
@pytest.mark.parametrize("dense_masks", ["kernels", "refuse", "sdpa"])
def test_token_types_compiled(dense_masks: str) -> None:
    """A mask function cannot be looked into there: the error says what to do, and a dense mask does."""
    model = gemma3()
    plain = logits(model, token_type_ids=IMAGE)
    options: dict[str, Any] = {"token_type_ids": IMAGE, "use_cache": False}
    torch.compiler.reset()
    with fk.patch(model, dense_masks=dense_masks), torch.no_grad():
        run = torch.compile(model, fullgraph=True, backend="eager")
        if dense_masks != "refuse":
            assert close(run(IDS, **options).logits, plain)
            return
        with pytest.raises(Exception, match="pass no token_type_ids where there is text alone"):
            run(IDS, **options)


# Eager by choice ---------------------------------------------------------------------------------------------------

LEFT_EAGER = "flash_attention left, its config has attn_implementation='eager'; name flash_attention in ops to have it"


@pytest.mark.parametrize("family", ["llama", "qwen3", "smollm3"])
def test_eager_by_choice_stays(family: str) -> None:
    model = tiny_model(family, attn_implementation="eager")
    plain, plain_gradients = model(IDS, output_attentions=True), gradients(model)
    with fk.patch(model) as handle:
        assert model.config._attn_implementation == "eager"
        ours = model(IDS, output_attentions=True)
        assert close(ours.logits, plain.logits)
        assert close(gradients(model), plain_gradients)
        assert all(close(a, e) for a, e in zip(ours.attentions, plain.attentions, strict=True))
        entries = {e.name: e for e in (*handle.report().replaced, *handle.report().left) if "self_attn" in e.name}
        rotation = "qk_norm_rope" if family == "qwen3" else "rope"
        attention = [entries[f"model.layers.{i}.self_attn"] for i in range(2)]
        assert [e.ops for e in attention] == [(rotation,), () if family == "smollm3" else (rotation,)]
        assert {e.reason for e in attention} == {LEFT_EAGER}
        assert LEFT_EAGER in str(handle.report())
    assert model.config._attn_implementation == "eager"


def test_eager_by_choice_is_replaced_where_it_is_asked_for() -> None:
    model = tiny_model("llama", attn_implementation="eager")
    plain = logits(model)
    with fk.patch(model, ops=["rope", "flash_attention"]) as handle:
        assert model.config._attn_implementation == "foundry"
        assert {e.ops for e in handle.report().replaced} == {("rope", "flash_attention")}
        assert "eager" not in str(handle.report().replaced)
        assert close(logits(model), plain)
        assert len(model(IDS, output_attentions=True).attentions) == 2
    assert model.config._attn_implementation == "eager"


def test_eager_in_some_layers() -> None:
    """Set since, and in one of two models that are patched together."""
    eager, plain = tiny_model("llama"), tiny_model("llama")
    eager.set_attn_implementation("eager")
    fk.patch(torch.nn.ModuleList([eager, plain]))
    assert eager.config._attn_implementation == "eager"
    assert plain.config._attn_implementation == "foundry"


@WITHOUT_SDPA
@pytest.mark.parametrize("options", [{}, {"attn_implementation": "eager"}], ids=["default", "explicit"])
def test_eager_where_there_is_no_other_default(family: str, options: dict[str, Any]) -> None:
    model = tiny_model(family, **options)
    assert model.config._attn_implementation == "eager"
    with fk.patch(model):
        assert model.config._attn_implementation == "foundry"


def test_a_loaded_model_keeps_the_choice(tmp_path: Any) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    for choice, expected in ((None, "foundry"), ("eager", "eager")):
        options = {} if choice is None else {"attn_implementation": choice}
        model = AutoModelForCausalLM.from_pretrained(tmp_path, **options)
        fk.patch(model)
        assert model.config._attn_implementation == expected
