"""Models with masks, padding and packed sequences: what each sequence gets is what it gets alone."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch
from tiny_model import EVERY, config, draw, make
from torch.utils.checkpoint import checkpoint

import foundry_kernels as fk

BACKENDS = ("reference", *(("native",) if "native" in fk.OPS["flash_attention"].backends("cpu") else ()))
over_backends = pytest.mark.parametrize("backend", BACKENDS)

LENGTHS = torch.tensor([7, 4, 1])
STARTS = torch.tensor([0, 7, 11, 12], dtype=torch.int32)


def sequences(tokens):
    return [row[None, :n] for row, n in zip(tokens, LENGTHS.tolist(), strict=True)]


def targets_of(tokens):
    """What follows each token in its own sequence."""
    return torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=-100)


@over_backends
@pytest.mark.parametrize("name", EVERY)
def test_padded_and_packed_sequences_are_computed_as_each_alone(name, backend):
    model, tokens = make(EVERY[name], {"flash_attention": backend}).eval(), draw()
    alone = torch.cat([model(each)[0] for each in sequences(tokens)])
    padded = model(tokens, lengths=LENGTHS)
    kept = torch.cat([row[:n] for row, n in zip(padded, LENGTHS.tolist(), strict=True)])
    torch.testing.assert_close(kept, alone, rtol=1e-4, atol=1e-4)
    for options in ({}, {"max_seqlen": 7}) if name != "t5" else ():  # whose bias packed tokens have no place in
        packed = model(torch.cat(sequences(tokens), 1), cu_seqlens=STARTS, **options)
        torch.testing.assert_close(packed[0], alone, rtol=1e-4, atol=1e-4)


@over_backends
@pytest.mark.parametrize("name", ["gpt2", "neox", "vaswani", "bloom"])
def test_loss_and_gradients_of_a_packed_batch_are_those_of_a_padded_one(name, backend):
    found = []
    for packed in (True, False):
        model, tokens = make(config(name), {"flash_attention": backend}), draw()
        if packed:
            parts = sequences(tokens)
            targets = torch.cat([targets_of(each) for each in parts], 1)
            _, loss = model(torch.cat(parts, 1), targets, cu_seqlens=STARTS)
        else:
            hidden = torch.arange(7) >= LENGTHS[:, None]
            targets = targets_of(tokens.masked_fill(hidden, -100))
            _, loss = model(tokens, targets, lengths=LENGTHS)
        loss.backward()
        found.append((loss, *(p.grad for p in model.parameters())))
    for a, e in zip(*found, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "neox", "vaswani"])
def test_more_packed_tokens_than_positions(name):
    model, tokens = make(config(name)), draw(3, 20)
    packed = model(tokens.view(1, 60), cu_seqlens=torch.tensor([0, 20, 40, 60]))
    torch.testing.assert_close(packed.view(3, 20, -1), model(tokens), rtol=1e-4, atol=1e-4)


@over_backends
@pytest.mark.parametrize("name", ["gpt2", "neox", "post-rms", "experts"])
def test_what_a_mask_hides_does_not_matter(name, backend):
    """Token 2 is hidden from those behind it: by a bool mask, by tiles, by a bias of -inf, and from all layers."""
    model, tokens = make(config(name), {"flash_attention": backend}), draw()
    other = tokens.clone()
    other[:, 2] = (other[:, 2] + 1) % 11
    seen = torch.ones(7, 7, dtype=torch.bool)
    seen[3:, 2] = False
    rest = [0, 1, 3, 4, 5, 6]
    plain = model(tokens)
    assert not torch.allclose(model(other)[:, 3:], plain[:, 3:])
    masks = (seen, fk.AttentionMask(seen), torch.zeros(7, 7).masked_fill(~seen, -torch.inf))
    found = [[model(each, attn_mask=mask) for each in (tokens, other)] for mask in masks]
    for first, second in found:
        torch.testing.assert_close(first[:, rest], second[:, rest])
        torch.testing.assert_close(first, found[0][0])
    torch.testing.assert_close(found[0][0][:, :3], plain[:, :3])


@over_backends
@pytest.mark.parametrize("reentrant", [None, True, False], ids=["plain", "reentrant", "not reentrant"])
@pytest.mark.parametrize("name", ["gpt2", "neox", "post-rms"])
def test_a_learned_bias_gets_its_gradient_from_all_layers(name, reentrant, backend):
    """As central differences of the loss have it, in one direction; checkpointed too, and with lengths."""
    model, tokens = make(config(name), {"flash_attention": backend}), draw()
    if reentrant is not None:
        for block in model.layers:
            block.forward = partial(checkpoint, block.forward, use_reentrant=reentrant)
    bias = torch.randn(1, model.config.n_heads, 7, 7, generator=torch.Generator().manual_seed(0)).requires_grad_()
    direction = torch.randn(bias.shape, generator=torch.Generator().manual_seed(1))
    options = {"lengths": torch.tensor([7, 5, 6])}
    model(tokens, tokens, attn_mask=bias, **options)[1].backward()
    model = make(config(name), dtype=torch.float64)
    with torch.no_grad():
        step = 1e-5
        up, down = (model(tokens, tokens, attn_mask=bias.double() + sign * step * direction, **options)[1]
                    for sign in (1, -1))  # fmt: skip
    expected = (up - down) / (2 * step)
    torch.testing.assert_close((bias.grad * direction).sum().double(), expected, rtol=1e-3, atol=1e-6)


@over_backends
@torch.no_grad()
def test_lengths_and_masks_with_a_cache(backend):
    """A prompt with padding at its end, read in two parts; its mask counts the positions in the cache."""
    model, tokens, lengths = make(config("neox"), {"flash_attention": backend}), draw(), torch.tensor([7, 4, 6])
    whole, cache = model(tokens, lengths=lengths), model.make_cache(3)
    parts = [model(part, cache=cache, lengths=lengths) for part in tokens.split([5, 1, 1], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-4)
    seen, cache = torch.rand(3, 1, 7, 7, generator=torch.Generator().manual_seed(0)) > 0.3, model.make_cache(3)
    whole, parts = model(tokens, attn_mask=seen), []
    for begin, end in ((0, 5), (5, 6), (6, 7)):
        parts.append(model(tokens[:, begin:end], cache=cache, attn_mask=seen[:, :, begin:end, :end]))
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("n_layers", [1, pytest.param(config("neox").n_layers, marks=pytest.mark.slow)])
def test_masks_and_packed_sequences_compile_whole(n_layers):
    model, tokens = make(dataclasses.replace(config("neox"), n_layers=n_layers)), draw()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    seen = torch.ones(7, 7, dtype=torch.bool).tril()
    for options in (
        {"lengths": LENGTHS},
        {"attn_mask": seen},
        {"attn_mask": fk.AttentionMask(seen)},
        {"attn_mask": torch.randn(4, 7, 7), "lengths": LENGTHS},
    ):
        torch.testing.assert_close(compiled(tokens, **options), model(tokens, **options))
    options = {"cu_seqlens": torch.tensor([0, 5, 7])}
    torch.testing.assert_close(compiled(tokens[:1], **options), model(tokens[:1], **options))


TOKENS = draw(2, 6)
REFUSED = {
    "mask": ({"attn_mask": torch.ones(6, 5)}, ValueError, r"attn_mask must broadcast to .* = \(2, 4, 6, 6\)"),
    "kind of mask": ({"attn_mask": torch.ones(6, 6).long()}, TypeError, "attn_mask must be bool, float32"),
    "wide mask": ({"attn_mask": torch.ones(6, 6).double()}, TypeError, "attn_mask may be float64 only where the model"),
    "lengths": ({"lengths": torch.ones(3).long()}, ValueError, r"lengths must have shape \(2,\)"),
    "mask and starts": (
        {"attn_mask": torch.ones(6, 6), "cu_seqlens": torch.tensor([0, 6]), "tokens": TOKENS[:1]},
        ValueError,
        "attn_mask and cu_seqlens exclude each other",
    ),
    "lengths and starts": (
        {"lengths": torch.tensor([6]), "cu_seqlens": torch.tensor([0, 6]), "tokens": TOKENS[:1]},
        ValueError,
        "lengths and cu_seqlens exclude each other",
    ),
    "rows": ({"cu_seqlens": torch.tensor([0, 6])}, ValueError, r"tokens must be \[1, total\] with cu_seqlens"),
    "kind of starts": ({"cu_seqlens": torch.ones(2), "tokens": TOKENS[:1]}, TypeError, "cu_seqlens must be int32 or"),
    "rank of starts": ({"cu_seqlens": TOKENS, "tokens": TOKENS[:1]}, ValueError, r"cu_seqlens must be \[N \+ 1\]"),
    "device": (
        {"cu_seqlens": torch.ones(2, device="meta").long(), "tokens": TOKENS[:1]},
        ValueError,
        "cu_seqlens must be on tokens's device",
    ),
    "total": ({"cu_seqlens": torch.tensor([0, 5]), "tokens": TOKENS[:1]}, ValueError, "end at the 6 packed tokens"),
    "longest": (
        {"cu_seqlens": torch.tensor([0, 6]), "max_seqlen": 5, "tokens": TOKENS[:1]},
        ValueError,
        "max_seqlen must be at least the longest sequence, 6; got 5",
    ),
    "alone": ({"max_seqlen": 6}, ValueError, "max_seqlen needs cu_seqlens; got max_seqlen=6 alone"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_before_anything_is_computed(name, monkeypatch):
    options, error, message = REFUSED[name]
    model = make()
    monkeypatch.setattr(model.tok_embeddings, "forward", None)
    with pytest.raises(error, match=message):
        model(**{"tokens": TOKENS, **options})


@torch.no_grad()
def test_packed_sequences_have_no_cache():
    model = make()
    with pytest.raises(ValueError, match="cu_seqlens and cache exclude each other"):
        model(TOKENS[:1], cu_seqlens=torch.tensor([0, 6]), cache=model.make_cache(1))
