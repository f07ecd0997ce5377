"""Attention of families that run on eager attention alone: recognised by what their eager function computes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from any_family import any_family
from packed import BY_POSITIONS, OTHERS, leaks
from patching import close, gradients
from slow import rest_slow
from torch import Tensor, nn

import foundry_kernels as fk
from foundry_kernels.integrations.recognise.eager import why_other

FAMILIES = ["vaultgemma", "bigbird_pegasus"]
IDS = torch.randint(3, 60, (2, 7), generator=torch.Generator().manual_seed(0))
PADDING = torch.ones_like(IDS)
PADDING[0, :3] = PADDING[1, 4] = 0


@pytest.mark.parametrize("family", rest_slow(FAMILIES))
def test_a_family_without_sdpa(family: str) -> None:
    model = any_family(family)
    expected = model(IDS, attention_mask=PADDING).logits.detach()
    theirs = gradients(model, input_ids=IDS, labels=IDS)
    tokens = model.generate(IDS, attention_mask=PADDING, max_new_tokens=3, do_sample=False)
    with fk.patch(model, ops=["flash_attention"]) as handle:
        assert {e.ops for e in handle.report().replaced} == {("flash_attention",)}
        again = copy.deepcopy(model)
        for patched in (model, again):
            actual = patched(IDS, attention_mask=PADDING).logits
            assert close(actual[PADDING.bool()], expected[PADDING.bool()])
        assert float((gradients(model, input_ids=IDS, labels=IDS) - theirs).abs().max()) <= 1e-4 * float(
            theirs.abs().max()
        )
        assert torch.equal(model.generate(IDS, attention_mask=PADDING, max_new_tokens=3, do_sample=False), tokens)
        with torch.no_grad():
            assert not any(leaks(model, **way) for way in (BY_POSITIONS | OTHERS).values())
    assert torch.equal(model(IDS, attention_mask=PADDING).logits, expected)


def eager(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float,
          dropout: float = 0.0, **kwargs: Any) -> tuple[Tensor, Tensor]:  # fmt: skip
    weights = torch.matmul(query, key.transpose(2, 3)) * scaling
    if attention_mask is not None:
        weights = weights + attention_mask
    weights = nn.functional.softmax(weights, dim=-1)
    return torch.matmul(weights, value).transpose(1, 2), weights


SIGNATURE = "def eager(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):\n"
BODY = """    weights = torch.matmul(query, key.transpose(2, 3)) * scaling
    if attention_mask is not None:
        weights = weights + attention_mask
    weights = nn.functional.softmax(weights, dim=-1)
    return torch.matmul(weights, value).transpose(1, 2), weights
"""
#: Replacements in the body, each of which makes it another attention.
PLANTED = {
    "another scale": ("* scaling", "* scaling * 1.01"),
    "keys not transposed back": (".transpose(1, 2), weights", ", weights"),
    "a mask that is subtracted": ("weights + attention_mask", "weights - attention_mask"),
    "another axis": ("dim=-1", "dim=-2"),
    "a clamp": ("    weights = nn", "    weights = weights.clamp(-50, 50)\n    weights = nn"),
    "a cap": ("    weights = nn", "    weights = torch.tanh(weights)\n    weights = nn"),
    "noise": ("    weights = nn", "    weights = weights + 0 * torch.randn(())\n    weights = nn"),
    "sinks of its own": ("    weights = nn", "    weights = weights + 0 * module.sinks.sum()\n    weights = nn"),
    "sharper weights": ("    return", "    weights = weights * weights\n    return"),
}


class Attending(nn.Module):
    def forward(self, x: Tensor, attend: Callable[..., Any], mask: Tensor) -> Tensor:
        out, weights = attend(self, x, x, x, mask, scaling=1.0)
        return out, weights  # type: ignore[return-value]


class Reading(nn.Module):
    def forward(self, x: Tensor, attend: Callable[..., Any], mask: Tensor) -> Tensor:
        out, weights = attend(self, x, x, x, mask, scaling=1.0)
        return out * weights.sum()  # type: ignore[no-any-return]


def made(before: str = "", after: str = "") -> Any:
    home: dict[str, Any] = {"torch": torch, "nn": nn}
    assert before in BODY
    exec(SIGNATURE + (BODY.replace(before, after) if before else BODY), home)
    return home["eager"]


def test_eager_functions_that_differ_are_left() -> None:
    assert why_other(eager, Attending) is None
    assert why_other(made(), Attending) is None
    assert why_other(eager, Reading) == "its forward reads the weights"
    found = {what: why_other(made(*change), Attending) for what, change in PLANTED.items()}
    assert all(found.values()), found
