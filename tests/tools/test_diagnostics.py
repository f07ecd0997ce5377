"""foundry_kernels.diagnostics: what it measures, against matrices that are made here, and the command."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import tiny_model
import torch

from foundry_kernels import diagnostics
from foundry_kernels.diagnostics import LayerHealth, QKClip, attention_maps, effective_rank, qk_ranks, record
from foundry_kernels.diagnostics.__main__ import main
from foundry_kernels.diagnostics.checkpoint import load
from foundry_kernels.models import ModelConfig, Transformer
from foundry_kernels.nn import GatedDeltaNet
from foundry_kernels.nn.self_attention import SelfAttention

CHOICES = {
    "llama": {"n_kv_heads": 2},
    "bloom": {"positions": "alibi", "norm": "layer_norm", "activation": "gelu", "attention_bias": True},
    "window": {"sliding_window": 5, "qk_norm": True},
    "post": {"norm_placement": "post", "positions": "learned"},
    "parallel": {"parallel_residual": True},
}


def make_model(**changes: object) -> Transformer:
    torch.manual_seed(0)
    config = ModelConfig(dim=32, n_layers=3, n_heads=4, vocab_size=256, max_seq_len=64, init_std=0.2)
    return Transformer(dataclasses.replace(config, **changes))  # type: ignore[arg-type]


def tokens_of(model: Transformer, batch: int = 2, length: int = 17) -> torch.Tensor:
    return torch.randint(model.config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(1))


# --- ranks ------------------------------------------------------------------------------------------------------------


def test_effective_rank() -> None:
    orthogonal = torch.linalg.qr(torch.randn(8, 8)).Q
    torch.testing.assert_close(effective_rank(orthogonal), torch.tensor(8.0))
    torch.testing.assert_close(effective_rank(torch.outer(torch.randn(5), torch.randn(7))), torch.tensor(1.0))
    two = torch.diag(torch.tensor([3.0, 1.0]))
    expected = math.exp(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)))
    assert effective_rank(two).item() == pytest.approx(expected)
    several = torch.stack([two, 1e-20 * two, 1e20 * two, torch.zeros(2, 2), torch.full((2, 2), math.inf)])
    ranks = effective_rank(several).tolist()
    assert ranks[:4] == pytest.approx([expected] * 3 + [0.0])
    assert math.isnan(ranks[4])
    assert effective_rank(two.double()).dtype == torch.float64
    with pytest.raises(ValueError, match=r"x must be \[\.\.\., M, N\]"):
        effective_rank(torch.zeros(0, 3))
    with pytest.raises(TypeError, match="x must"):
        effective_rank(torch.ones(2, 2, dtype=torch.int64))


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_ranks_of_the_product_of_query_and_key_weights(kv_heads: int) -> None:
    attention = make_model(n_kv_heads=kv_heads).layers[0].attention
    w_q, w_k = (w.weight.detach().double().view(-1, 8, 32) for w in (attention.wq, attention.wk))
    products = [w_q[h].T @ w_k[h * kv_heads // 4] for h in range(4)]
    expected = torch.stack([effective_rank(p) for p in products])
    torch.testing.assert_close(qk_ranks(attention).double(), expected, rtol=1e-4, atol=1e-4)
    assert (qk_ranks(attention) <= 8.001).all()


# --- what is recorded -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CHOICES)
def test_statistics_are_those_of_the_matrices(name: str) -> None:
    """Ranks of each head come from the maps; and the model computes what it computes without."""
    model = make_model(**CHOICES[name]).eval()
    tokens = tokens_of(model, batch=1)
    expected = model(tokens)
    with record(model) as recorder:
        assert torch.equal(model(tokens), expected)
    health = recorder.health()
    assert torch.equal(model(tokens), expected)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    pairs = [(layer, head) for layer in range(3) for head in range(4)]
    maps = attention_maps(model, tokens, pairs)
    assert list(maps) == pairs
    seen = torch.arange(1, 18).clamp_max(model.config.sliding_window or 17)
    for (layer, head), weights in maps.items():
        assert torch.equal(weights, weights.tril())
        torch.testing.assert_close(weights.sum(-1), torch.ones(17))
        entropy = torch.special.entr(weights).sum(-1).mean() / seen.log().mean()
        assert health.layers[layer].entropy[head] == pytest.approx(entropy.item(), rel=1e-4)
        assert math.isfinite(health.layers[layer].max_logit[head])
        assert health.layers[layer].gradient_norm is None
    assert all(1.0 <= layer.activation_rank <= layer.most_ranks == 17 for layer in health.layers)


def test_gradients_and_no_forward_pass() -> None:
    model = make_model()
    tokens = tokens_of(model)
    with record(model) as recorder:
        with pytest.raises(RuntimeError, match="no forward pass"):
            recorder.health()
        model(tokens, tokens)[1].backward()
    for block, layer in zip(model.layers, recorder.health().layers, strict=True):
        norm = math.sqrt(sum(float(p.grad.square().sum()) for p in block.parameters()))
        assert layer.gradient_norm == pytest.approx(norm, rel=1e-5)


def test_concerns() -> None:
    fine = LayerHealth([0.5, 0.9], [3.0, 4.0], [7.0, 6.0], 20.0, 32, 1.0)
    change = dataclasses.replace

    def said(layer: LayerHealth) -> str:
        return "\n".join(diagnostics.Health([fine, fine, layer], head_dim=8).concerns())

    assert said(fine) == ""
    assert "layer 2: entropy collapse, head 1" in said(change(fine, entropy=[0.5, 0.01]))
    assert "layer 2: logits of head 0 up to 250: QKClip" in said(change(fine, max_logit=[250.0, 4.0]))
    assert "rank collapse, activations have an effective rank of 1.2 of 32" in said(change(fine, activation_rank=1.2))
    assert "layer 2: gradients vanish, norm 1.0e-04" in said(change(fine, gradient_norm=1e-4))
    assert "layer 2: gradients explode, norm 1.0e+03" in said(change(fine, gradient_norm=1e3))
    assert said(change(fine, max_logit=[math.nan, 1.0])) == "layer 2: max_logit not finite"


# --- QK-clip ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_clipped_logits_are_at_the_limit(kv_heads: int) -> None:
    """Compares maps of the same tokens after a step that changes nothing else; the heads below it keep their bits."""
    model = make_model(n_kv_heads=kv_heads, attention_bias=True)
    tokens = tokens_of(model)
    clip = QKClip(model, limit=4.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer.register_step_post_hook(clip)
    with record(model) as recorder:  # both take the same statistics
        model(tokens, tokens)[1].backward()
    before = recorder.health().layers[0].max_logit
    assert min(before) < 4.0 < max(before), "nothing to tell apart"
    queries = model.layers[0].attention.wq.weight.detach().clone().view(4, 8, 32)
    optimizer.step()
    assert clip.max_logits == [None] * 3
    model.eval()
    with record(model) as recorder:
        model(tokens)
    assert clip.max_logits == [None] * 3
    after = recorder.health().layers[0].max_logit
    for old, new, was, now in zip(
        before, after, queries, model.layers[0].attention.wq.weight.view(4, 8, 32), strict=True
    ):
        if old > 4.0:
            assert new == pytest.approx(4.0, rel=1e-4)
        else:
            assert torch.equal(was, now)
            assert kv_heads < 4 or new == pytest.approx(old, rel=1e-5)
    clip.remove()
    assert not any(m._forward_hooks for m in model.modules())


def test_clipping_sees_all_parts_of_a_step() -> None:
    model = make_model()
    clip = QKClip(model, limit=1e6)
    parts = [tokens_of(model), tokens_of(model).flip(0, 1)]
    each = []
    for part in parts:
        with record(model) as recorder:
            model(part, part)
        each.append(recorder.health().layers[1].max_logit)
    found = clip.max_logits[1]
    assert found is not None
    assert found.tolist() == pytest.approx([max(pair) for pair in zip(*each, strict=True)])
    weights = [p.clone() for p in model.parameters()]
    clip()
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))


def test_logits_are_those_before_dropout() -> None:
    """Of the first layer, that is: the others see what it has dropped out."""
    plain, dropping = make_model(), make_model(attention_dropout=0.5)
    assert torch.equal(plain.output.weight, dropping.output.weight)
    tokens = tokens_of(plain)
    found = []
    for model in (plain, dropping):
        clip = QKClip(model, limit=1e6)
        with record(model.train()) as recorder:
            model(tokens, tokens)[1].backward()
        found.append((clip.max_logits[0], torch.tensor(recorder.health().layers[0].entropy)))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize(
    ("changes", "limit", "message"),
    [
        ({"qk_norm": True}, 100.0, "qk_norm=True is not supported by QKClip: it already bounds"),
        ({}, 0.0, "limit must be finite and above 0"),
    ],
)
def test_what_cannot_be_clipped(changes: dict[str, object], limit: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        QKClip(make_model(**changes), limit)


def test_maps_of_models_with_other_layers() -> None:
    """Of the layers that attend, by every kind of attention."""
    found = 0
    for config in tiny_model.EVERY.values():
        model = Transformer(config)
        tokens = torch.randint(config.vocab_size, (1, 5))
        for layer, block in enumerate(model.layers):
            if any(isinstance(each, SelfAttention) for each in block.children()):
                (weights,) = attention_maps(model, tokens, [(layer, 0)]).values()
                assert weights.shape == (5, 5)
                torch.testing.assert_close(weights.sum(-1), torch.ones(5))
                found += 1
            else:
                with pytest.raises(ValueError, match=f"layers with attention, which layer {layer} has not"):
                    attention_maps(model, tokens, [(layer, 0)])
    assert found > 20
    with pytest.raises(TypeError, match="attention must be an Attention; got GatedDeltaNet"):
        qk_ranks(GatedDeltaNet(16, 2))  # type: ignore[arg-type]


# --- maps and the command ---------------------------------------------------------------------------------------------


def test_maps_refuse_what_is_not_there_and_leave_the_model_as_it_was() -> None:
    model = make_model().train()
    tokens = tokens_of(model, batch=1)
    for heads in ([(3, 0)], [(0, 4)], [(0, -1)]):
        with pytest.raises(ValueError, match=r"heads must be \(layer, head\) of (3 layers|4 heads); got"):
            attention_maps(model, tokens, heads)
    with pytest.raises(ValueError, match="one text"):
        attention_maps(model, tokens.repeat(2, 1), [(0, 0)])
    attention_maps(model, tokens, [(1, 2)])
    assert model.training


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("Now is the winter of our discontent made glorious summer by this sun of York. " * 4)
    return path


def check_page(folder: Path, layers: int) -> dict[str, object]:
    found = json.loads((folder / "health.json").read_text())
    assert len(found["layers"]) == layers
    assert found["loss"] > 0
    assert all(layer["gradient_norm"] > 0 for layer in found["layers"])
    assert (folder / "health.png").read_bytes()[:4] == b"\x89PNG"
    return found


def test_the_command_on_a_saved_model(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    model = make_model()
    path, out = tmp_path / "model.pt", tmp_path / "page"
    torch.save({"config": dataclasses.asdict(model.config), "model": model.state_dict()}, path)
    arguments = [str(path), "--text", str(text), "--out", str(out), "--seq-len", "32", "--batch", "2"]
    assert main([*arguments, "--heads", "0.0", "2.3"]) == 0
    assert "perplexity" in capsys.readouterr().out
    check_page(out, 3)
    for more, message in (
        (["--heads", "9.0"], "heads must be (layer, head) of 3 layers; got (9, 0)"),
        (["--heads", "first"], "--heads must be LAYER.HEAD"),
        (["--seq-len", "0"], "must be at least 1"),
    ):
        assert main([*arguments, *more]) == 2
        assert message in capsys.readouterr().err


def test_the_command_on_a_model_of_transformers(text: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    transformers = pytest.importorskip("transformers")
    shape = {"vocab_size": 256, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape)).save_pretrained(tmp_path / "gpt2")
    assert main([str(tmp_path / "gpt2"), "--text", str(text), "--out", str(tmp_path), "--seq-len", "16"]) == 0
    check_page(tmp_path, 2)


@pytest.mark.parametrize("positions", ["rope", "learned"])
def test_a_checkpoint_of_a_release_with_other_defaults(positions: str, tmp_path: Path) -> None:
    """It says all fields: its model is the one that was saved, also where a default meant nothing."""
    saved = dataclasses.asdict(ModelConfig(dim=16, n_layers=1, n_heads=2, vocab_size=256, positions=positions))
    model = Transformer(ModelConfig(**saved))
    then = saved | {"norm_eps": 1e-5, "rope_interleaved": True}
    torch.save({"config": then, "model": model.state_dict()}, tmp_path / "model.pt")
    config = load(tmp_path / "model.pt")[0].config
    assert (config.norm_eps, config.rope_interleaved) == (1e-5, positions == "rope")


def test_checkpoints_that_cannot_be_read(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "noise.pt").write_bytes(b"noise")
    torch.save({"weights": {}}, tmp_path / "other.pt")
    for name, message in (("absent.pt", "cannot read"), ("noise.pt", "cannot read"), ("other.pt", "has neither")):
        assert main([str(tmp_path / name), "--text", str(text)]) == 2
        assert message in capsys.readouterr().err
    assert main([str(tmp_path), "--text", str(text)]) == 2
    assert "has no config.json" in capsys.readouterr().err
    assert main([str(tmp_path / "other.pt"), "--text", str(tmp_path / "absent.txt")]) == 2
    assert "cannot read the text" in capsys.readouterr().err
