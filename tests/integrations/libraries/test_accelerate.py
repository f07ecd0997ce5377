"""accelerate's `prepare` and a patch: mixed precision, gradient accumulation, a saved state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import foundry_kernels as fk
from foundry_kernels.integrations.adapters.tiny import tiny_model

accelerate = pytest.importorskip("accelerate")

IDS = torch.randint(3, 128, (4, 12), generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _fresh_state() -> Any:
    yield
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def train(patched: bool, precision: str, folder: Path | None = None) -> tuple[Tensor, Any]:
    """The losses of some steps, and the unwrapped model."""
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2)
    model = tiny_model("llama").train()
    handle = fk.patch(model) if patched else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.utils.data.DataLoader(IDS, batch_size=1)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    losses = []
    for batch in data:
        with accelerator.accumulate(model):
            out = model(input_ids=batch, labels=batch)
            assert (out.logits is None) == patched
            accelerator.backward(out.loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(out.loss.detach())
    if folder is not None:
        accelerator.save_state(str(folder))
        with torch.no_grad():
            next(model.parameters()).zero_()
        accelerator.load_state(str(folder))
    model = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    if handle is not None:
        handle.undo()
    return torch.stack(losses), model


@pytest.mark.parametrize(("precision", "error"), [("no", 1e-5), ("bf16", 0.02)])
def test_as_without(precision: str, error: float, tmp_path: Path) -> None:
    ours, model = train(True, precision, tmp_path)
    assert ours.dtype == torch.float32
    theirs, expected = train(False, precision)
    assert torch.allclose(ours, theirs, rtol=error)
    assert type(model) is type(expected)
    for actual, other in zip(model.parameters(), expected.parameters(), strict=True):
        if precision == "no":  # AdamW's first steps go by the signs of gradients, which rounding may change
            assert torch.allclose(actual, other, atol=1e-4)
        assert actual.any()
    assert model(input_ids=IDS, labels=IDS).logits is not None


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
@pytest.mark.parametrize("patched", [False, True])
def test_fsdp_wraps_every_layer(family: str, patched: bool) -> None:
    model = tiny_model(family)
    if patched:
        fk.patch(model)
    layer = type(model.model.layers[1]).__name__
    assert layer in model._no_split_modules
    plugin = accelerate.FullyShardedDataParallelPlugin(
        auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=[layer]
    )
    plugin.set_auto_wrap_policy(model)
    wraps: Any = plugin.auto_wrap_policy
    found = [m for m in model.modules() if wraps(module=m, recurse=False, nonwrapped_numel=0)]
    assert found == list(model.model.layers)
