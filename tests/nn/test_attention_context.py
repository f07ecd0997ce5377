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
