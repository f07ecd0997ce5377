"""What is recorded of models of every kind, against the weights of attention that they return or that are made here."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import foundry_kernels as fk
from foundry_kernels.diagnostics import Health, effective_rank, record
from foundry_kernels.diagnostics.ranks import product_ranks
from foundry_kernels.diagnostics.statistics import of_queries, of_scores
from foundry_kernels.diagnostics.watch import SDPA
from foundry_kernels.models import EncoderDecoder, ModelConfig, Transformer

#: Families that differ in what attention sees: shared heads, windows, a cap, sinks, ALiBi, fused projections, encoders.
FAMILIES = ("llama", "mistral", "gemma2", "gpt_oss", "phi3", "gpt2", "bloom", "falcon", "gpt_neox")


def recorded(model: nn.Module, call: Callable[[], Tensor], *, exact: bool = True) -> Health:
    """The health of a call and of a backward pass; the model computes what it does without, and is left as it was."""
    expected = call()
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    with record(model) as recorder:
        found = call()
        if found.requires_grad:
            (found.float() ** 2).mean().backward()
    assert torch.equal(found, expected) if exact else torch.allclose(found, expected, atol=1e-5)
    assert torch.equal(call(), expected)
    assert sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()) == hooks
    return recorder.health()


def entropies(weights: Tensor) -> list[float]:
    """Of ``[B, H, T, S]``, as a fraction of the largest, where every key that is seen has a weight."""
    weights = weights.double()
    seen = (weights > 0).sum(-1).clamp_min(1)
    return (torch.special.entr(weights).sum((0, 2, 3)) / seen.log().sum((0, 2))).tolist()


# --- transformers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_of_transformers_patched_or_not(family: str) -> None:
    """A batch with padding: of eager attention, SDPA and the kernels the same; entropies are those of the weights."""
    pytest.importorskip("transformers")
    from foundry_kernels.integrations.adapters.tiny import tiny_model

    model: Any = tiny_model(family)
    tokens = torch.randint(3, 128, (2, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    found = {}
    own = family in ("gemma2", "gpt_oss", "bloom")  # which have no other attention than "eager"
    for kind in ("eager",) if own else ("eager", "sdpa"):
        if family not in ("bloom", "falcon"):
            model.set_attn_implementation(kind)
        found[kind] = recorded(model, lambda: model(tokens, attention_mask=mask).logits)
    if family not in ("gpt_oss", "falcon"):  # whose weights leave out what went to the sink; whose SDPA returns none
        model.set_attn_implementation("eager") if family != "bloom" else None
        weights = model(tokens, attention_mask=mask, output_attentions=True).attentions
        for layer, of_layer in zip(found["eager"].layers, weights, strict=True):
            of_tokens = of_layer.detach() * mask[:, None, :, None]  # a query that is padding sees nothing
            assert layer.entropy == pytest.approx(entropies(of_tokens), rel=1e-3, abs=1e-4)
    if not own and family != "falcon":
        model.set_attn_implementation("sdpa")
    model.zero_grad()
    with fk.patch(model):
        found["patched"] = recorded(model, lambda: model(tokens, attention_mask=mask).logits)
    for first, second in itertools.pairwise(found.values()):
        for a, b in zip(first.layers, second.layers, strict=True):
            assert a.name == b.name
            assert a.entropy == pytest.approx(b.entropy, rel=1e-3, abs=1e-5)
            if family != "bloom":  # whose own ALiBi is counted from the first key
                assert a.max_logit == pytest.approx(b.max_logit, rel=1e-3, abs=1e-4)
            assert a.qk_rank == pytest.approx(b.qk_rank, rel=1e-3)
            assert None not in (a.gradient_norm, a.attention_gradient_norm, a.feed_forward_gradient_norm)
    assert all(
        layer.qk_rank_of == ("activations" if family == "falcon" else "weights") for layer in found["eager"].layers
    )


def test_encoders_and_cross_attention_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    shape = {"d_model": 32, "d_kv": 8, "num_layers": 2, "num_heads": 4, "d_ff": 64, "vocab_size": 64}
    tokens = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(0))
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**shape, attn_implementation="eager")).eval()
    health = recorded(model, lambda: model(input_ids=tokens, decoder_input_ids=tokens[:, :7]).logits)
    assert [layer.name for layer in health.layers] == [
        *(f"encoder.block.{n}.layer.0.SelfAttention" for n in range(2)),
        *(f"decoder.block.{n}.layer.{x}" for n in range(2) for x in ("0.SelfAttention", "1.EncDecAttention")),
    ]
    weights = model(input_ids=tokens, decoder_input_ids=tokens[:, :7], output_attentions=True)
    each = (*weights.encoder_attentions, weights.decoder_attentions[0], weights.cross_attentions[0])
    for layer, of_layer in zip(health.layers, each, strict=False):
        assert layer.entropy == pytest.approx(entropies(of_layer.detach()), rel=1e-3)
    block = model.decoder.block[1]
    norms = [math.sqrt(sum(float(p.grad.square().sum()) for p in part.parameters())) for part in (block, *block.layer)]
    last = health.layers[-1]
    parts = last.gradient_norm, last.attention_gradient_norm, last.feed_forward_gradient_norm
    assert parts == pytest.approx((norms[0], norms[2], norms[3]), rel=1e-4)


# --- torch.nn and one's own -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("patched", [False, True], ids=["plain", "patched"])
def test_layers_of_torch(patched: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x, padding = torch.randn(2, 9, 32), torch.zeros(2, 9, dtype=torch.bool)
    padding[0, 6:] = True
    maps: list[Tensor] = []
    y = x
    for block in model.layers:  # what torch returns of the same weights
        z = block.norm1(y)
        maps.append(block.self_attn(z, z, z, padding, average_attn_weights=False)[1].detach())
        y = block(y, src_key_padding_mask=padding)
    if patched:
        fk.patch(model)
    health = recorded(model, lambda: model(x, src_key_padding_mask=padding))
    for block, of_layer, weights in zip(model.layers, health.layers, maps, strict=True):
        assert of_layer.entropy == pytest.approx(entropies(weights), rel=1e-3)
        q, k, _ = block.self_attn.in_proj_weight.detach().chunk(3)
        ranks = product_ranks(q.view(4, 8, 32), k.view(4, 8, 32), 4)
        assert of_layer.qk_rank == pytest.approx(ranks.tolist())
        assert of_layer.most_ranks == 18
    with torch.inference_mode():  # torch's fused inference has no attention that could be seen
        found = recorded(model.eval(), lambda: model(x), exact=False)
    assert len(found.layers) == 2


class Scored(nn.Module):
    """Attention by hand, or by SDPA, under no name that says so."""

    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.by_hand = by_hand
        self.one, self.n_head = nn.Linear(32, 96), 4
        if by_hand:
            self.c_attn = self.one

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.one(x).chunk(3, -1))
        if not self.by_hand:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        weights = ((q @ k.mT) / math.sqrt(8)).masked_fill(later, -math.inf).softmax(-1)
        return (weights @ v).transpose(1, 2).flatten(2)


class Block(nn.Module):
    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.mix, self.feed = Scored(by_hand), nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(x)
        return x + self.feed(x)


@pytest.mark.parametrize("by_hand", [False, True], ids=["sdpa", "by hand"])
@pytest.mark.parametrize("how", ["eager", "compiled", "checkpointed"])
def test_a_model_of_ones_own(by_hand: bool, how: str) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(Block(by_hand), Block(by_hand))
    x = torch.randn(2, 10, 32, requires_grad=True)
    call: Callable[[], Tensor] = lambda: model(x)  # noqa: E731
    if how == "compiled":
        model.compile(backend="eager")
    elif how == "checkpointed":
        call = lambda: torch.utils.checkpoint.checkpoint_sequential(model, 2, x, use_reentrant=False)  # noqa: E731
    health = recorded(model, call)
    if how == "checkpointed":  # each part is a forward pass of its own
        assert [layer.name for layer in health.layers] == ["1.mix"]
        return
    assert [layer.name for layer in health.layers] == ["0.mix", "1.mix"]
    q, k, _ = (t.unflatten(-1, (4, 8)).transpose(1, 2).detach() for t in model[0].mix.one(x).chunk(3, -1))
    later = torch.ones(10, 10, dtype=torch.bool).triu(1)
    scores = ((q @ k.mT) / math.sqrt(8)).masked_fill(later, -math.inf)
    first = health.layers[0]
    assert first.entropy == pytest.approx(entropies(scores.softmax(-1)), rel=1e-4)
    assert first.max_logit == pytest.approx(scores.amax((0, 2, 3)).tolist(), rel=1e-4)
    if by_hand:
        weights = [w.unflatten(0, (4, 8)) for w in model[0].mix.one.weight.detach().chunk(3)]
        products = [a.T @ b for a, b in zip(*weights[:2], strict=True)]
        assert first.qk_rank == pytest.approx([effective_rank(p).item() for p in products], rel=1e-4)
    else:
        assert first.qk_rank_of == "activations"
        rows = [t.transpose(0, 1).flatten(1, 2) for t in (q, k)]
        products = [a @ b.T for a, b in zip(*rows, strict=True)]
        assert first.qk_rank == pytest.approx([effective_rank(p).item() for p in products], rel=1e-3)
    with torch.inference_mode():  # in which SDPA and softmax come as they are called
        again = recorded(model, call).layers[0]
    assert again.entropy == pytest.approx(first.entropy)
    assert again.qk_rank == pytest.approx(first.qk_rank, rel=1e-4)
    grads = [p.grad for p in model[0].mix.parameters()]
    assert first.attention_gradient_norm == pytest.approx(nn.utils.get_total_norm(grads).item())
    grads = [p.grad for p in model[0].feed.parameters()]
    assert first.feed_forward_gradient_norm == pytest.approx(nn.utils.get_total_norm(grads).item())


def test_an_error_in_the_model_leaves_nothing_behind() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block(False), Block(False))
    x = torch.randn(2, 10, 32)
    with record(model) as recorder:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(x[..., :9])
        model(x)
    assert [layer.name for layer in recorder.health().layers] == ["0.mix", "1.mix"]
    with pytest.raises(KeyError), record(model):
        raise KeyError
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert torch.backends.mha.get_fastpath_enabled()


def test_one_key_is_no_collapse() -> None:
    model = Transformer(ModelConfig(dim=16, n_layers=1, n_heads=2, vocab_size=32, max_seq_len=80))
    with record(model) as recorder:
        model(torch.tensor([[1]]))
    [layer] = recorder.health().layers
    assert layer.entropy == [1.0, 1.0]


def test_models_without_attention_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1))
    with record(model) as recorder:
        model(torch.ones(2, 3, 4))
    with pytest.raises(RuntimeError, match=r"no attention was recognised in Sequential.*q_proj/k_proj"):
        recorder.health()
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module; got list"), record([]):  # type: ignore[arg-type]
        pass


# --- our own ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "backend"),
    [
        *itertools.product(["mask", "bias", "tiles", "lengths", "packed", "window"], ["reference", "auto"]),
        ("packed", "triton"),
    ],
)
def test_entropies_are_compared_with_the_keys_that_are_seen(how: str, backend: str) -> None:
    """Keys alike, so that every row attends to all that it sees alike: the largest entropy, whatever is masked."""
    torch.manual_seed(0)
    window = 5 if how == "window" else None
    config = ModelConfig(dim=16, n_layers=1, n_heads=2, vocab_size=32, max_seq_len=80, sliding_window=window)
    model = Transformer(config, {"flash_attention": backend})
    nn.init.zeros_(model.layers[0].attention.wk.weight)
    tokens = torch.randint(32, (2, 70))
    seen = torch.rand(70, 70) < 0.5
    given: dict[str, Any] = {
        "mask": {"attn_mask": seen},
        "bias": {"attn_mask": torch.zeros(2, 1, 70, 70).masked_fill(~seen, -math.inf)},
        "tiles": {"attn_mask": fk.AttentionMask(seen[None, None])},
        "lengths": {"lengths": torch.tensor([3, 70])},
        "packed": {"cu_seqlens": torch.tensor([0, 3, 40, 70])},
        "window": {},
    }[how]
    tokens = tokens[:1] if how == "packed" else tokens
    with record(model) as recorder:
        model(tokens, **given)
    [layer] = recorder.health().layers
    assert layer.entropy == pytest.approx([1.0, 1.0], abs=1e-5)
    assert layer.max_logit == pytest.approx([0.0, 0.0], abs=1e-6)


def test_an_encoder_and_a_decoder() -> None:
    torch.manual_seed(0)
    shape = {"dim": 32, "n_layers": 2, "n_heads": 4, "vocab_size": 64, "max_seq_len": 32}
    model = EncoderDecoder(ModelConfig(**shape, context_dim=32), ModelConfig(**shape, causal=False, head=False))
    tokens = torch.randint(64, (2, 9))
    health = recorded(model, lambda: model(tokens, tokens[:, :5]))
    names = [layer.name for layer in health.layers]
    assert len(names) == 6
    assert [name for name in names if "cross_attention" in name] == names[3::2]


def test_what_sdpa_comes_down_to_is_read_by_name() -> None:
    """The operators of every device, of which the CPU has one."""
    assert len(SDPA) == 5
    for packet in SDPA:
        schema = packet.default._schema
        names = [argument.name for argument in schema.arguments]
        assert names[:3] == ["query", "key", "value"]
        assert {"is_causal", "scale"} <= set(names)
        assert len({"attn_mask", "attn_bias"} & set(names)) == (0 if packet.__name__.endswith("flash_attention") else 1)


def test_statistics_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of scores and of queries, in blocks of one row: those of the whole matrix."""
    from foundry_kernels.diagnostics import statistics

    torch.manual_seed(0)
    q, k = torch.randn(2, 4, 7, 8), torch.randn(2, 2, 11, 8)
    scores = (q.unflatten(1, (2, 2)) @ k[:, :, None].mT).flatten(1, 2) * 0.5
    mask = (torch.rand(2, 1, 7, 11) < 0.6) & torch.ones(7, 11, dtype=torch.bool).tril()
    mask[0, 0, 3] = False
    scores = scores.masked_fill(~mask, -math.inf)
    whole = of_scores(scores)
    monkeypatch.setattr(statistics, "_BLOCK", 1)
    for rows in (of_scores(scores), of_queries(q, k, mask, True, 0.5), whole):
        weights = scores.softmax(-1).nan_to_num(0.0)
        torch.testing.assert_close(rows.entropy, torch.special.entr(weights).sum((0, 2, 3)))
        torch.testing.assert_close(rows.max_logit, scores.amax((0, 2, 3)))
        assert rows.fraction().tolist() == pytest.approx(entropies(weights), rel=1e-5)
    half = of_queries(q.bfloat16(), k.bfloat16(), None, False, None)
    full = of_queries(q.bfloat16().float(), k.bfloat16().float(), None, False, None)
    torch.testing.assert_close(half.entropy, full.entropy)
