"""`nn.Attention` with masks, biases, padding and dropout: against plain matrices, cached, packed and compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from slow import rest_slow
from torch import Tensor

import foundry_kernels as fk
from foundry_kernels.nn import Attention, RotaryEmbedding
from foundry_kernels.ops.flash_attention.dropout import keep_mask, keep_scale

BACKENDS = ("reference", *(("native",) if "native" in fk.OPS["flash_attention"].backends("cpu") else ()))
over_backends = pytest.mark.parametrize("backend", BACKENDS)

B, H, T = 3, 4, 70  # more than a tile of a mask
LENGTHS = torch.tensor([70, 66, 3])


def make(backend: str = "reference", **options: Any) -> Attention:
    torch.manual_seed(0)
    return Attention(16, H, 2, rope=RotaryEmbedding(4, 128), backend={"flash_attention": backend}, **options)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def by_matrices(
    block: Attention, x: Tensor, added: Tensor | None = None, kept: Tensor | None = None, scale: float = 1.0
) -> Tensor:
    """Causal attention spelled out; `added` is what a score gets besides, -inf where a key is hidden."""

    def heads(linear: Any) -> Tensor:
        return linear(x).unflatten(-1, (-1, 4)).transpose(1, 2)

    assert block.rope is not None
    q, k = block.rope(heads(block.wq), heads(block.wk))
    k, v = (t.repeat_interleave(2, 1) for t in (k, heads(block.wv)))
    scores = q @ k.transpose(-1, -2) / 2.0
    if block.causal:
        scores = scores.masked_fill(torch.ones(x.shape[1], x.shape[1]).triu(1).bool(), -torch.inf)
    weights = (scores if added is None else scores + added).softmax(-1)
    weights = weights if kept is None else weights * kept * scale
    return block.wo((weights @ v).transpose(1, 2).flatten(2))


def minus_infinity(seen: Tensor) -> Tensor:
    return torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)


def some(*shape: int) -> Tensor:
    """A mask in which each query sees its first key."""
    mask = draw(*shape, seed=3) > -0.5
    mask[..., 0] = True
    return mask


BIAS = draw(1, H, T, T, seed=5)
PADDED = torch.arange(T) < LENGTHS[:, None, None, None]
MASKS: dict[str, tuple[dict[str, Any], Tensor]] = {
    "bool": ({"attn_mask": some(T, T)}, minus_infinity(some(T, T))),
    "of heads": ({"attn_mask": some(B, H, 1, T)}, minus_infinity(some(B, H, 1, T))),
    "tiles": ({"attn_mask": fk.AttentionMask(some(B, 1, T, T))}, minus_infinity(some(B, 1, T, T))),
    "bias": ({"attn_mask": BIAS}, BIAS),
    "lengths": ({"lengths": LENGTHS}, minus_infinity(PADDED)),
    "bool, lengths": ({"attn_mask": some(T, T), "lengths": LENGTHS.int()}, minus_infinity(some(T, T) & PADDED)),
    "tiles, lengths": (
        {"attn_mask": fk.AttentionMask(some(B, 1, T, T)), "lengths": LENGTHS},
        minus_infinity(some(B, 1, T, T) & PADDED),
    ),
    "bias, lengths": ({"attn_mask": BIAS, "lengths": LENGTHS}, BIAS + minus_infinity(PADDED)),
}


@over_backends
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("name", MASKS)
def test_masks_are_added_to_the_scores(name: str, causal: bool, backend: str) -> None:
    options, added = MASKS[name]
    block, x = make(backend, causal=causal), draw(B, T, 16).requires_grad_()
    found = []
    for y in (block(x, **options), by_matrices(block, x, added)):
        found.append((y, *torch.autograd.grad(y, [x, *block.parameters()], draw(B, T, 16, seed=1))))
    for actual, expected in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected, rtol=2e-4, atol=2e-5)


@over_backends
def test_a_bias_gets_its_gradient_behind_padding_too(backend: str) -> None:
    block, x = make(backend), draw(B, T, 16)
    grads = []
    for call in (lambda bias: block(x, attn_mask=bias, lengths=LENGTHS),
                 lambda bias: by_matrices(block, x, bias + minus_infinity(PADDED))):  # fmt: skip
        bias = BIAS.clone().requires_grad_()
        grads += torch.autograd.grad(call(bias), bias, draw(B, T, 16, seed=1))
    torch.testing.assert_close(*grads, rtol=2e-4, atol=2e-5)
    assert grads[0].shape == BIAS.shape


@over_backends
def test_a_sequence_of_no_length_gives_the_projection_of_zero(backend: str) -> None:
    block, x = make(backend, bias=True), draw(B, T, 16).requires_grad_()
    y, lse = block(x, lengths=torch.tensor([0, -3, 200]), return_lse=True)
    torch.testing.assert_close(y[:2], block.wo.bias.expand(2, T, 16))
    torch.testing.assert_close(y[2], block(x)[2])
    assert lse[:2].isneginf().all()
    assert torch.autograd.grad(y.sum(), x)[0].isfinite().all()


class Store:
    """Keys and values in tensors that grow."""

    def __init__(self) -> None:
        self.k = self.v = torch.empty(B, 2, 0, 4)

    @property
    def length(self) -> int:
        return self.k.shape[2]

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.k, self.v = torch.cat([self.k, k], 2), torch.cat([self.v, v], 2)
        return self.k, self.v


@over_backends
@torch.no_grad()
def test_keys_in_a_cache_count(backend: str) -> None:
    """The rows of a mask are the new queries; the columns, and lengths, are of all keys."""
    block, x = make(backend), draw(B, T, 16)
    mask, lengths = some(B, 1, T, T), torch.tensor([70, 69, 66])
    whole = block(x, attn_mask=mask, lengths=lengths)
    store, parts = Store(), []
    for begin, end in ((0, 60), (60, 69), (69, 70)):
        part = block(x[:, begin:end], cache=store, attn_mask=mask[:, :, begin:end, :end], lengths=lengths)
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-5)


# --- dropout ----------------------------------------------------------------------------------------------------------


@over_backends
def test_dropout_is_that_of_the_operation_with_a_seed_from_the_generator(backend: str) -> None:
    block, x = make(backend, dropout=0.25), draw(B, T, 16).requires_grad_()
    torch.manual_seed(7)
    kept = keep_mask((B, H, T, T), 0.25, torch.randint(2**63 - 1, ()))
    found = []
    for call in (lambda: block(x), lambda: by_matrices(block, x, None, kept, keep_scale(0.25))):
        torch.manual_seed(7)
        y = call()
        found.append((y, *torch.autograd.grad(y, [x, *block.parameters()], draw(B, T, 16, seed=1))))
    for actual, expected in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected, rtol=2e-4, atol=2e-5)
    torch.testing.assert_close(block.eval()(x), by_matrices(block, x), rtol=1e-4, atol=1e-5)


@over_backends
def test_packed_sequences_drop_what_a_padded_batch_does(backend: str) -> None:
    block, x = make(backend, dropout=0.5), draw(B, T, 16)
    packed = torch.cat([row[:n] for row, n in zip(x, LENGTHS.tolist(), strict=True)])[None]
    torch.manual_seed(1)
    padded = block(x, lengths=LENGTHS)
    torch.manual_seed(1)
    y = block(packed, cu_seqlens=torch.nn.functional.pad(LENGTHS.cumsum(0), (1, 0)), max_seqlen=T)
    expected = torch.cat([row[:n] for row, n in zip(padded, LENGTHS.tolist(), strict=True)])
    torch.testing.assert_close(y[0], expected, rtol=1e-4, atol=1e-5)


# --- compiled, plain, refused -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("backend", rest_slow(BACKENDS[::-1]))
def test_masks_compile(backend: str) -> None:
    block, x = make(backend), draw(B, T, 16)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    for name in ("bool", "tiles", "bias", "lengths", "bias, lengths"):
        torch.testing.assert_close(compiled(x, **MASKS[name][0]), block(x, **MASKS[name][0]))
