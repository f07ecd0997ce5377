"""GPT-2, GPT-NeoX and their like: a patched model computes what the model computed before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from patching import IDS, close, logits
from torch import Tensor, nn

import foundry_kernels as fk
from foundry_kernels.integrations.adapters.table import GPT_LIKE
from foundry_kernels.integrations.adapters.tiny import tiny_model
from foundry_kernels.ops.flash_attention.dropout import keep_mask, keep_scale

every_family = pytest.mark.parametrize("family", GPT_LIKE)

LEFT, RIGHT = torch.ones_like(IDS), torch.ones_like(IDS)
LEFT[0, :4] = RIGHT[1, 7:] = 0

#: What replaces modules of each family of two layers beside its norms: operation -> number of modules.
REPLACED = {"flash_attention": 2, "bias_gelu": 2, "linear_cross_entropy": 1, "cross_entropy": 1}
ROTATED = ("gpt_neox", "falcon")
ALIBI = {
    "new_decoder_architecture": False,
    "multi_query": False,
    "num_kv_heads": 4,
    "parallel_attn": False,
    "alibi": True,
}
#: Options that make a family another one.
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "gpt2": [{"scale_attn_by_inverse_layer_idx": True, "activation_function": "gelu"}],
    "bloom": [{"apply_residual_connection_post_layernorm": True, "n_head": 6, "hidden_size": 96}],
    "falcon": [{"new_decoder_architecture": False, "multi_query": True, "parallel_attn": True, "bias": True}, ALIBI],
    "gpt_neox": [{"use_parallel_residual": False, "attention_bias": False, "hidden_act": "gelu_new"}],
}


def step(model: Any, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of the tokens, loss, and all gradients in one vector."""
    labels = IDS if mask is None else IDS.masked_fill(mask == 0, -100)
    if mask is LEFT:
        labels[0, 4] = -100  # what padding predicts is arbitrary
    model.zero_grad()
    out = model(IDS, attention_mask=mask, labels=labels)
    out.loss.backward()
    seen = out.logits if mask is None else out.logits[mask.bool()]
    return seen.detach(), out.loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])


def generated(model: Any) -> Tensor:
    result: Tensor = model.generate(IDS, attention_mask=LEFT, max_new_tokens=5, do_sample=False)
    return result


@every_family
def test_logits_loss_gradients_and_generation(family: str) -> None:
    for options in ({}, *VARIANTS[family]):
        model = tiny_model(family, **options)
        expected = [step(model, mask) for mask in (None, LEFT, RIGHT)]
        tokens, before = generated(model), [type(m) for m in model.modules()]
        handle = fk.patch(model)
        counts: dict[str, int] = {}
        for entry in handle.report().replaced:
            for op in entry.ops:
                counts[op] = counts.get(op, 0) + 1
        rotated = family in ROTATED and not options.get("alibi")
        norms = sum(isinstance(m, nn.LayerNorm) for m in model.modules())
        assert counts == REPLACED | {"layer_norm": norms} | ({"rope": 2} if rotated else {})
        assert not handle.report().left
        for mask, wanted in zip((None, LEFT, RIGHT), expected, strict=True):
            assert all(map(close, step(model, mask), wanted))
        assert torch.equal(generated(model), tokens)
        handle.undo()
        assert [type(m) for m in model.modules()] == before
        assert all(map(torch.equal, step(model, LEFT), expected[1]))


DROPOUT: dict[str, dict[str, Any]] = {
    "gpt2": {"attn_pdrop": 0.5},
    "gpt_neox": {"attention_dropout": 0.5},
    "bloom": {"attention_dropout": 0.5},
    "falcon": {"attention_dropout": 0.5, **ALIBI},
}


def dropout_of_the_kernels(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """In place of torch's: what the kernels drop of weights ``[B, H, T, S]`` with a seed from the same generator, and
    nothing of other tensors."""
    if not p or not training or x.dim() != 4:
        return x
    seed = torch.randint(2**63 - 1, ())
    return x * keep_mask(tuple(x.shape), p, seed) * keep_scale(p)  # type: ignore[arg-type]


def sdpa_by_matrices(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """In place of torch's, whose dropout draws by itself."""
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        scores = scores.masked_fill(scores.new_ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
    if attn_mask is not None:
        scores = scores + attn_mask if attn_mask.is_floating_point() else scores.masked_fill(~attn_mask, -torch.inf)
    return dropout_of_the_kernels(scores.softmax(-1), dropout_p) @ v


@every_family
def test_dropout_of_attention_is_the_kernels(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward it drops the weights that the model's attention does with the kernels' mask; with padding
    the tokens are finite, and a seed repeats them; the report knows of nothing that runs elsewhere."""
    monkeypatch.setattr(nn.functional, "dropout", dropout_of_the_kernels)
    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", sdpa_by_matrices)
    model = tiny_model(family, **DROPOUT[family]).train()

    def run(mask: Tensor | None = None, seed: int = 0) -> tuple[Tensor, Tensor]:
        torch.manual_seed(seed)
        model.zero_grad()
        out: Tensor = model(IDS, attention_mask=mask).logits
        out = out if mask is None else out[mask.bool()]
        out.square().mean().backward()
        return out.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])

    expected = run()
    with fk.patch(model) as handle:
        assert {e.reason for e in handle.report().replaced if "flash_attention" in e.ops} == {None}
        assert "drop" not in str(handle.report())
        assert all(map(close, run(), expected))
        assert not close(run(seed=1)[0], expected[0])
        padded = run(LEFT)
        assert all(map(torch.equal, padded, run(LEFT)))
        assert all(x.isfinite().all() for x in padded)
        model.eval()
        ours = logits(model)
    assert close(ours, logits(model))


def test_rotations_of_falcon_go_without_dropout() -> None:
    """So it is in the model: only with ALiBi does it drop weights out."""
    model = tiny_model("falcon", attention_dropout=0.5)
    expected = logits(model)
    with fk.patch(model):
        assert close(logits(model.train()), expected)


@every_family
def test_a_layer_that_must_be_called_is_called(family: str) -> None:
    """A product with a hook on it is the layer's own, and GELU follows without a bias."""
    model = tiny_model(family)
    expected, calls = logits(model), []
    with fk.patch(model):
        mlp = next(m for m in model.modules() if type(m).__name__.endswith("MLP"))
        first = getattr(mlp, mlp._foundry_row.up)
        handle = first.register_forward_hook(lambda *args: calls.append(args))
        assert close(logits(model), expected)
        handle.remove()
    assert len(calls) == 1


ALONE: dict[str, tuple[dict[str, Any], str]] = {
    "gpt2": ({"activation_function": "tanh"}, "its activation is Tanh, which no kernel has"),
    "gpt_neox": ({"hidden_act": "tanh"}, "its activation is Tanh, which no kernel has"),
    "bloom": ({"pretraining_tp": 2, "slow_but_exact": True}, "slow_but_exact=True"),
    "falcon": ({"activation": "tanh"}, "its activation is Tanh, which no kernel has"),
}


@every_family
def test_what_is_left(family: str) -> None:
    """What no kernel does; and of attention what is "eager" by choice, which only BLOOM's is not."""
    options, reason = ALONE[family]
    model = tiny_model(family, attn_implementation="eager", **options)
    expected = logits(model)
    with fk.patch(model) as handle:
        report = handle.report()
        left = {str(e.reason) for e in report.left if e.module_class.endswith("MLP")}
        notes = [str(e.reason) for e in (*report.left, *report.replaced) if e.module_class.endswith("Attention")]
        assert close(logits(model), expected)
    assert len(left) == 1
    assert reason in left.pop()
    assert all((reason if family == "bloom" else "attn_implementation='eager'") in note for note in notes)


def test_attention_to_an_encoder() -> None:
    """Whose padding is a mask of its own."""
    model = tiny_model("gpt2", add_cross_attention=True)
    generator = torch.Generator().manual_seed(0)
    options = {
        "encoder_hidden_states": torch.randn(2, 7, 64, generator=generator),
        "encoder_attention_mask": torch.ones(2, 7, dtype=torch.long).index_fill(1, torch.tensor([2, 6]), 0),
    }
    expected = logits(model, **options)
    with fk.patch(model) as handle:
        assert not handle.report().left
        assert close(logits(model, **options), expected)


def half_padded() -> Tensor:
    mask = torch.ones_like(IDS)
    mask[0, :2] = mask[1, 5] = 0
    return mask


@pytest.mark.parametrize("options", [{}, {"alibi": True}], ids=["", "alibi"])
@every_family
def test_dense_masks_and_weights(family: str, options: dict[str, Any]) -> None:
    """Padding between tokens, in which ALiBi counts no distance, and what attention's weights are then."""
    if options and family != "falcon":
        pytest.skip("the option is Falcon's")
    model = tiny_model(family, attn_implementation="sdpa" if options else "eager", **options)  # eager adds ALiBi twice
    mask = half_padded()
    real = mask.bool()
    expected = model(IDS, attention_mask=mask, output_attentions=not options)
    with fk.patch(model, ops=["flash_attention", "rope", "layer_norm"]):
        ours = model(IDS, attention_mask=mask, output_attentions=True)
        assert close(ours.logits[real], expected.logits[real])
        assert len(ours.attentions) == 2
        where = real[:, None, :, None]
        for a, e in zip(ours.attentions, expected.attentions or (), strict=not options):
            assert close(a * where, e * where)
        assert all(close(a.sum(-1)[:, 0][real], torch.ones(int(real.sum()))) for a in ours.attentions)
