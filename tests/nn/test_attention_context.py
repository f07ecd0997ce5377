"""Attention to a context: against torch's multi-head attention, keys and values made once, lengths, refusals."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import foundry_kernels as fk
from foundry_kernels.nn.relative import relative_buckets

BACKENDS = ("reference", *(("native",) if "native" in fk.OPS["flash_attention"].backends("cpu") else ()))
over_backends = pytest.mark.parametrize("backend", BACKENDS)
LENGTHS = torch.tensor([9, 4, 1])


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def attention(backend: str = "reference", **options) -> fk.nn.Attention:
    torch.manual_seed(0)
    return fk.nn.Attention(16, 4, backend={"flash_attention": backend}, **options)


@over_backends
@pytest.mark.parametrize("context_dim", [None, 12])
def test_outputs_and_gradients_are_those_of_torch(backend, context_dim):
    ours = attention(backend, bias=True, context_dim=context_dim)
    width = context_dim or 16
    theirs = nn.MultiheadAttention(16, 4, kdim=width, vdim=width, batch_first=True)
    theirs._qkv_same_embed_dim = False  # one matrix for each
    theirs.q_proj_weight, theirs.k_proj_weight, theirs.v_proj_weight = ours.wq.weight, ours.wk.weight, ours.wv.weight
    theirs.in_proj_bias = nn.Parameter(torch.cat([ours.wq.bias, ours.wk.bias, ours.wv.bias]).detach())
    theirs.out_proj = ours.wo
    x, context = normal(3, 7, 16).requires_grad_(), normal(3, 9, width, seed=1).requires_grad_()
    padding = torch.arange(9) >= LENGTHS[:, None]
    expected, _ = theirs(x, context, context, key_padding_mask=padding, need_weights=False)
    actual = ours(x, context=context, context_lengths=LENGTHS)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    dout, leaves = normal(3, 7, 16, seed=2), [x, context, *(w.weight for w in (ours.wq, ours.wk, ours.wv, ours.wo))]
    found = [torch.autograd.grad(y, leaves, dout) for y in (actual, expected)]
    for a, e in zip(*found, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-5)


@over_backends
@pytest.mark.parametrize(
    "options", [{}, {"n_kv_heads": 2, "qk_norm": True}, {"qk_norm": True, "qk_norm_over": "projection", "scale": 0.3}]
)
def test_keys_and_values_are_made_once_for_many_calls(backend, options):
    ours, x, context = attention(backend, **options), normal(3, 7, 16), normal(3, 9, 16, seed=1).requires_grad_()
    calls = []
    ours.wk.register_forward_hook(lambda *_: calls.append(1))
    whole, lse = ours(x, context=context, context_lengths=LENGTHS, return_lse=True)
    kept = ours.keys_values(context)
    parts = [ours(part, context=kept, context_lengths=LENGTHS, return_lse=True) for part in x.split((1, 5, 1), 1)]
    assert len(calls) == 2
    torch.testing.assert_close(torch.cat([y for y, _ in parts], 1), whole, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.cat([rows for _, rows in parts], 2), lse, rtol=1e-4, atol=1e-5)
    first, second = (torch.autograd.grad(y.sum(), context)[0] for y in (whole, sum(y.sum() for y, _ in parts)))
    torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-5)


@over_backends
def test_masks_of_a_context(backend):
    ours, x, context = attention(backend), normal(3, 7, 16), normal(3, 9, 16, seed=1)
    seen = normal(7, 9, seed=3) > -0.5
    both = seen & (torch.arange(9) < LENGTHS[:, None, None, None])
    expected = ours(x, context=context, attn_mask=both)
    for mask in (seen, fk.AttentionMask(seen), torch.zeros(7, 9).masked_fill(~seen, -torch.inf)):
        actual = ours(x, context=context, attn_mask=mask, context_lengths=LENGTHS)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_queries_of_one_token_and_compiled():
    ours, context = attention("auto"), normal(2, 9, 16)
    kept, x = ours.keys_values(context), normal(2, 1, 16, seed=1)
    expected = attention()(x, context=context)
    torch.testing.assert_close(ours(x, context=kept), expected, rtol=1e-4, atol=1e-5)
    compiled = torch.compile(ours, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x, context=kept), expected, rtol=1e-4, atol=1e-5)


X, CONTEXT = normal(2, 3, 16), normal(2, 5, 16)


@pytest.mark.parametrize(
    ("options", "arguments", "message"),
    [
        ({}, {"context": CONTEXT[:1]}, "context must have x's batch of 2; got 1"),
        ({}, {"context": CONTEXT[..., :4]}, r"context must have context_dim=16 as its last dimension; got \(2, 5, 4\)"),
        ({}, {"context": CONTEXT[0]}, r"context must be \[B, S, 16\]; got shape \(5, 16\)"),
        ({}, {"context_lengths": torch.tensor([1, 2])}, "context_lengths needs a context"),
        ({}, {"context": CONTEXT, "context_lengths": torch.tensor([1])}, r"context_lengths must have shape \(2,\)"),
        ({}, {"context": CONTEXT, "lengths": torch.tensor([1, 2])}, "context and lengths exclude each other"),
        ({}, {"context": CONTEXT, "positions": 3}, "context and positions exclude each other"),
        ({}, {"context": CONTEXT, "attn_mask": torch.ones(3, 3)}, r"attn_mask must broadcast to .* = \(2, 4, 3, 5\)"),
        ({"sliding_window": 2}, {"context": CONTEXT}, "context needs sliding_window=None"),
        ({"rope": fk.nn.RotaryEmbedding(4, 8)}, {"context": CONTEXT}, "context needs rope=None"),
        ({"alibi": fk.nn.AlibiSlopes(4)}, {"context": CONTEXT}, "context needs alibi=None"),
        ({"context_dim": 8}, {}, "context must be given: keys are made of width 8, x has 16"),
        ({"scale": 0.0}, {}, "scale must be finite and > 0; got 0"),
        ({"qk_norm_over": "tokens"}, {}, "qk_norm_over must be one of head, projection; got 'tokens'"),
    ],
)
def test_what_is_refused_by_name(options, arguments, message):
    with pytest.raises(ValueError, match=message):
        attention(**options)(X, **arguments)


def test_kinds_of_context():
    with pytest.raises(TypeError, match=r"context must be a torch\.Tensor; got list"):
        attention()(X, context=[1])
    with pytest.raises(TypeError, match="context_lengths must be int32 or int64"):
        attention()(X, context=CONTEXT, context_lengths=torch.ones(2))


# --- relative positions -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("buckets", "max_distance"), [(32, 128), (8, 20), (4, 3)])
def test_buckets_are_those_of_t5(causal, buckets, max_distance):
    modeling = pytest.importorskip("transformers.models.t5.modeling_t5")
    distances = torch.arange(-300, 301)
    expected = modeling.T5Attention._relative_position_bucket(distances, not causal, buckets, max_distance)
    assert torch.equal(relative_buckets(distances, buckets, max_distance, causal), expected)


def test_a_relative_bias_is_the_weight_of_each_distance():
    """Of the last queries, as with a cache; its gradient is summed over what has the same bucket."""
    bias = fk.nn.RelativeBias(3, 8, 5, causal=False)
    distances = torch.arange(6) - torch.arange(6)[:, None]
    expected = bias.weight[relative_buckets(distances, 8, 5, False)].permute(2, 0, 1)[None]
    assert torch.equal(bias(6, 6), expected)
    assert torch.equal(bias(2, 6), expected[:, :, 4:])
    dout = normal(1, 3, 6, 6)
    found = [torch.autograd.grad(y, bias.weight, dout)[0] for y in (bias(6, 6), expected)]
    torch.testing.assert_close(*found)
    for options, message in (
        ((4, 6), "buckets must be a multiple of 4 in both directions; got 6"),
        ((4, 8, 2), "max_distance must be above 2, half of a direction's buckets; got 2"),
    ):
        with pytest.raises(ValueError, match=message):
            fk.nn.RelativeBias(*options, causal=False)
