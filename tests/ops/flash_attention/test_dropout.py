"""Dropout of attention's weights: which are dropped, on every backend alike."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attention_inputs import inputs
from slow import rest_slow
from table import DEVICES
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import foundry_kernels as fk
from foundry_kernels.core.dropout import philox4x32
from foundry_kernels.ops.flash_attention import flash_attention, flash_attention_varlen
from foundry_kernels.ops.flash_attention.dropout import keep_mask, keep_pairs, keep_scale, threshold

DEVICE = DEVICES[-1]
over_backends = pytest.mark.parametrize("backend", fk.OPS["flash_attention"].backends(DEVICE))


def weights(shape: tuple[int, int, int, int], backend: str, **options: Any) -> Tensor:
    """The weights of attention ``[B, H, T, S]``, equal ones before dropout, read out by unit vectors."""
    b, h, t, s = shape
    q, k = torch.zeros(b, h, t, 16, device=DEVICE), torch.zeros(b, h, s, 16, device=DEVICE)
    found = []
    for first in range(0, s, 128):
        v = torch.zeros(s, 128, device=DEVICE)
        v[first : first + 128] = torch.eye(128, device=DEVICE)[: s - first]
        out = flash_attention(q, k, v.expand(b, h, s, 128), backend=backend, **options)
        found.append(out[..., : s - first])
    return torch.cat(found, -1) * s


@over_backends
@pytest.mark.parametrize(
    "shape", rest_slow([(1, 2, 33, 65), (2, 2, 1, 300), (2, 3, 70, 150), (1, 1, 5, 40)], 2), ids=str
)
def test_every_backend_drops_what_the_mask_says(backend: str, shape: tuple[int, int, int, int]) -> None:
    seed = torch.tensor(2**41 + 5)
    kept = keep_mask(shape, 0.3, seed).to(DEVICE)
    found = weights(shape, backend, dropout_p=0.3, dropout_seed=seed.to(DEVICE))
    assert torch.equal(found != 0, kept)
    torch.testing.assert_close(found[kept], torch.full_like(found[kept], keep_scale(0.3)), rtol=1e-5, atol=0.0)


def test_the_mask_by_its_definition() -> None:
    """One pair at a time, by the counter, word and half that the docstring names."""
    seed, p = 2**40 + 3, 0.25
    mask = keep_mask((2, 3, 40, 70), p, torch.tensor(seed))
    key = (torch.tensor(seed & 0xFFFFFFFF), torch.tensor(seed >> 32))
    for n, h, i, j in ((0, 0, 0, 0), (1, 2, 39, 69), (1, 0, 8, 31), (0, 1, 17, 32), (1, 1, 15, 15), (0, 2, 24, 47)):
        counter = (j // 32 * 8 + j % 8, i // 16 * 8 + i % 8, h, n)
        word = philox4x32(tuple(map(torch.tensor, counter)), key)[j // 8 % 4].item()  # type: ignore[arg-type]
        assert mask[n, h, i, j].item() == ((word >> 16 * (i // 8 % 2) & 0xFFFF) >= p * 65536)


def test_any_pairs() -> None:
    i, j = torch.arange(40)[:, None], torch.arange(70)
    h, n = torch.arange(3)[:, None, None], torch.arange(2)[:, None, None, None]
    seed = torch.tensor(9)
    assert torch.equal(keep_pairs(i, j, h, n, 0.4, seed), keep_mask((2, 3, 40, 70), 0.4, seed))


@pytest.mark.parametrize("p", [1e-9, 0.1, 0.5, 0.9, 1 - 1e-12])
def test_the_expectation_is_exact(p: float) -> None:
    """What is kept, times the scale, is 1 on average over all 2^16 numbers; p is off by half a number at most."""
    assert (65536 - threshold(p)) / 65536 * keep_scale(p) == pytest.approx(1.0, rel=1e-7)
    assert abs(threshold(p) / 65536 - p) <= 2**-16
    assert threshold(0.1) == 6554


def test_as_many_are_dropped_as_should_be() -> None:
    """In all, in every row and column, and together with their neighbours: five standard deviations at most."""
    p = 0.2
    kept = keep_mask((4, 8, 128, 256), p, torch.tensor(77)).double()

    def check(mean: Tensor, expected: float, n: int, variance: float) -> None:
        assert (mean - expected).abs().max() < 5.5 * math.sqrt(variance / n), mean

    check(kept.mean(), 1 - p, kept.numel(), p * (1 - p))
    check(kept.mean((0, 1, 2)), 1 - p, 4 * 8 * 128, p * (1 - p))
    check(kept.mean((0, 1, 3)), 1 - p, 4 * 8 * 256, p * (1 - p))
    both = (1 - p) ** 2
    for dim in range(4):
        for step in (1, 2, 8, 16, 32):
            if step < kept.shape[dim]:
                pairs = kept.narrow(dim, step, kept.shape[dim] - step) * kept.narrow(dim, 0, kept.shape[dim] - step)
                check(pairs.mean(), both, pairs.numel(), both * (1 - both) * 3)


@over_backends
def test_the_backward_pass_drops_the_same(backend: str) -> None:
    """The output is linear in v: its gradient is what the forward pass makes of unit vectors."""
    seed = torch.tensor(11, device=DEVICE)
    w = weights((1, 2, 70, 90), backend, dropout_p=0.4, dropout_seed=seed) / 90
    q, k = torch.zeros(1, 2, 70, 16, device=DEVICE), torch.zeros(1, 2, 90, 16, device=DEVICE)
    v, g = torch.randn(1, 2, 90, 16, device=DEVICE, requires_grad=True), torch.randn(1, 2, 70, 16, device=DEVICE)
    out = flash_attention(q, k, v, dropout_p=0.4, dropout_seed=seed, backend=backend)
    (dv,) = torch.autograd.grad(out, v, g)
    torch.testing.assert_close(dv, w.mT @ g, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(out, w @ v, rtol=1e-4, atol=1e-5)


@over_backends
def test_packed_sequences_drop_what_rows_of_a_batch_do(backend: str) -> None:
    torch.manual_seed(0)
    lengths = (17, 70, 33)
    q, k, v = (torch.randn(3, h, 70, 16, device=DEVICE) for h in (4, 2, 2))
    cu_seqlens = torch.tensor([0, 17, 87, 120], dtype=torch.int32, device=DEVICE)
    options: dict[str, Any] = {"dropout_p": 0.3, "dropout_seed": 8, "backend": backend}
    packed = [torch.cat([x[n, :, :t].transpose(0, 1) for n, t in enumerate(lengths)]) for x in (q, k, v)]
    found = flash_attention_varlen(*packed, cu_seqlens, cu_seqlens, 70, 70, **options)
    lens = torch.tensor(lengths, device=DEVICE)
    padded = flash_attention(q, k, v, attn_mask=fk.AttentionMask.prefix(lens), **options)
    expected = torch.cat([padded[n, :, :t].transpose(0, 1) for n, t in enumerate(lengths)])
    torch.testing.assert_close(found, expected)


@over_backends
def test_seeds(backend: str) -> None:
    q, k, v = (x.detach().float().to(DEVICE) for x in inputs(20, 30))

    def attend(**options: Any) -> Tensor:
        return flash_attention(q, k, v, dropout_p=0.5, backend=backend, **options)

    torch.manual_seed(4)
    first, second = attend(), attend()
    torch.manual_seed(4)
    assert torch.equal(attend(), first)
    assert not torch.equal(first, second)
    assert torch.equal(attend(dropout_seed=6), attend(dropout_seed=torch.tensor([6], device=DEVICE)))
    assert not torch.equal(attend(dropout_seed=6), attend(dropout_seed=6 + 2**32))
    whole = flash_attention(q, k, v, backend=backend)
    assert torch.equal(flash_attention(q, k, v, dropout_p=0.0, dropout_seed=6, backend=backend), whole)


@over_backends
def test_statistics_are_those_before(backend: str) -> None:
    q, k, v = (x.detach().float().to(DEVICE) for x in inputs(20, 30))
    options: dict[str, Any] = {"return_lse": True, "return_stats": True, "backend": backend}
    _, *plain = flash_attention(q, k, v, **options)
    _, *dropped = flash_attention(q, k, v, dropout_p=0.5, dropout_seed=1, **options)
    assert all(torch.equal(a, b) for a, b in zip(plain, dropped, strict=True))


@over_backends
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_makes_the_same_again(backend: str, reentrant: bool) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attention(q, k, v, dropout_p=0.3, backend=backend)

    q, k, v = (x.detach().float().to(DEVICE).requires_grad_() for x in inputs(20, 30))
    found = []
    for call in (attend, lambda *args: checkpoint(attend, *args, use_reentrant=reentrant)):
        torch.manual_seed(9)
        out = call(q, k, v)
        out.square().sum().backward()  # which a reentrant checkpoint needs
        found.append((out, *(x.grad for x in (q, k, v))))
        q.grad = k.grad = v.grad = None
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
