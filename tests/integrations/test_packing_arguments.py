"""What a call of a patched model may say of packed documents: precedence, contradictions, caches, bad arguments."""

from __future__ import annotations

import copy
import gc
import importlib
import inspect
import itertools
from typing import Any

import pytest
import torch
from packed import BY_POSITIONS, CAUSAL, GIVEN, IDS, LENGTHS, ONES, POSITIONS, SEGMENTS, TOTALS, leaks
from patching import close
from transformers import StaticCache

import foundry_kernels as fk
from foundry_kernels.integrations.adapters.tiny import tiny_model
from foundry_kernels.integrations.attention import call as calls
from foundry_kernels.integrations.attention import documents
from foundry_kernels.integrations.attention.positions import restarts, text_positions

pytestmark = pytest.mark.usefixtures("no_gradients")


def test_lengths_come_before_positions_and_positions_before_the_mask() -> None:
    model = tiny_model("llama")
    fk.patch(model)
    counted = torch.arange(18)[None]
    assert not leaks(model, **GIVEN, position_ids=counted)  # rotary positions may count on
    assert not leaks(model, position_ids=counted, attention_mask=SEGMENTS)
    two = torch.tensor([0, 5, 18], dtype=torch.int32)
    coarse = {"cu_seq_lens_q": two, "cu_seq_lens_k": two, "max_length_q": 13, "max_length_k": 13}
    for name, given in {
        "position_ids begins a document where cu_seq_lens_q begins none": {**coarse, "position_ids": POSITIONS},
        "attention_mask begins a document where cu_seq_lens_q begins none": {**coarse, "attention_mask": SEGMENTS},
        "seq_idx begins a document where cu_seq_lens_q begins none": {**coarse, "seq_idx": SEGMENTS},
        "attention_mask begins a document where position_ids begins none": {
            "position_ids": torch.tensor([[*range(5), *range(13)]]),
            "attention_mask": SEGMENTS,
        },
        "attention_mask lets a token see another document": {"position_ids": POSITIONS, "attention_mask": CAUSAL},
    }.items():
        with pytest.raises(ValueError, match=f"{name}.*contradict"):
            model(IDS, **given)


def test_a_mask_of_four_dimensions_says_all() -> None:
    """Branches that share a beginning have positions that go back, but not to it."""
    model = tiny_model("llama")
    mask = CAUSAL.clone()
    mask[..., 12:, 6:12] = False
    positions = torch.tensor([[*range(12), *range(6, 12)]])
    expected = model(IDS, attention_mask=mask, position_ids=positions).logits
    blocks = torch.block_diag(*(torch.ones(n, n) for n in LENGTHS)).bool() & CAUSAL
    apart = model(IDS, attention_mask=blocks, position_ids=POSITIONS).logits
    fk.patch(model)
    assert close(model(IDS, attention_mask=mask, position_ids=positions).logits, expected)
    for lowest in (-torch.inf, -1e9, -1e4):
        added = torch.zeros(blocks.shape).masked_fill(~blocks, lowest)
        assert close(model(IDS, attention_mask=added, position_ids=POSITIONS).logits, apart)
    assert close(model(IDS, attention_mask=blocks, position_ids=POSITIONS).logits, apart)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "one total": ({"cu_seq_lens_k": TOTALS}, "cu_seq_lens_q must be given with cu_seq_lens_k"),
    "the other": ({"cu_seq_lens_q": TOTALS}, "cu_seq_lens_k must be given with cu_seq_lens_q"),
    "a maximum": ({"max_length_q": 9}, "cu_seq_lens_q must be given with max_length_q"),
    "too short": ({**GIVEN, "cu_seq_lens_q": TOTALS[:-1], "cu_seq_lens_k": TOTALS[:-1]}, "must rise from 0 to the 18"),
    "falling": ({**GIVEN, "cu_seq_lens_q": torch.tensor([0, 9, 5, 18])}, "cu_seq_lens_q must rise"),
    "floats": ({**GIVEN, "cu_seq_lens_q": TOTALS.float()}, "cu_seq_lens_q must be a tensor"),
    "a maximum too small": ({**GIVEN, "max_length_k": 8}, "max_length_k must be at least 9"),
    "no int": ({**GIVEN, "max_length_q": 9.0}, "max_length_q must be an int"),
    "indices": ({"seq_idx": SEGMENTS[:, 1:]}, "seq_idx must be a tensor"),
    "segments in pieces": (
        {"attention_mask": torch.tensor([[1] * 5 + [2] * 9 + [1] * 4])},
        "attention_mask must have the tokens of a document side by side",
    ),
}


@pytest.mark.parametrize("bad", BAD)
def test_bad_arguments(bad: str) -> None:
    model = tiny_model("llama")
    fk.patch(model)
    given, message = BAD[bad]
    with pytest.raises(ValueError, match=message):
        model(IDS, **given)
    rows = torch.tensor([0, 10, 18], dtype=torch.int32)
    with pytest.raises(ValueError, match="must begin a document with each row of 9 tokens"):
        model(IDS.view(2, 9), **{**GIVEN, "cu_seq_lens_q": rows, "cu_seq_lens_k": rows, "max_length_q": 10})


def test_a_cache_of_several_documents_is_not_continued() -> None:
    model = tiny_model("llama")
    fk.patch(model)
    out = model(IDS, position_ids=POSITIONS, use_cache=True)
    with pytest.raises(ValueError, match="holds several documents per row"):
        model(IDS[:, :1], past_key_values=out.past_key_values)
    one = model(IDS, use_cache=True)
    for given in (
        {"position_ids": POSITIONS[:, :9]},
        {"attention_mask": torch.cat([ONES, SEGMENTS[:, :9]], 1)},
        {"seq_idx": SEGMENTS[:, :9]},
    ):
        with pytest.raises(ValueError, match="begins a document on a cache that is not empty"):
            model(IDS[:, :9], past_key_values=copy.deepcopy(one.past_key_values), **given)
    static = StaticCache(config=model.config, max_cache_len=32)
    packed = model(IDS, position_ids=POSITIONS, past_key_values=static).logits
    assert close(packed, model(IDS, position_ids=POSITIONS).logits)
    static.reset()
    model(IDS[:, :9], past_key_values=static)
    assert close(model(IDS[:, 9:], past_key_values=static).logits, model(IDS).logits[:, 9:])


def test_arguments_are_read_once_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by each model inside of another: on a GPU the host would wait each time."""
    model, read = tiny_model("llama"), []
    theirs = calls.restarts
    monkeypatch.setattr(calls, "restarts", lambda *args: read.append(1) or theirs(*args))
    fk.patch(model)
    for given in (BY_POSITIONS["positions, mask"], {"position_ids": torch.arange(18)[None]}):
        read.clear()
        model(IDS, **given)
        assert len(read) == 1


@pytest.mark.parametrize("patched", [False, True])
def test_nothing_is_put_on_the_callers_tensors(patched: bool) -> None:
    """Also where attention reads them itself, once for all layers."""
    model = tiny_model("llama", attn_implementation="foundry")
    expected = model(IDS, position_ids=POSITIONS, use_cache=False).logits
    if patched:
        fk.patch(model)
    given = {"position_ids": POSITIONS.clone(), "attention_mask": ONES.clone()}
    for _ in range(2):
        assert close(model(IDS, **given, use_cache=False).logits, expected)
        assert not any(map(vars, given.values()))
    given["position_ids"].copy_(torch.arange(18))  # which is read anew
    assert close(model(IDS, **given, use_cache=False).logits, model(IDS).logits)


def test_what_attention_remembers_of_a_tensor_goes_with_it() -> None:
    model = tiny_model("llama", attn_implementation="foundry")
    model(IDS, position_ids=POSITIONS.clone(), use_cache=False)
    totals = torch.tensor([0, *itertools.accumulate(LENGTHS)], dtype=torch.int32)
    model(IDS, position_ids=POSITIONS.clone(), cu_seq_lens_q=totals, cu_seq_lens_k=totals, use_cache=False)
    known = len(documents._READ)
    assert known > 0
    del totals
    gc.collect()
    assert len(documents._READ) < known


def test_lengths_of_a_cache() -> None:
    """Documents that go on: as many keys as are in the cache and new."""
    model = tiny_model("llama")
    expected = model(IDS).logits[:, 12:]
    fk.patch(model)
    cache = model(IDS[:, :12], use_cache=True).past_key_values
    totals = {"cu_seq_lens_q": torch.tensor([0, 6]), "cu_seq_lens_k": torch.tensor([0, 18])}
    given = {**totals, "max_length_q": 6, "max_length_k": 18}
    assert close(model(IDS[:, 12:], past_key_values=cache, **given).logits, expected)


# Positions of three axes ----------------------------------------------------------------------------------------------

TEXT, IMAGE, VIDEO = 0, 1, 2
#: Tokens of a document with an image of 4x6 patches and a video of three frames of 4x4, which lie side by side or with
#: text between them, or are merged in pairs.
LAYOUTS = (
    ((TEXT, 3), (IMAGE, 6), (TEXT, 2), (VIDEO, 12), (TEXT, 2)),
    ((TEXT, 3), (IMAGE, 6), (TEXT, 2), *((VIDEO, 4), (TEXT, 1)) * 3),
    ((TEXT, 3), (IMAGE, 6), (TEXT, 2), (VIDEO, 4), (TEXT, 2)),
    ((TEXT, 3), (IMAGE, 24), (TEXT, 2), *((VIDEO, 16), (TEXT, 1)) * 3),
    ((TEXT, 3), (IMAGE, 8), (TEXT, 1)),
)
FAMILIES = (
    "cohere_compass", "ernie4_5_vl_moe", "glm46v", "glm4v", "glm4v_moe", "glm_image", "glm_ocr", "hunyuan_vl",
    "hy_v4_vl", "paddleocr_vl", "qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe",
)  # fmt: skip


def bare(family: str, suffix: str = "Model") -> Any:
    """A model of a family without weights, which knows its config; None if this release cannot make one."""
    try:
        home = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        model = next(c for n, c in vars(home).items() if n.endswith(suffix) and hasattr(c, "get_rope_index"))
        config = model.config_class()
    except Exception:
        return None
    made = model.__new__(model)
    torch.nn.Module.__init__(made)
    made.config, made.spatial_merge_size = config, 2
    return made


def one_document(positions: torch.Tensor) -> None:
    """Checks that it is read as one document, and twice in a row as two."""
    tokens = positions.shape[-1]
    assert not restarts(text_positions(positions, tokens)).any()
    twice = torch.cat([positions, positions], -1)
    assert restarts(text_positions(twice, 2 * tokens))[0].nonzero().flatten().tolist() == [tokens - 1]


def test_images_and_videos_begin_no_document() -> None:
    """By the families' own positions, with frames that come faster than positions count, and padding."""
    found = {family: model for family in FAMILIES if (model := bare(family)) is not None}
    tried = set()
    for family, model in found.items():
        known = inspect.signature(model.get_rope_index).parameters
        axes = (3, 4) if family == "hunyuan_vl" else (3,)
        for layout, count, seconds in itertools.product(LAYOUTS, axes, (0.1, 1)):
            if family == "hunyuan_vl":
                model.config.text_config.rope_parameters = {"mrope_section": [4] * count}
            kinds = torch.tensor([[kind for kind, tokens in layout for _ in range(tokens)]])
            ids = torch.arange(10, 10 + kinds.shape[1])[None]
            for kind, name in ((IMAGE, "image_token_id"), (VIDEO, "video_token_id")):
                ids = ids.masked_fill(kinds == kind, getattr(model.config, name, 0))
            given = {
                "mm_token_type_ids": kinds,
                "image_grid_thw": torch.tensor([[1, 4, 6]]),
                "video_grid_thw": torch.tensor([[3, 4, 4]]),
                "second_per_grid_ts": [seconds] * 9,
            }
            try:
                positions, _ = model.get_rope_index(ids, **{k: v for k, v in given.items() if k in known})
            except (RuntimeError, StopIteration, ValueError):
                continue  # a layout of another family
            assert positions.shape == (count, *ids.shape)
            one_document(positions)
            tried.add(family)
    assert tried == found.keys()


def test_sound_beside_a_video_begins_no_document() -> None:
    """Its positions go back, to the first of the video."""
    model = bare("qwen2_5_omni", "ThinkerForConditionalGeneration")
    config = model.config
    config.vision_start_token_id = 4
    video = [config.vision_start_token_id, config.audio_start_token_id, *[config.video_token_id] * 12]
    ids = torch.tensor([[5, 6, *video, *[config.audio_token_id] * 90, config.audio_end_token_id, 7, 8, 9]])
    grid, seconds = torch.tensor([[3, 4, 4]]), torch.tensor([1.0])
    positions, _ = model.get_rope_index(
        ids, None, grid, torch.ones_like(ids), True, audio_seqlens=torch.tensor([360]), second_per_grids=seconds
    )
    assert (positions.diff() < 0).all(0).any()
    one_document(positions)
