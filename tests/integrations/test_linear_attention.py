"""Linear attention in patched models: documents of several rows, caches, what is refused, and what the report says."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from models import tiny
from packaging.version import Version
from patching import close
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
    apply_activation_checkpointing,
)

import foundry_kernels as fk
from foundry_kernels.integrations.adapters.tiny import tiny_model
from foundry_kernels.integrations.families import FAMILIES

DELTA_NETS = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid")
#: Families of transformers 5.24, with the names of their models: Kimi's delta attention, and Mamba-2. Before, layers of
#: Mamba-2 were written otherwise, and stay.
NEWER = {
    "kimi_linear": "KimiLinearForCausalLM",
    "bailing_hybrid": "BailingHybridForCausalLM",
    "falcon_h1": "FalconH1ForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "mamba2": "Mamba2ForCausalLM",
    "bamba": "BambaForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "zamba2": "Zamba2ForCausalLM",
}
#: Falcon-H1 has no norm by default: its gate is a part of the scan. All experts: none comes and goes with the last bit.
OPTIONS: dict[str, dict[str, Any]] = {
    "falcon_h1": {"mamba_rms_norm": True},
    "kimi_linear": {"num_experts_per_tok": 4},
    "bailing_hybrid": {"num_experts_per_tok": 4},
}
BEFORE_NEWER = Version(transformers.__version__) < Version("5.24")
#: They differ from the others in their code.
QUICK = (*DELTA_NETS, "kimi_linear", "falcon_h1", "nemotron_h")
EACH = [
    pytest.param(
        family,
        marks=[
            *([] if family in QUICK else [pytest.mark.slow]),
            pytest.mark.skipif(family in NEWER and BEFORE_NEWER, reason="a release before 5.24"),
        ],
    )
    for family in (*DELTA_NETS, *NEWER)
]
FAMILY = pytest.mark.parametrize("family", EACH)
#: A cache of states alone does not know how many tokens it has.
WITH_KEYS = pytest.mark.parametrize("family", [each for each in EACH if each.values != ("mamba2",)])
IDS = torch.randint(3, 128, (2, 12), generator=torch.Generator().manual_seed(0))
TOTALS = torch.tensor([0, 4, 5, 12, 20, 24], dtype=torch.int32)
#: The same documents.
GIVEN: dict[str, dict[str, Any]] = {
    "lengths": {"cu_seq_lens_q": TOTALS, "cu_seq_lens_k": TOTALS, "max_length_q": 8, "max_length_k": 8},
    "positions": {"position_ids": torch.tensor([[*range(4), 0, *range(7)], [*range(8), *range(4)]])},
}


@functools.cache
def made(family: str) -> Any:
    if family in DELTA_NETS:
        return tiny_model(family)
    return tiny(NEWER[family], **OPTIONS.get(family, {}))


def model_of(family: str) -> Any:
    return copy.deepcopy(made(family))


def cache_of(output: Any) -> Any:
    return output.cache if "cache" in output else output.past_key_values


def cached(model: Any, ids: Tensor, cache: Any = None, **given: Any) -> Any:
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    return model(ids, use_cache=True, **{name: cache}, **given)


def layer_of(model: Any) -> Any:
    return next(
        m for m in model.modules() if type(m).__name__.endswith(("Net", "DeltaAttention", "Mixer", "MambaLayer"))
    )


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def recomputed_by_transformers(model: Any) -> None:
    model.train().gradient_checkpointing_enable({"use_reentrant": False})


def recomputed_by_wrappers(model: Any) -> None:
    """As FSDP does it."""
    layers = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList))
    apply_activation_checkpointing(model, check_fn=lambda m: any(m is layer for layer in layers))
    assert sum(isinstance(m, CheckpointWrapper) for m in model.modules()) >= 2


@FAMILY
@pytest.mark.parametrize("recompute", [None, recomputed_by_transformers, recomputed_by_wrappers])
@pytest.mark.parametrize("way", GIVEN)
def test_gradients_of_packed_rows_are_those_of_documents(
    family: str, way: str, recompute: Callable[[Any], None] | None
) -> None:
    model = model_of(family)
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
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@torch.no_grad()
def test_a_cache_that_either_filled(family: str, dtype: torch.dtype) -> None:
    """A prompt read with or without a patch, then single tokens and several, with or without: one cache object."""
    model = model_of(family).to(dtype)
    if dtype == torch.float64:
        model.set_experts_implementation("eager")  # their grouped matmuls have no float64

    def logits(patched: tuple[bool, ...]) -> Tensor:
        cache, found = None, []
        for use, part in zip(patched, IDS.split((3, 1, 1, 4, 1, 1, 1), 1), strict=True):
            handle = fk.patch(model) if use else None
            out = cached(model, part, cache)
            cache = cache_of(out)
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
    model = model_of(family)
    caches = []
    for patched in (False, True):
        handle = fk.patch(model) if patched else None
        with torch.no_grad():
            cache = cache_of(cached(model, IDS[:, :2]))  # fewer tokens than taps
            cached(model, IDS[:, 2:3], cache)
        caches.append(cache)
        if handle is not None:
            handle.undo()
    theirs, ours = (cache.layers[0] for cache in caches)
    assert ours.conv_states[0].shape == theirs.conv_states[0].shape
    assert close(ours.conv_states[0], theirs.conv_states[0])
    assert close(ours.recurrent_states[0], theirs.recurrent_states[0])


@WITH_KEYS
@torch.no_grad()
def test_documents_on_a_cache_are_refused(family: str) -> None:
    model = model_of(family)
    fk.patch(model)
    cache = cache_of(cached(model, IDS[:, :4]))
    keys = torch.tensor([0, 6, 12, 18, 24], dtype=torch.int32)
    queries = torch.tensor([0, 2, 8, 10, 16], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": queries, "cu_seq_lens_k": keys, "max_length_q": 6, "max_length_k": 6}
    with pytest.raises(ValueError, match="begins a document on a cache that is not empty"):
        cached(model, IDS[:, 4:], cache, **lengths)
    with pytest.raises(ValueError, match="begins a document on a cache that is not empty"):
        cached(model, IDS[:, 4:], cache, position_ids=torch.tensor([[4, 5, 6, 7, 0, 1, 2, 3]] * 2))


@WITH_KEYS
@torch.no_grad()
def test_lengths_of_one_document_a_row_continue_a_cache(family: str) -> None:
    model = model_of(family)
    expected = cached(model, IDS[:, 4:], cache_of(cached(model, IDS[:, :4]))).logits
    fk.patch(model)
    cache = cache_of(cached(model, IDS[:, :4]))
    queries, keys = (torch.tensor([0, n, 2 * n], dtype=torch.int32) for n in (8, 12))
    lengths = {"cu_seq_lens_q": queries, "cu_seq_lens_k": keys, "max_length_q": 8, "max_length_k": 12}
    assert close(cached(model, IDS[:, 4:], cache, **lengths).logits, expected)


@FAMILY
@torch.no_grad()
def test_a_layer_that_is_called_by_itself(family: str) -> None:
    model = model_of(family)
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
        norm = next(e for e in handle.report().replaced if e.module_class == "Qwen3_5RMSNormGated")
        assert norm.ops == ("rms_norm", "swiglu")
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
    model = model_of(family)
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


@pytest.mark.skipif(BEFORE_NEWER, reason="a release before 5.24")
@torch.no_grad()
def test_a_decay_with_a_hook_is_called() -> None:
    model, calls = model_of("kimi_linear"), []
    expected = model(IDS).logits
    fk.patch(model)
    layer_of(model).forget_gate.register_forward_hook(lambda *_: calls.append(1))
    assert close(model(IDS).logits, expected)
    assert calls == [1]


@pytest.mark.skipif(BEFORE_NEWER, reason="a release before 5.24")
def test_states_that_are_larger_than_the_kernels() -> None:
    report = fk.patch(tiny("FalconH1ForCausalLM", mamba_d_state=257)).report()
    reasons = {e.reason for e in report.left if e.module_class == "FalconH1Mixer"}
    assert reasons == {"its ssm_state_size is 257, and the kernels have at most 256"}
    assert any("may mix documents" in line for line in report.mixing)


@FAMILY
def test_copies_and_pickles(family: str) -> None:
    model = model_of(family)
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


@FAMILY
@torch.no_grad()
def test_padding_on_the_left(family: str) -> None:
    model = model_of(family)
    mask = torch.ones_like(IDS)
    mask[0, :5] = 0
    expected = model(IDS, attention_mask=mask).logits[mask.bool()]
    with fk.patch(model):
        assert close(model(IDS, attention_mask=mask).logits[mask.bool()], expected)


@FAMILY
@torch.no_grad()
def test_bfloat16_is_as_exact_as_transformers(family: str) -> None:
    model = model_of(family)
    exact = model(IDS).logits
    model.bfloat16()
    theirs = float((model(IDS).logits.float() - exact).norm())
    with fk.patch(model):
        assert float((model(IDS).logits.float() - exact).norm()) <= 1.2 * theirs
