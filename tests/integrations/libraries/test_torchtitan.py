"""torchtitan's models with `FoundryConverter`, compared with its own attention on a dense mask."""

from __future__ import annotations

import importlib
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

titan = pytest.importorskip("torchtitan.models.common.attention", reason="torchtitan is not installed")

# ruff: noqa: E402
from torch.nn.attention.flex_attention import create_mask

from foundry_kernels.integrations.torchtitan import FoundryConverter

#: Two documents in each row.
POSITIONS = torch.cat([torch.arange(20), torch.arange(12)]).expand(2, -1)
IDS = torch.randint(0, 100, (2, 32), generator=torch.Generator().manual_seed(1))


def dense(q: Tensor, k: Tensor, v: Tensor, *, block_mask: Any, scale: float | None, enable_gqa: bool, **_: Any) -> Any:
    """What `flex_attention` computes, with a gradient on a CPU too."""
    mask = create_mask(block_mask.mask_mod, q.shape[0], None, q.shape[2], k.shape[2], device="cpu")
    options = {"scale": scale, "enable_gqa": enable_gqa}
    return nn.functional.scaled_dot_product_attention(q, k, v, mask, **options), None


def build(family: str, backend: str, *converters: Any) -> Any:
    registry = importlib.import_module(f"torchtitan.models.{family}").model_registry
    model = registry("debugmodel", attn_backend=backend, converters=list(converters)).model.build()
    model.verify_module_protocol()
    torch.manual_seed(0)
    model.init_states()
    return model


def run(model: Any) -> tuple[Tensor, Tensor]:
    """Logits, and the gradients of all parameters."""
    out = model(IDS, positions=POSITIONS, attention_masks=model.get_attention_masks(POSITIONS))
    out.square().mean().backward()
    return out.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])


def replaced(model: Any) -> dict[str, int]:
    found = Counter(type(module).__name__ for module in model.modules())
    return {name: n for name, n in found.items() if name.startswith("Foundry")}


@pytest.mark.parametrize(("family", "rotation"), [("llama3", "FoundryComplexRoPE"), ("qwen3", "FoundryCosSinRoPE")])
def test_as_without(family: str, rotation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(titan.FlexAttention, "compiled_flex_attn", staticmethod(dense))
    ours, theirs = build(family, "varlen", FoundryConverter.Config()), build(family, "flex")
    layers = len(theirs.layers)
    found = replaced(ours)
    assert found.pop("FoundryRMSNorm") == layers * (4 if family == "qwen3" else 2) + 1
    assert found == {"FoundryFeedForward": layers, "FoundryAttention": layers, rotation: layers}
    for actual, expected in zip(run(ours), run(theirs), strict=True):
        assert (actual - expected).abs().max() < 1e-5 * expected.abs().max()
    assert list(ours.state_dict()) == list(theirs.state_dict())


def test_chosen_operations_and_backend() -> None:
    model = build("llama3", "varlen", FoundryConverter.Config(backend="reference", ops=["rms_norm"]))
    assert replaced(model) == {"FoundryRMSNorm": 2 * len(model.layers) + 1}
    assert {module.backend for module in model.modules() if type(module).__name__ == "FoundryRMSNorm"} == {"reference"}
    with pytest.raises(ValueError, match="ops must name some of flash_attention, rms_norm, rope, swiglu; got gelu"):
        FoundryConverter.Config(ops=["gelu"]).build()


def test_a_window_and_what_is_made_of_the_lse() -> None:
    """Against softmax on a dense mask; the transform of the output gets its log-sum-exp, ``[B, T, H]``."""
    from foundry_kernels.integrations.trainers.torchtitan import FoundryAttention

    attention = FoundryAttention.Config(window_size=(3, 0)).build()
    q, k, v = torch.randn(3, 2, 32, 4, 16).unbind()
    mask = titan.create_varlen_metadata_for_document(POSITIONS)
    out, lse = attention(q, k, v, attention_masks=mask, out_transform=lambda out, lse: (out, lse))
    at = torch.arange(32)
    document = (POSITIONS == 0).cumsum(1)
    near = (at[:, None] - at).clamp(min=-1) % 33 <= 3  # none that comes later: -1 is 32
    seen = (near & (document[:, :, None] == document[:, None]))[:, None]
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / 4
    scores = scores.masked_fill(~seen, -torch.inf)
    assert torch.allclose(out, torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v), atol=1e-5)
    assert torch.allclose(lse, scores.logsumexp(-1).transpose(1, 2), atol=1e-5)
