"""TRL's SFT and DPO with `PatchCallback`: same losses, also of packed documents, below the head that TRL brings."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from foundry_kernels.integrations.adapters.tiny import tiny_model
from foundry_kernels.integrations.patching.swap import is_patched

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

# ruff: noqa: E402
from foundry_kernels.integrations.trainer import PatchCallback
from tests.integrations.libraries.tokens import character_tokenizer

TEXTS = ["the quick brown fox", "jumps over", "a lazy dog, twice", "and rests"] * 2
COMMON: dict[str, Any] = {
    "max_steps": 2, "per_device_train_batch_size": 4, "logging_steps": 1, "learning_rate": 1e-2, "report_to": [],
    "use_cpu": True, "bf16": False, "disable_tqdm": True, "save_strategy": "no",
}  # fmt: skip


def losses(make: Any, callbacks: list[Any]) -> tuple[Tensor, Any]:
    """The loss of each step, and the trainer."""
    torch.manual_seed(0)
    trainer = make(callbacks)
    trainer.train()
    return torch.tensor([entry["loss"] for entry in trainer.state.log_history if "loss" in entry]), trainer


def sft(folder: Path, **options: Any) -> Any:
    data = datasets.Dataset.from_dict({"text": TEXTS})
    arguments = trl.SFTConfig(output_dir=str(folder), max_length=32, **COMMON, **options)
    make = {"args": arguments, "train_dataset": data, "processing_class": character_tokenizer()}
    return lambda callbacks: trl.SFTTrainer(tiny_model("llama"), callbacks=callbacks, **make)


def dpo(folder: Path) -> Any:
    pairs = {"prompt": TEXTS, "chosen": [f" {text}" for text in reversed(TEXTS)], "rejected": [" no"] * len(TEXTS)}
    arguments = trl.DPOConfig(output_dir=str(folder), max_length=48, **COMMON)
    make = {"args": arguments, "train_dataset": datasets.Dataset.from_dict(pairs)}
    make |= {"processing_class": character_tokenizer(), "ref_model": tiny_model("llama")}
    return lambda callbacks: trl.DPOTrainer(tiny_model("llama"), callbacks=callbacks, **make)


@pytest.mark.parametrize("kind", ["sft", "sft, packed", "dpo"])
def test_as_without(kind: str, tmp_path: Path) -> None:
    made = dpo(tmp_path) if kind == "dpo" else sft(tmp_path, packing="packed" in kind, padding_free="packed" in kind)
    logged: list[str] = []
    calls: Counter[str] = Counter()
    hook = nn.modules.module.register_module_forward_hook(
        lambda module, *_: calls.update([type(module).__name__] if is_patched(module) else [])
    )
    ours, trainer = losses(made, [PatchCallback(log=logged.append)])
    hook.remove()
    assert {"LlamaForCausalLM", "LlamaAttention", "LlamaMLP", "LlamaRMSNorm"} <= calls.keys()
    assert not any(map(is_patched, trainer.model.modules()))
    (report,) = logged
    assert report.startswith("LlamaForCausalLM: 10 of 10 modules replaced")
    theirs, _ = losses(made, [])
    assert len(ours) == 2
    assert ours[1] < ours[0]
    assert torch.allclose(ours, theirs, rtol=1e-4)
