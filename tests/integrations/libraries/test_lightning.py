"""Lightning's Trainer with `PatchCallback`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from foundry_kernels.integrations.adapters.tiny import tiny_model
from foundry_kernels.integrations.patching.swap import is_patched

lightning = pytest.importorskip("lightning")

# ruff: noqa: E402
from foundry_kernels.integrations.lightning import PatchCallback

IDS = torch.randint(3, 128, (6, 12), generator=torch.Generator().manual_seed(0))


class Language(lightning.LightningModule):  # type: ignore[name-defined,misc]
    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.model, self.fails = tiny_model("llama").train(), fails
        self.losses: list[Tensor] = []
        self.patched: list[int] = []

    def training_step(self, batch: Tensor) -> Tensor:
        if self.fails:
            raise RuntimeError("a step failed")
        self.patched.append(sum(map(is_patched, self.modules())))
        loss: Tensor = self.model(batch, labels=batch).loss
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(module: Language, *callbacks: Any) -> None:
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=list(callbacks),
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(IDS, batch_size=2))


def test_patched_while_it_trains() -> None:
    logged: list[str] = []
    ours, theirs = Language(), Language()
    fit(ours, PatchCallback(log=logged.append))
    fit(theirs)
    assert torch.allclose(torch.stack(ours.losses), torch.stack(theirs.losses), rtol=1e-5)
    assert ours.losses[-1] < ours.losses[0]
    (report,) = logged
    assert report.startswith("Language: 10 of 10 modules replaced")
    assert min(ours.patched) >= 10
    assert not any(map(is_patched, ours.modules()))


def test_an_error_undoes_the_patch() -> None:
    module = Language(fails=True)
    with pytest.raises(RuntimeError, match="a step failed"):
        fit(module, PatchCallback(log=None))
    assert not any(map(is_patched, module.modules()))
