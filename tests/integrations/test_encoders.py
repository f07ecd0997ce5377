"""Models whose attention has no row: encoders, encoder-decoders, images, sound. Patched they compute what they did."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from patching import close
from tiny_encoders import FAMILIES, tiny_batch, tiny_encoder
from torch import Tensor, nn
from torch._dynamo.utils import counters
from transformers.models.bert import modeling_bert

import foundry_kernels as fk
from foundry_kernels.integrations.adapters import interface
from foundry_kernels.integrations.adapters.causal_lm import LOSS_STAYS
from foundry_kernels.integrations.attention.plan import DenseMask

every_family = pytest.mark.parametrize("family", FAMILIES)

#: Modules that run on something of ours, by operation.
SERVED = {
    "bert": {"layer_norm": 6, "flash_attention": 2, "bias_gelu": 2, "linear_cross_entropy": 1},
    "roberta": {"layer_norm": 6, "flash_attention": 2, "bias_gelu": 2, "linear_cross_entropy": 1},
    "modernbert": {"layer_norm": 6, "rope": 2, "flash_attention": 2, "geglu": 2, "linear_cross_entropy": 1},
    "vit": {"layer_norm": 5, "flash_attention": 2, "bias_gelu": 2},
    "clip": {"layer_norm": 11, "flash_attention": 4, "bias_gelu": 2},
    "siglip": {"layer_norm": 11, "flash_attention": 4, "bias_gelu": 5},
    "whisper": {"layer_norm": 12, "flash_attention": 6, "linear_cross_entropy": 1},
    "wav2vec2": {"layer_norm": 6, "flash_attention": 2, "bias_gelu": 2},
    "bart": {"layer_norm": 12, "flash_attention": 6, "linear_cross_entropy": 1},
    "t5": {"rms_norm": 12, "flash_attention": 6, "geglu": 4, "linear_cross_entropy": 1},
}
LAYERS_OF_ATTENTION = {family: ops["flash_attention"] for family, ops in SERVED.items()}


def tensors(out: Any) -> list[Tensor]:
    """All results of a call, but for caches."""
    found: list[Tensor] = []
    for name, value in out.items():
        if isinstance(value, Tensor):
            found.append(value.detach())
        elif name != "past_key_values" and hasattr(value, "items"):
            found += tensors(value)
        elif name != "past_key_values" and isinstance(value, tuple):
            found += [x.detach() for x in value if isinstance(x, Tensor)]
    return found


def step(model: Any, batch: dict[str, Any], **options: Any) -> tuple[list[Tensor], dict[str, Tensor]]:
    model.zero_grad()
    out = model(**batch, **options)
    out.loss.backward()
    return tensors(out), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def same_gradients(ours: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert ours.keys() == expected.keys()
    largest = max(float(g.norm()) for g in expected.values())
    for name, grad in expected.items():
        error, norm = float((ours[name] - grad).norm()), float(grad.norm())
        assert error <= 1e-5 * max(norm, 1e-1 * largest), f"{name}: {error:.1e} of {norm:.1e}"


@every_family
def test_results_loss_and_gradients(family: str) -> None:
    """Of every token, of padding too: no family is told where the padding of another's results is."""
    model, batch = tiny_encoder(family), tiny_batch(family)
    expected, grads = step(model, batch)
    with fk.patch(model) as handle:
        ours, our_grads = step(model, batch)
        copied = copy.deepcopy(model)
        entries = [e for e in handle.report().replaced if e.module_class != "MultiheadAttention"]  # torch's, in SigLIP
        assert Counter(op for e in entries for op in e.ops) == SERVED[family]
    assert len(ours) == len(expected) > 1
    assert all(map(close, ours, expected))
    same_gradients(our_grads, grads)
    undone, _ = step(model, batch)
    assert all(map(torch.equal, undone, expected))
    assert all(map(torch.equal, step(copied, batch)[0], ours)), "a copy is patched"


@every_family
def test_weights(family: str) -> None:
    """As eager attention returns them, those of cross-attention too."""
    model, batch = tiny_encoder(family), tiny_batch(family)
    model.set_attn_implementation("eager")
    expected, _ = step(model, batch, output_attentions=True)
    plain, _ = step(model, batch)
    model.set_attn_implementation("sdpa")
    with fk.patch(model):
        ours, _ = step(model, batch, output_attentions=True)
    assert len(ours) == len(expected)
    if family not in ("clip", "siglip"):
        assert len(ours) == len(plain) + LAYERS_OF_ATTENTION[family]
    assert all(float((a - e).abs().max()) <= 1e-4 * float(e.abs().max()) for a, e in zip(ours, expected, strict=True))


def test_dropout_of_the_weights_is_the_kernels() -> None:
    model, batch = tiny_encoder("bert", attention_probs_dropout_prob=0.5, hidden_dropout_prob=0.0), tiny_batch("bert")
    expected = step(model, batch)[0]
    fk.patch(model, return_logits=True)
    model.train()

    def run(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return step(model, batch)[0][1]

    assert torch.equal(run(0), run(0))
    assert not close(run(0), run(1))
    assert not close(run(0), expected[1])


@pytest.mark.parametrize("family", [pytest.param(f, marks=() if f == "bert" else pytest.mark.slow) for f in FAMILIES])
def test_compiled(family: str) -> None:
    """In one graph, forward and backward."""
    if family == "wav2vec2":
        pytest.skip("transformers looks into the mask of sounds, whose graph breaks without a patch too")
    model, batch = tiny_encoder(family), tiny_batch(family)
    options = {"use_cache": False} if family in ("whisper", "t5", "bart") else {}
    expected, grads = step(model, batch, **options)
    fk.patch(model)
    counters.clear()
    torch.compiler.reset()
    ours, our_grads = step(torch.compile(model, fullgraph=True, backend="eager"), batch, **options)
    assert all(map(close, ours, expected))
    same_gradients({name.removeprefix("_orig_mod."): g for name, g in our_grads.items()}, grads)
    assert not counters["graph_break"]


@pytest.mark.parametrize("family", ["bart", "t5", "whisper"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation(family: str, cache: str) -> None:
    model, batch = tiny_encoder(family), tiny_batch(family)
    reads = {k: x for k, x in batch.items() if k in ("input_ids", "attention_mask", "input_features")}
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "num_beams": 1 if cache == "static" else 2}
    options["cache_implementation"] = "static" if cache == "static" else None
    expected = model.generate(**reads, **options)
    with fk.patch(model):
        assert torch.equal(model.generate(**reads, **options), expected)


# What is left, and why ---------------------------------------------------------------------------------------------


def reasons(model: nn.Module, **options: Any) -> set[str]:
    with fk.patch(model, **options) as handle:
        return {str(e.reason) for e in handle.report().left if not str(e.reason).startswith(LOSS_STAYS)}


def test_an_activation_without_a_kernel_is_left() -> None:
    model = tiny_encoder("clip")  # its images' MLP has CLIP's own activation
    assert "no adapter for this class: its activation is QuickGELUActivation, which no kernel has" in reasons(model)
    assert any(
        "its activation is Tanh" in reason for reason in reasons(tiny_encoder("t5", feed_forward_proj="gated-tanh"))
    )


@pytest.mark.parametrize(("names", "left"), [('in ("eager", "sdpa")', True), ('== "sdpa"', False)])
def test_a_class_that_compares_the_name_of_its_attention(
    names: str, left: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may give one that is neither what says which keys are seen; one that is not "sdpa" gets what eager does."""
    monkeypatch.setattr(interface, "source_of", lambda home: f"\n    if self.config._attn_implementation {names}:\n")
    interface._compares_elsewhere.cache_clear()
    found = reasons(tiny_encoder("bert"))
    interface._compares_elsewhere.cache_clear()
    reason = "its family does something else for an attention that is called neither 'sdpa' nor 'eager'"
    assert found == ({reason} if left else set())


def test_without_a_config() -> None:
    class Alone(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            function = modeling_bert.ALL_ATTENTION_FUNCTIONS.get_interface("sdpa", None)
            out: Tensor = function(self, x, x, x, None)[0]
            return out

    assert interface.interface_adapter(Alone) is not None
    assert reasons(nn.Sequential(Alone())) == {"it has no config of its own that names its attention"}


def test_refused_and_sdpa() -> None:
    model, batch = tiny_encoder("bert"), tiny_batch("bert")
    expected = step(model, batch)[0]
    with fk.patch(model, dense_masks="sdpa") as handle:
        assert handle.report().dense_masks == "SDPA"
        assert all(map(close, step(model, batch)[0], expected))
    with fk.patch(model, dense_masks="refuse"):
        with pytest.raises(DenseMask, match="in a family that has no row"):
            model(**batch)
        assert model(batch["input_ids"]).logits.isfinite().all()
