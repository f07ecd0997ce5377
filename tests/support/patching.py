"""Shared code of the tests of tests/integrations."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING

import foundry_kernels as fk
from foundry_kernels.integrations.adapters.table import PATCHED
from foundry_kernels.integrations.families import text_type


def _can_be_built(family: str) -> bool:
    """Whether transformers can create a configuration: with a newer huggingface_hub, its oldest releases refuse some of
    their own defaults."""
    try:
        CONFIG_MAPPING[text_type(family)]()
    except Exception:
        return False
    return True


#: The families of the table that this release of transformers can build; all, except in its oldest releases.
BUILDABLE = tuple(family for family in PATCHED if _can_be_built(family))

#: Families that differ in their classes. In the others, adapters are only given something else: some tests leave these
#: to `make test-slow`.
KINDS = ("llama", "gemma2", "gpt_oss", "gpt2", "bloom", "falcon", "qwen3_5")

#: All of them, of which these alone are quick tests.
BY_KIND = [f if f in KINDS else pytest.param(f, marks=pytest.mark.slow) for f in BUILDABLE]

IDS = torch.randint(3, 128, (2, 12), generator=torch.Generator().manual_seed(0))
LABELS = IDS.clone()
LABELS[0, :5] = LABELS[1, 9:] = -100

#: What makes the heads differ, large enough to be seen.
CHANGES: dict[str, dict[str, Any]] = {
    "gemma2": {"final_logit_softcapping": 2.0},
    "gemma3": {"final_logit_softcapping": 2.0},
    "granite": {"logits_scaling": 4.0},
    "mixtral": {"output_router_logits": True, "router_aux_loss_coef": 0.5},
    "gpt_oss": {"output_router_logits": True, "router_aux_loss_coef": 0.5},
    "qwen3": {"tie_word_embeddings": True},
}


def logits(model: Any, **options: Any) -> Tensor:
    with torch.no_grad():
        return model(IDS, **options).logits


def gradients(model: Any, **given: Any) -> Tensor:
    """The gradients of all parameters as one vector."""
    model.zero_grad()
    model(**({"input_ids": IDS, "labels": IDS} | given)).loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def close(actual: Tensor, expected: Tensor) -> bool:
    return float((actual - expected).detach().abs().max()) <= 1e-5 * float(expected.detach().abs().max())


def reasons(model: nn.Module, **options: Any) -> dict[str, str | None]:
    """Why a patch with these options leaves modules, by name."""
    with fk.patch(model, **options) as handle:
        return {e.name: e.reason for e in handle.report().left}


def saved(model: Any) -> Any:
    """The model as it is loaded from a file that it was saved to."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def snapshot(model: nn.Module) -> list[Any]:
    """Everything that a failed patch must not change."""
    return [(id(m), type(m), {k: id(v) for k, v in vars(m).items()}) for m in model.modules()]
