"""Attention: the reference against torch's own with explicit masks, rows without keys, packed sequences."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from attention_inputs import DV, HK, B, D, H, T, attend, attend_varlen, inputs
from torch import Tensor

import foundry_kernels as fk
from foundry_kernels.ops.flash_attention import FLASH_ATTENTION_VARLEN
from foundry_kernels.ops.flash_attention.cases import CASES
from foundry_kernels.testing import Case, call, make_cotangents


def seen(t: int, s: int, options: Mapping[str, Any]) -> Tensor:
    """Which query sees which key, pair by pair from the definition."""
    offset = s - t if options.get("align", "bottom_right") == "bottom_right" else 0
    left, right = options.get("window") or (None, None)
    mask = torch.zeros(t, s, dtype=torch.bool)
    for i in range(t):
        for j in range(s):
            rel_pos = j - (i + offset)
            mask[i, j] = not (
                (options.get("causal") and rel_pos > 0)
                or (left is not None and rel_pos < -left)
                or (right is not None and rel_pos > right)
            )
    return mask


WINDOWS = [None, (0, 0), (2, 1), (None, 1), (2, None), (None, None), (100, 100)]


@pytest.mark.parametrize("tokens", [(5, 5), (4, 9), (9, 4), (1, 6), (6, 1)], ids=lambda n: f"{n[0]}x{n[1]}")
@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("align", ["bottom_right", "top_left"])
def test_equals_torch_attention_with_the_mask(
    tokens: tuple[int, int], window: tuple[int | None, int | None] | None, causal: bool, align: str
) -> None:
    q, k, v = inputs(*tokens)
    options = {"causal": causal, "window": window, "align": align}
    mask = seen(*tokens, options)
    rows = mask.any(-1)
    out, lse = attend(q, k, v, **options, return_lse=True)
    repeated = [x.repeat_interleave(H // HK, 1) for x in (k, v)]
    expected = F.scaled_dot_product_attention(q, *repeated, attn_mask=mask)
    torch.testing.assert_close(out[:, :, rows], expected[:, :, rows], rtol=1e-12, atol=1e-12)
    scores = (q @ repeated[0].transpose(-1, -2) / D**0.5).masked_fill(~mask, -math.inf)
    torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=1e-12, atol=1e-12)
    assert (out[:, :, ~rows] == 0).all()
    assert (lse[:, :, ~rows] == -math.inf).all()

    cotangent = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v), cotangent, retain_graph=True)
    wanted = torch.autograd.grad(expected[:, :, rows], (q, k, v), cotangent[:, :, rows])
    for a, e in zip(grads, wanted, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-11, atol=1e-12)
    # the derivative of lse is the softmax: dq = sum_j p_ij k_j
    (dq,) = torch.autograd.grad(lse[:, :, rows].sum(), q)
    p = scores.softmax(-1).nan_to_num(0.0)
    torch.testing.assert_close(dq, p @ repeated[0] / D**0.5, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 1), (2, -1), (-1, None)], ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_minus_one_is_no_bound(window: tuple[int | None, int | None], causal: bool, backend: str) -> None:
    q, k, v = (x.float() for x in inputs(5, 9))
    left, right = (None if side == -1 else side for side in window)
    options: dict[str, Any] = {"causal": causal, "backend": backend}
    expected = fk.flash_attention(q, k, v, window=(left, right), **options)
    assert torch.equal(fk.flash_attention(q, k, v, window=window, **options), expected)
    lengths = [torch.tensor([0, n], dtype=torch.int32) for n in (5, 9)]
    packed = [x[0].transpose(0, 1) for x in (q, k, v)]
    out = fk.flash_attention_varlen(*packed, *lengths, 5, 9, window=window, **options)
    torch.testing.assert_close(out.transpose(0, 1), expected[0])


@pytest.mark.parametrize("align", ["bottom_right", "top_left"])
@pytest.mark.parametrize("per_sequence", [False, True])
def test_options_entry_by_entry(align: str, per_sequence: bool) -> None:
    """Scale, then soft cap, then ALiBi, then the mask, with a sink in the denominator: one number at a time."""
    q, k, v = inputs(3, 4)
    scale, cap, window = 0.7, 1.5, (2, 1)
    slopes = torch.rand(B, H, dtype=torch.float64) if per_sequence else torch.rand(H, dtype=torch.float64)
    sinks = torch.randn(H, dtype=torch.float64)
    options = {"scale": scale, "softcap": cap, "window": window, "align": align}
    out, lse = attend(q, k, v, **options, alibi_slopes=slopes, sinks=sinks, return_lse=True)
    mask = seen(3, 4, options)
    offset = 1 if align == "bottom_right" else 0
    for b in range(B):
        for h in range(H):
            slope = float(slopes[b, h] if per_sequence else slopes[h])
            for i in range(3):
                total, value = math.exp(sinks[h]), torch.zeros(DV, dtype=torch.float64)
                for j in range(4):
                    if mask[i, j]:
                        score = scale * (q[b, h, i] @ k[b, h // 2, j]).item()
                        weight = math.exp(cap * math.tanh(score / cap) - slope * abs(i + offset - j))
                        total, value = total + weight, value + weight * v[b, h // 2, j].detach()
                torch.testing.assert_close(out[b, h, i].detach(), value / total, rtol=1e-12, atol=1e-12)
                assert lse[b, h, i].item() == pytest.approx(math.log(total), abs=1e-12)


def test_a_sink_is_a_key_without_value() -> None:
    """Appending a key of the sink's logit (by an extra dimension) and value 0 gives the same, gradient included."""
    q, k, v = inputs(heads=(H, H))
    sinks = torch.randn(H, dtype=torch.float64, requires_grad=True)
    out = attend(q, k, v, sinks=sinks, scale=1.0)
    q1 = torch.cat([q, torch.ones(B, H, T, 1, dtype=torch.float64)], -1)
    logit = torch.cat([torch.zeros(B, H, 1, D, dtype=torch.float64), sinks.view(1, H, 1, 1).expand(B, -1, -1, -1)], -1)
    k1 = torch.cat([F.pad(k, (0, 1)), logit], 2)
    expected = F.scaled_dot_product_attention(q1, k1, F.pad(v, (0, 0, 0, 1)), scale=1.0)
    torch.testing.assert_close(out, expected)
    cotangent = torch.randn_like(out)
    for a, e in zip(*(torch.autograd.grad(o, (q, k, v, sinks), cotangent) for o in (out, expected)), strict=True):
        torch.testing.assert_close(a, e)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("with_sinks", [False, True], ids=["plain", "sinks"])
def test_rows_without_keys(dtype: torch.dtype, with_sinks: bool) -> None:
    """Queries 0 .. 5 of 9 see none of 3 keys. Sinks far too large for exp() must not matter to them."""
    q, k, v = inputs(9, 3, dtype=dtype)
    sinks = torch.tensor([1e4, -1e4, 0.0, 800.0], dtype=dtype, requires_grad=True) if with_sinks else None
    out, lse = attend(q, k, v, causal=True, sinks=sinks, return_lse=True)
    assert (out[:, :, :6] == 0).all()
    assert (lse[:, :, :6] == -math.inf).all()
    assert out.isfinite().all()
    assert lse[:, :, 6:].isfinite().all()
    wanted = [x for x in (q, k, v, sinks) if x is not None]
    grads = torch.autograd.grad((out, lse), wanted, (torch.randn_like(out), torch.randn_like(lse)), retain_graph=True)
    assert all(g.isfinite().all() for g in grads)
    assert (grads[0][:, :, :6] == 0).all()
    empty = torch.zeros_like(lse)
    empty[:, :, :6] = 3.0  # what flows into rows without keys reaches nothing
    for g in torch.autograd.grad((out, lse), wanted, (empty[..., None].expand_as(out).to(dtype), empty)):
        assert (g == 0).all()


@pytest.mark.parametrize(
    ("b", "t", "s"), [(0, 3, 4), (2, 0, 4), (2, 3, 0), (2, 0, 0), (0, 0, 0)], ids=["B0", "T0", "S0", "T0-S0", "all-0"]
)
@pytest.mark.parametrize("with_sinks", [False, True], ids=["plain", "sinks"])
def test_empty_dimensions(b: int, t: int, s: int, with_sinks: bool) -> None:
    q, k, v = inputs(t, s, b=b, dtype=torch.float32)
    sinks = torch.ones(H, requires_grad=True) if with_sinks else None
    out, lse = attend(q, k, v, causal=True, sinks=sinks, return_lse=True)
    assert out.shape == (b, H, t, DV)
    assert lse.shape == (b, H, t)
    if s == 0:
        assert (out == 0).all()
        assert (lse == -math.inf).all()
    wanted = [x for x in (q, k, v, sinks) if x is not None]
    for x, g in zip(wanted, torch.autograd.grad((out.sum() + lse.sum()), wanted), strict=True):
        assert g.shape == x.shape
        assert g.isfinite().all()


@pytest.mark.parametrize("layout", ["contiguous", "swapped", "sliced", "strided"])
def test_output_is_in_the_storage_order_of_q_and_inputs_are_untouched(layout: str) -> None:
    q, k, v = inputs(layout=layout)
    before = [x.detach().clone() for x in (q, k, v)]
    out, lse = attend(q, k, v, return_lse=True)
    assert (out.transpose(1, 2) if layout == "swapped" else out).is_contiguous()
    assert lse.is_contiguous()
    torch.testing.assert_close(out, attend(*before), rtol=1e-14, atol=1e-14)
    out.detach().fill_(7.0)
    assert all(torch.equal(x, y) for x, y in zip((q, k, v), before, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_the_eager_form(dtype: torch.dtype) -> None:
    q, k, v = inputs(heads=(H, H), dtype=dtype)
    out, lse = attend(q, k, v, return_lse=True)
    scores = (q @ k.transpose(-1, -2)).float() * D**-0.5
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    spacing = torch.finfo(dtype).eps
    torch.testing.assert_close(out, scores.softmax(-1).to(dtype) @ v, rtol=2 * spacing, atol=spacing)


def test_autocast_casts_as_torch_attention_does() -> None:
    q, k, v = inputs(dtype=torch.float32, heads=(H, H))
    with torch.autocast("cpu", torch.bfloat16):
        out, lse = attend(q, k.bfloat16(), v, return_lse=True)
        assert F.scaled_dot_product_attention(q, k, v).dtype == torch.bfloat16
        in_double = attend(q.double(), k.double(), v.double())
    assert out.dtype == torch.bfloat16
    assert lse.dtype == torch.float32
    assert torch.equal(out, attend(q.bfloat16(), k.bfloat16(), v.bfloat16()))
    assert in_double.dtype == torch.float64
    out.float().sum().backward()
    assert q.grad is not None
    assert q.grad.dtype == torch.float32


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("align", ["bottom_right", "top_left"])
@pytest.mark.parametrize("per_sequence", [False, True])
def test_varlen_is_attention_within_each_sequence(index: torch.dtype, align: str, per_sequence: bool) -> None:
    lengths_q, lengths_k = (5, 0, 3, 4, 2), (7, 2, 0, 4, 1)
    cu_seqlens_q, cu_seqlens_k = (torch.tensor([0, *n]).cumsum(0).to(index) for n in (lengths_q, lengths_k))
    generator = torch.Generator().manual_seed(0)
    shapes = ((14, H, D), (14, HK, D), (14, HK, DV))
    q, k, v = (torch.randn(x, generator=generator, dtype=torch.float64).requires_grad_() for x in shapes)
    sinks = torch.randn(H, generator=generator, dtype=torch.float64).requires_grad_()
    slopes = torch.rand(5, H, dtype=torch.float64) if per_sequence else torch.rand(H, dtype=torch.float64)
    options = {"causal": True, "window": (3, None), "softcap": 2.0, "align": align, "sinks": sinks}
    out, lse = attend_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, 5, 7, **options, alibi_slopes=slopes, return_lse=True)
    assert out.shape == (14, H, DV)
    assert out.is_contiguous()
    assert lse.shape == (H, 14)
    expected_out, expected_lse = [], []
    for n in range(5):
        one = [
            x[a[n] : a[n + 1]].transpose(0, 1).unsqueeze(0)
            for x, a in ((q, cu_seqlens_q), (k, cu_seqlens_k), (v, cu_seqlens_k))
        ]
        own = slopes[n : n + 1] if per_sequence else slopes
        dense, dense_lse = attend(*one, **options, alibi_slopes=own, return_lse=True)
        expected_out.append(dense[0].transpose(0, 1))
        expected_lse.append(dense_lse[0])
    expected = torch.cat(expected_out), torch.cat(expected_lse, 1)
    cotangents = torch.randn_like(out), torch.randn_like(lse)
    for a, e in zip((out, lse), expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-13, atol=1e-13)
    wanted = (q, k, v, sinks)
    for a, e in zip(
        torch.autograd.grad((out, lse), wanted, cotangents),
        torch.autograd.grad(expected, wanted, cotangents),
        strict=True,
    ):
        torch.testing.assert_close(a, e, rtol=1e-12, atol=1e-12)


def test_varlen_without_a_sequence() -> None:
    q, k, v = (torch.zeros(0, h, D, requires_grad=True) for h in (H, HK, HK))
    cu_seqlens = torch.zeros(1, dtype=torch.int32)
    out, lse = attend_varlen(q, k, v, cu_seqlens, cu_seqlens, 0, 0, alibi_slopes=torch.zeros(0, H), return_lse=True)
    assert out.shape == (0, H, D)
    assert lse.shape == (H, 0)
    out.sum().backward()
    assert k.grad is not None


@pytest.mark.parametrize("case", [pytest.param(c, id=c.id) for c in CASES["flash_attention_varlen"]])
def test_the_packed_reference_that_compiles_equals_the_one_that_reads_lengths(case: Case) -> None:
    """Two formulations, one by sequence and one of the whole packed matrix, on every case, with gradients."""
    results = []
    for compiling in (False, True):
        args = case.make(torch.float64)
        with mock.patch("torch.compiler.is_compiling", return_value=compiling):
            outputs = call(FLASH_ATTENTION_VARLEN, args, case.options, backend="reference")
        wanted = [t for t in args.values() if t is not None and t.requires_grad]
        smooth = tuple(o for o in outputs if o.requires_grad)
        # Pages take no gradients.
        grads = torch.autograd.grad(smooth, wanted, make_cotangents(smooth, "contiguous")) if wanted else ()
        results.append((*outputs, *grads))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
