"""The weights of attention beside its fused output, as ``output_attentions=True`` asks for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from patching import IDS, close

import foundry_kernels as fk
from foundry_kernels.integrations.adapters.tiny import tiny_model
from foundry_kernels.integrations.attention.functions import attention
from foundry_kernels.integrations.attention.plan import AttentionPlan
from foundry_kernels.ops.flash_attention.weights import attention_weights


def test_attention_weights() -> None:
    """Each layer's, whatever its mask is; and their gradients."""
    padding = torch.ones(2, 6, dtype=torch.bool).index_fill(1, torch.arange(2), False)
    layout = AttentionPlan.of_padding(padding, 2, 6, 6, 0, "cpu", False).mask()
    bias = torch.randn(2, 2, 6, 6, requires_grad=True)
    module = torch.nn.Module()
    for mask, options in (
        (None, {}),
        (None, {"sliding_window": 3, "softcap": 2.0, "s_aux": torch.randn(2)}),
        (layout, {"sliding_window": 3}),
        (torch.rand(2, 1, 6, 6) > 0.3, {}),
        (None, {"position_bias": bias}),
    ):
        q, k, v = (torch.randn(2, 2, 6, 8, requires_grad=True) for _ in range(3))
        out, weights = attention(module, q, k, v, mask, output_attentions=True, **options)
        plain, none = attention(module, q, k, v, mask, **options)
        assert none is None
        assert weights is not None
        assert close(out, plain)
        assert close((weights @ v).transpose(1, 2), plain)
        leaves = [q, k, bias] if options.get("position_bias") is bias else [q, k]
        expected = torch.autograd.grad(plain.square().sum(), [*leaves, v])
        assert all(map(close, torch.autograd.grad(out.square().sum(), [*leaves, v], retain_graph=True), expected))
        (of_weights,) = torch.autograd.grad(out.square().sum(), weights, retain_graph=True)
        assert close(of_weights, 2 * plain.transpose(1, 2) @ v.transpose(2, 3))
        ours = torch.autograd.grad((weights @ v).square().sum(), leaves)
        assert all(map(close, ours, expected[:-1]))


def test_attention_weights_after_dropout() -> None:
    """Those by which the values were summed."""
    q, k, v = torch.randn(3, 2, 2, 40, 8)
    out, weights = attention(torch.nn.Module(), q, k, v, None, dropout=0.5, output_attentions=True)
    assert weights is not None
    assert 0.2 < float((weights.tril() == 0).float().mean()) < 0.95
    assert close((weights @ v).transpose(1, 2), out)
    with pytest.raises(ValueError, match="dropout_seed must be that of the call"):
        attention_weights(q, k, torch.zeros(2, 2, 40), dropout_p=0.5)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "qwen3"])
def test_output_attentions(family: str) -> None:
    """As an argument of the model's call, with padding; generation too."""
    model = tiny_model(family)
    mask = torch.ones_like(IDS)
    mask[0, 9:] = mask[1, 5] = 0
    model.set_attn_implementation("eager")
    plain = model(IDS, attention_mask=mask, output_attentions=True)
    if family not in ("gemma2", "gpt_oss"):
        model.set_attn_implementation("sdpa")
    seen = mask.bool()[:, None, :, None]
    with fk.patch(model, ops=["rms_norm", "flash_attention"]):
        ours = model(IDS, attention_mask=mask, output_attentions=True)
        assert model(IDS, attention_mask=mask).attentions is None
        assert close(ours.logits[mask.bool()], plain.logits[mask.bool()])
        assert len(ours.attentions) == 2
        for a, e in zip(ours.attentions, plain.attentions, strict=True):
            assert close(a * seen, e * seen)
        options: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "return_dict_in_generate": True}
        made = model.generate(IDS, output_attentions=True, eos_token_id=None, **options)
        assert [len(step) for step in made.attentions] == [2, 2, 2]
