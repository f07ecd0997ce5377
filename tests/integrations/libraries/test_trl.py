"""TRL's SFT and DPO with `PatchCallback` log the same, also of packed documents, and their fused head runs on
`linear_log_probs`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from foundry_kernels.integrations.adapters.tiny import tiny_model
from foundry_kernels.integrations.patching.swap import is_patched
from foundry_kernels.integrations.trainers import trl_head

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


#: What a log has of times.
TIMES = ("runtime", "per_second", "total_flos")


def logs(make: Any, callbacks: list[Any]) -> tuple[list[dict[str, Any]], Any]:
    """What was logged, without times, and the trainer."""
    torch.manual_seed(0)
    trainer = make(callbacks)
    trainer.train()
    history = trainer.state.log_history
    return [{k: v for k, v in log.items() if not any(t in k for t in TIMES)} for log in history], trainer


def sft(folder: Path, **options: Any) -> Any:
    data = datasets.Dataset.from_dict({"text": TEXTS})
    arguments = trl.SFTConfig(output_dir=str(folder), max_length=32, **COMMON | options)
    make = {"args": arguments, "train_dataset": data, "processing_class": character_tokenizer()}
    return lambda callbacks: trl.SFTTrainer(tiny_model("llama"), callbacks=callbacks, **make)


def dpo(folder: Path, **options: Any) -> Any:
    pairs = {"prompt": TEXTS, "chosen": [f" {text}" for text in reversed(TEXTS)], "rejected": [" no"] * len(TEXTS)}
    arguments = trl.DPOConfig(output_dir=str(folder), max_length=48, **COMMON | options)
    make = {"args": arguments, "train_dataset": datasets.Dataset.from_dict(pairs)}
    make |= {"processing_class": character_tokenizer(), "ref_model": tiny_model("llama")}
    return lambda callbacks: trl.DPOTrainer(tiny_model("llama"), callbacks=callbacks, **make)


KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sft": (sft, {}),
    "sft, packed": (sft, {"packing": True, "padding_free": True}),
    "sft, bfloat16": (sft, {"bf16": True}),
    "dpo": (dpo, {}),
    "dpo, weighted": (dpo, {"use_weighting": True}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_as_without(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, options = KINDS[kind]
    made = make(tmp_path, **options)
    logged: list[str] = []
    heads: list[Any] = []
    head = trl_head.linear_log_probs
    monkeypatch.setattr(trl_head, "linear_log_probs", lambda *a, **k: (heads.append(k), head(*a, **k))[1])
    calls: Counter[str] = Counter()
    hook = nn.modules.module.register_module_forward_hook(
        lambda module, *_: calls.update([type(module).__name__] if is_patched(module) else [])
    )
    ours, trainer = logs(made, [PatchCallback(log=logged.append)])
    hook.remove()
    assert {"LlamaForCausalLM", "LlamaAttention", "LlamaMLP", "LlamaRMSNorm"} <= calls.keys()
    assert not any(map(is_patched, trainer.model.modules()))
    (report,) = logged
    assert report.startswith("LlamaForCausalLM: 10 of 10 modules replaced")
    assert len(heads) == (4 if make is dpo else 2)  # and those of the reference model
    theirs, _ = logs(made, [])
    assert len(heads) == (4 if make is dpo else 2)
    first, second, _ = ours
    assert second["loss"] < first["loss"]
    assert "mean_token_accuracy" in first
    for mine, expected in zip(ours, theirs, strict=True):
        rtol, atol = (2e-2, 2e-2) if options.get("bf16") else (1e-4, 1e-5)  # a token of 56
        assert mine == pytest.approx(expected, rel=rtol, abs=atol)
