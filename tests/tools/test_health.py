"""Collapses, into which small models are driven: each is named, and a healthy model gives no concern. Sigma-Reparam
prevents one of them."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import foundry_kernels as fk
from foundry_kernels.diagnostics import (
    Health,
    HealthHistory,
    QKClip,
    SigmaReparam,
    qk_ranks,
    record,
    write_history_png,
)
from foundry_kernels.diagnostics.__main__ import main
from foundry_kernels.models import ModelConfig, Transformer

STEPS = 25


def make_model(**changes: Any) -> Transformer:
    torch.manual_seed(0)
    config = ModelConfig(dim=32, n_layers=2, n_heads=4, vocab_size=32, max_seq_len=32)
    return Transformer(dataclasses.replace(config, **changes))


def trained(model: nn.Module, lr: float) -> HealthHistory:
    """The health at some steps of learning to go on with sorted numbers."""
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95))
    history = HealthHistory()
    for step in range(STEPS):
        numbers = torch.randint(32, (8, 17), generator=generator).sort(-1).values
        with record(model) as recorder:
            model(numbers[:, :-1].contiguous(), numbers[:, 1:].contiguous())[1].backward()
        if step % 6 == 0:
            history.append(step, recorder.health())
        optimizer.step()
        optimizer.zero_grad()
    return history


def health_of(model: nn.Module, x: Tensor) -> Health:
    with record(model) as recorder:
        (model(x) ** 2).mean().backward()
    return recorder.health()


# --- collapses --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(  # at 0.1 last bits decide over one layer
    ("lr", "reparametrized"),
    [(0.003, False), (0.2, False), (0.2, True), pytest.param(0.003, True, marks=pytest.mark.slow)],
)
def test_entropy_collapses_at_a_large_learning_rate_but_with_sigma_reparam(lr: float, reparametrized: bool) -> None:
    model = make_model()
    if reparametrized:
        SigmaReparam(model)
    history = trained(model, lr)
    if lr < 0.2:
        assert all(health.concerns(since=history.healths[0]) == [] for health in history.healths)
    elif reparametrized:
        assert not [line for line in history.concerns() if "entropy" in line or "logits" in line]
    else:
        for layer in (0, 1):
            assert any(f"layer {layer} " in line and "entropy collapse" in line for line in history.concerns())
        assert any("logits of head" in line and "SigmaReparam" in line for line in history.concerns())
        assert all(health.concerns() == [] for health in history.healths[:1])


def test_attention_alone_loses_rank_with_depth() -> None:
    """Dong et al., "Attention is not all you need: pure attention loses rank doubly exponentially with depth", 2021."""
    torch.manual_seed(0)
    model = nn.Sequential(*(fk.nn.Attention(32, 4, causal=False) for _ in range(6)))
    health = health_of(model, torch.randn(1, 128, 32))
    lines = health.concerns()
    assert any("layer 5 (5): rank collapse, activations have an effective rank of 1.0 of 32" in line for line in lines)
    assert not any("layer 0 (0): rank" in line for line in lines)


def test_a_query_key_product_of_rank_one() -> None:
    model = make_model()
    x = torch.randint(32, (4, 16))
    with record(model) as recorder:
        model(x, x)[1].backward()
    before = recorder.health()
    attention = model.layers[1].attention
    with torch.no_grad():
        attention.wq.weight[8:16] = torch.outer(torch.randn(8), torch.randn(32))
    with record(model) as recorder:
        model(x, x)[1].backward()
    after = recorder.health()
    line = (
        "layer 1 (layers.1.attention): rank collapse, the query-key product of head 1 has an effective rank of 1.0 of 8"
    )
    assert line in after.concerns()
    assert line in after.concerns(since=before)
    assert before.concerns() == []
    with torch.no_grad():  # two of eight directions are no collapse yet, but a fall
        attention.wq.weight[8:16] = torch.randn(8, 2) @ torch.randn(2, 32)
    with record(model) as recorder:
        model(x, x)[1].backward()
    fallen = recorder.health()
    assert fallen.concerns() == []
    [line] = fallen.concerns(since=before, rank_kept=0.5)
    history = HealthHistory()
    for step, health in enumerate((before, fallen)):
        history.append(step, health)
    assert (history.concerns(rank_kept=0.5), history.concerns(rank_kept=0.01)) == ([line], [])
    assert "the rank of the query-key product of head 1 has fallen, from 7." in line


def test_gradients_since_the_beginning() -> None:
    model = make_model()
    x = torch.randint(32, (4, 16))

    def health(factor: float) -> Health:
        model.zero_grad()
        with record(model) as recorder:
            (factor * model(x, x)[1]).backward()
        return recorder.health()

    first = health(1.0)
    assert health(0.5).concerns(since=first) == []
    assert "gradients vanish, the median of the layers' norms has fallen" in health(1e-6).concerns(since=first)[0]
    assert "gradients explode, the median of the layers' norms has grown" in health(1e4).concerns(since=first)[0]
    assert "gradients vanish, most layers have none" in health(0.0).concerns()[0]
    broken = health(math.nan).concerns(since=first)
    assert all("gradient_norm" in line and "not finite" in line for line in broken)
    with pytest.raises(
        ValueError, match=r"since must be of the same model, with \[4, 4\] heads in its layers; got \[4\]"
    ):
        first.concerns(since=Health(first.layers[:1], 8))


def test_a_branch_without_gradient_is_named() -> None:
    """Of a feed-forward part whose activation is dead."""
    model = make_model(activation="relu", n_layers=3)
    x = torch.randint(32, (4, 16))
    model.layers[1].feed_forward.w1.weight.data.zero_()
    with record(model) as recorder:
        model(x, x)[1].backward()
    assert recorder.health().concerns() == [
        next(line for line in recorder.health().concerns() if "gradients of the feed-forward part vanish" in line)
    ]


# --- over the steps ---------------------------------------------------------------------------------------------------


def test_a_history_is_kept_drawn_and_read_back(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    history = trained(make_model(), 0.1)
    again = HealthHistory()
    for step, health in zip(history.steps, history.healths, strict=True):
        again.append(step, Health.from_dict(json.loads(json.dumps(health.as_dict(), allow_nan=False))))
    assert again.healths == history.healths
    assert again.concerns() == history.concerns() != []
    curves = {"loss": {0: 3.0, 6: 2.0}, "learning rate": {0: 0.1, 6: 0.1}}
    write_history_png(tmp_path / "health.png", history, curves, "a run")
    assert (tmp_path / "health.png").read_bytes()[:4] == b"\x89PNG"
    nothing = dataclasses.replace(
        history.healths[0].layers[0], gradient_norm=None, qk_rank=[], attention_gradient_norm=None
    )
    only = HealthHistory()
    only.append(1, Health([nothing], 8))
    write_history_png(tmp_path / "one.png", only, {})
    with pytest.raises(ValueError, match="step must be above the last one, 24; got 24"):
        history.append(24, history.healths[0])
    with pytest.raises(ValueError, match="of the same model"):
        history.append(30, Health([nothing], 8))
    with pytest.raises(ValueError, match="history must have the health of at least one step"):
        write_history_png(tmp_path / "none.png", HealthHistory(), {})


def test_what_is_not_finite_is_kept_as_such() -> None:
    model = make_model()
    model.layers[0].attention.wq.weight.data[0, 0] = math.nan
    with record(model) as recorder:
        model(torch.randint(32, (2, 9)))
    health = recorder.health()
    again = Health.from_dict(json.loads(json.dumps(health.as_dict(), allow_nan=False)))
    assert again.concerns() == health.concerns()
    assert "layer 0 (layers.0.attention): entropy, max_logit, qk_rank, activation_rank not finite" in health.concerns()


# --- sigma-reparam ----------------------------------------------------------------------------------------------------


def hugging_face() -> Any:
    pytest.importorskip("transformers")
    from foundry_kernels.integrations.adapters.tiny import tiny_model

    return tiny_model("llama")


def losses(model: Any, tokens: Tensor) -> Tensor:
    return model(tokens, tokens)[1] if isinstance(model, Transformer) else model(tokens, labels=tokens).loss


@pytest.mark.parametrize("make", [make_model, hugging_face], ids=["ours", "transformers"])
@pytest.mark.parametrize("gamma", [1.0, None], ids=["one", "kept"])
def test_spectral_norms_are_parameters(make: Any, gamma: float | None) -> None:
    """From construction to plain weights again: norms, gradients, state dict, deep copies, evaluation mode."""
    model, tokens = make().eval(), torch.randint(32, (2, 9))
    names = ("wq", "wk", "q_proj", "k_proj")
    plain = {n: m.weight.clone() for n, m in model.named_modules() if n.endswith(names)}
    before, state = losses(model, tokens).detach(), torch.get_rng_state()
    reparam = SigmaReparam(model, gamma)
    assert torch.equal(torch.get_rng_state(), state)
    assert set(reparam.layers) == set(plain)
    for name, layer in reparam.layers.items():
        expected = torch.linalg.matrix_norm(plain[name].detach(), 2) if gamma is None else gamma
        assert torch.linalg.matrix_norm(layer.weight.detach(), 2).item() == pytest.approx(float(expected), rel=0.02)
    if gamma is None:
        torch.testing.assert_close(losses(model, tokens), before)
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    losses(model, tokens)
    assert all(torch.equal(b, buffers[name]) for name, b in model.named_buffers())
    optimizer = torch.optim.SGD(model.train().parameters(), lr=0.3)
    with torch.autocast("cpu", torch.bfloat16):
        losses(model, tokens).backward()
    grads = {n: p.grad for n, p in model.named_parameters() if n.endswith(("gamma", "weight.original"))}
    assert len(grads) == 2 * len(plain)
    assert all(g is not None and g.isfinite().all() and g.any() for g in grads.values())
    optimizer.step()
    assert not all(torch.equal(b, buffers[n]) for n, b in model.named_buffers() if n.endswith((".u", ".v")))
    steps = {n: b.clone() for n, b in model.named_buffers()}
    with record(model) as recorder, torch.no_grad():  # that is no step of the training
        losses(model, tokens)
    assert recorder.health().layers
    assert all(torch.equal(b, steps[n]) for n, b in model.named_buffers())
    model.eval()
    after, copied, loaded = losses(model, tokens), copy.deepcopy(model), make().eval()
    assert torch.equal(losses(copied, tokens), after)
    assert SigmaReparam.is_in(model.state_dict())
    assert not SigmaReparam.is_in(loaded.state_dict())
    SigmaReparam(loaded)
    loaded.load_state_dict(model.state_dict())
    assert torch.equal(losses(loaded, tokens), after)
    reparam.remove()
    assert torch.equal(losses(model, tokens), after)
    assert list(model.state_dict()) == list(make().state_dict())


def test_sigma_reparam_of_a_patched_model_and_its_gradient() -> None:
    """The kernels' model computes what the unpatched one does; the gradient is that of gamma / (u^T W v) * W."""
    model = hugging_face().train()
    SigmaReparam(model)
    copied, tokens = copy.deepcopy(model), torch.randint(32, (2, 9))
    with fk.patch(copied):
        patched = losses(copied, tokens)
        patched.backward()
    losses(model, tokens).backward()
    for (name, p), q in zip(model.named_parameters(), copied.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-5, msg=name)
    scale = diagnosed_scale()
    weight = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(scale.eval(), (weight,))


def diagnosed_scale() -> nn.Module:
    from foundry_kernels.diagnostics.reparam import SpectralScale

    torch.manual_seed(0)
    return SpectralScale(torch.randn(5, 7, dtype=torch.float64), 0.7)


@pytest.mark.slow
def test_sigma_reparam_compiles() -> None:
    model = make_model()
    SigmaReparam(model)
    plain, tokens = copy.deepcopy(model), torch.randint(32, (2, 9))
    for _ in range(2):
        losses_of = torch.compile(losses, fullgraph=True, backend="aot_eager")
        losses_of(model, tokens).backward()
        losses(plain, tokens).backward()
    for (name, p), q in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(p.grad, q[1].grad, rtol=1e-4, atol=1e-6, msg=name)
    for p, q in zip(model.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(p, q)


def test_what_cannot_be_reparametrized() -> None:
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module; got int"):
        SigmaReparam(1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="gamma must be None or finite and above 0; got 0"):
        SigmaReparam(make_model(), 0.0)
    with pytest.raises(ValueError, match="model must have linear layers of queries and keys, named wq/wk"):
        SigmaReparam(nn.Linear(2, 2))
    with (
        torch.device("meta"),
        pytest.raises(ValueError, match=r"whole weights: layers\.0\.attention\.wq has no values yet"),
    ):
        SigmaReparam(make_model())
    model = make_model()
    reparam = SigmaReparam(model)
    with pytest.raises(ValueError, match=r"layers\.0\.attention\.wq is reparametrized already"):
        SigmaReparam(model)
    with pytest.raises(ValueError, match="SigmaReparam recomputes its weights"):
        QKClip(model)
    reparam.remove()
    QKClip(model)
    assert (qk_ranks(model.layers[0].attention) > 1).all()


@pytest.mark.slow
def test_the_command_reads_a_reparametrized_run_and_says_what_collapsed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    model = make_model(vocab_size=256)
    with torch.no_grad():
        model.layers[0].attention.wk.weight[:8] = torch.outer(torch.randn(8), torch.randn(32))
    SigmaReparam(model)
    torch.save({"config": dataclasses.asdict(model.config), "model": model.state_dict()}, tmp_path / "model.pt")
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 4)
    arguments = [str(tmp_path / "model.pt"), "--text", str(tmp_path / "text.txt"), "--out", str(tmp_path / "page")]
    assert main([*arguments, "--seq-len", "32"]) == 0
    assert "rank collapse, the query-key product of head 0 has an effective rank of 1.0 of 8" in capsys.readouterr().out
