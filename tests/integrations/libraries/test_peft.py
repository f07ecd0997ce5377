"""PEFT's adapters and a patch, in either order: results, gradients, saving, loading and merging."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import foundry_kernels as fk
from foundry_kernels.integrations.adapters.tiny import tiny_model

peft = pytest.importorskip("peft")

IDS = torch.randint(3, 128, (2, 12), generator=torch.Generator().manual_seed(0))


def config(kind: str) -> Any:
    targets = "all-linear" if kind == "dora" else ["q_proj", "v_proj", "gate_proj", "down_proj"]
    return peft.LoraConfig(
        r=4, use_dora=kind == "dora", target_modules=targets, task_type="CAUSAL_LM", init_lora_weights=False
    )


def adapted(kind: str, patched: str = "") -> tuple[Any, Any]:
    """A model with adapters, and the handle of its patch, made "before" or "after" they were added."""
    model: Any = tiny_model("llama")
    handle = fk.patch(model) if patched == "before" else None
    torch.manual_seed(0)
    model = peft.get_peft_model(model, config(kind))
    return model, fk.patch(model) if patched == "after" else handle


def step(model: Any) -> tuple[Tensor, Tensor]:
    """The loss, and the gradients of the adapters."""
    loss = model.train()(input_ids=IDS, labels=IDS).loss
    loss.backward()
    return loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])


def near(actual: Tensor, expected: Tensor) -> bool:
    return bool((actual - expected).abs().max() <= 2e-5 * expected.abs().max())


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        out: Tensor = model.eval()(input_ids=IDS).logits
    return out


@pytest.mark.parametrize("patched", ["before", "after"])
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_adapters_train_as_without(kind: str, patched: str) -> None:
    model, handle = adapted(kind, patched)
    assert "10 of 10 modules replaced" in str(handle.report())
    expected, _ = adapted(kind)
    for actual, other in zip(step(model), step(expected), strict=True):
        assert near(actual, other)
    assert near(logits(model), logits(expected))
    with model.disable_adapter():
        assert near(logits(model), logits(tiny_model("llama")))
    handle.undo()
    assert torch.equal(logits(model), logits(expected))


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_adapters_are_saved_and_loaded_around_a_patch(kind: str, tmp_path: Path) -> None:
    """Saved from a patched model, loaded into one that is not, and the other way round; and merged."""
    model, _ = adapted(kind, "after")
    model.save_pretrained(tmp_path / "patched")
    plain, _ = adapted(kind)
    plain.save_pretrained(tmp_path / "plain")
    expected = logits(plain)
    names = [path.name for path in sorted((tmp_path / "patched").iterdir())]
    assert names == [path.name for path in sorted((tmp_path / "plain").iterdir())]
    loaded = peft.PeftModel.from_pretrained(tiny_model("llama"), tmp_path / "patched")
    assert torch.equal(logits(loaded), expected)
    base = tiny_model("llama")
    with fk.patch(base):
        loaded = peft.PeftModel.from_pretrained(base, tmp_path / "plain")
        assert near(logits(loaded), expected)
    assert torch.equal(logits(loaded), expected)
    merged = model.merge_and_unload()
    assert near(logits(merged), expected)
    fk.unpatch(merged)
    assert near(logits(merged), expected)


def test_an_adapter_of_the_head_keeps_the_logits() -> None:
    """The loss without logits multiplies by the head's weight alone, so that it must know of the adapter."""
    targets = {"target_modules": ["q_proj", "lm_head"], "init_lora_weights": False}
    results = []
    for patched in (True, False):
        torch.manual_seed(0)
        model = peft.get_peft_model(tiny_model("llama"), peft.LoraConfig(r=4, task_type="CAUSAL_LM", **targets))
        if patched:
            assert "lm_head is no plain linear layer" in str(fk.patch(model).report())
        results.append(step(model))
    for actual, expected in zip(*results, strict=True):
        assert near(actual, expected)


@pytest.mark.parametrize("targets", [["q_proj"], ["q_proj", "lm_head"]], ids=" ".join)
def test_log_probabilities(targets: list[str]) -> None:
    """Patched below the adapters or with them; a head with an adapter is called. Tokens that PEFT adds are refused."""
    adapters = peft.LoraConfig(target_modules=targets, task_type="CAUSAL_LM", init_lora_weights=False)
    model: Any = peft.get_peft_model(tiny_model("llama"), adapters).eval()
    expected = model(IDS).logits[:, :-1].log_softmax(-1).gather(-1, IDS[:, 1:, None])[..., 0]
    with fk.patch(model) as handle:
        torch.testing.assert_close(handle.log_probs(IDS, IDS)[:, 1:], expected)
    with fk.patch(model.get_base_model()) as handle:
        torch.testing.assert_close(handle.log_probs(IDS, IDS, model=model)[:, 1:], expected)
    prompted: Any = peft.get_peft_model(
        tiny_model("llama"), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    )
    with fk.patch(prompted) as handle, pytest.raises(ValueError, match="PeftModelForCausalLM does not hand the call"):
        handle.log_probs(IDS, IDS)
