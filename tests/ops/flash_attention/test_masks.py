"""Attention with masks and biases, on every backend: what no comparison with the reference shows."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention_inputs import DV, B, H, S, T, inputs
from table import DEVICES
from torch import Tensor

import foundry_kernels as fk
from foundry_kernels import _triton
from foundry_kernels.ops.flash_attention import FLASH_ATTENTION, flash_attention
from foundry_kernels.ops.flash_attention.case_makers import PartlyBiased, bias_arg, dense_case
from foundry_kernels.testing import assert_parity

DEVICE = DEVICES[-1]
BACKENDS = fk.OPS["flash_attention"].backends(DEVICE)
over_backends = pytest.mark.parametrize("backend", BACKENDS)


def drawn(t: int, s: int) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (x.detach().to(DEVICE).requires_grad_() for x in inputs(t, s, dtype=torch.float32))
    return q, k, v


def _interpreted(backend: str) -> bool:
    return backend == "triton" and _triton.INTERPRET


def gradients(out: Tensor, *args: Tensor) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    cotangent = torch.randn(out.shape, generator=generator, dtype=out.dtype).to(out.device)
    return torch.autograd.grad(out, args, cotangent, retain_graph=True)


@over_backends
def test_a_bias_that_all_keys_share_satisfies_the_rule(backend: str) -> None:
    """Its exact gradient is 0, as it does not change the softmax: what is computed is rounding (docs/numerics.md)."""
    case = dense_case(2, (2, 1), (35, 70), 24, "bias-of-queries", attn_mask=bias_arg(1, 1, 35, 1))
    assert_parity(FLASH_ATTENTION, case, backend=backend, dtype=torch.float32, device=DEVICE)
    args = {n: x if x is None else x.detach().double().requires_grad_() for n, x in case.make(torch.float32).items()}
    exact = gradients(flash_attention(**args, backend="reference"), args["attn_mask"])[0]
    assert exact.abs().max() < 1e-12


@over_backends
@pytest.mark.parametrize("queries", [9, 4], ids=["many", "few"])
def test_large_biases_as_sdpa(queries: int, backend: str) -> None:
    """Each row of lse by itself: the parity suite measures all rows by the largest."""
    tokens, values = (queries, 128 if queries > 4 else 1100), [1e10, torch.finfo(torch.bfloat16).max]
    if _interpreted(backend):
        tokens = queries, 128
    else:
        values += [50.0, 1e4, 1e6, 2.4e38]
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, 16, generator=generator).bfloat16() for n in (queries, tokens[1], tokens[1]))
    wide = [x.float() for x in (q, k, v)]
    for value in values:
        for bias in (PartlyBiased(value)(generator, tokens), PartlyBiased(-value)(generator, tokens)):
            bias = bias.bfloat16()
            out, lse = flash_attention(*(x.to(DEVICE) for x in (q, k, v)), attn_mask=bias.to(DEVICE), return_lse=True,
                                       backend=backend)  # fmt: skip
            expected = F.scaled_dot_product_attention(*wide, attn_mask=bias.float())
            of_rows = (wide[0] @ wide[1].transpose(-1, -2) / 4 + bias.float()).logsumexp(-1)
            torch.testing.assert_close(out.float().cpu(), expected, rtol=0.02, atol=0.02)
            torch.testing.assert_close(lse.cpu(), of_rows, rtol=1e-5, atol=0.03)


@pytest.mark.parametrize("kind", ["bool", "bias"])
def test_entry_by_entry(kind: str) -> None:
    """After scale, cap and ALiBi a bias is added; then what a mask or the window hides has no weight."""
    q, k, v = inputs(3, 4)
    slopes, bias = torch.rand(H, dtype=torch.float64), torch.randn(B, 1, 3, 4, dtype=torch.float64)
    mask = bias > -0.5 if kind == "bool" else bias
    options: dict[str, Any] = {"scale": 0.7, "softcap": 1.5, "alibi_slopes": slopes, "causal": True}
    out = flash_attention(q, k, v, attn_mask=mask, backend="reference", **options)
    for b, h, i in torch.cartesian_prod(torch.arange(B), torch.arange(H), torch.arange(3)).tolist():
        total, value = 0.0, torch.zeros(DV, dtype=torch.float64)
        for j in range(min(i + 2, 4)):  # the last query sees the last key
            score = 1.5 * math.tanh(0.7 * (q[b, h, i] @ k[b, h // 2, j]).item() / 1.5) - slopes[h] * abs(i + 1 - j)
            added = bias[b, 0, i, j] if kind == "bias" else 0.0
            if kind == "bias" or mask[b, 0, i, j]:
                weight = math.exp(score + added)
                total, value = total + weight, value + weight * v[b, h // 2, j].detach()
        torch.testing.assert_close(out[b, h, i].detach(), value / total if total else value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "shape", [(B, H, T, S), (1, H, T, S), (B, 1, 1, S), (T, S), (S,), (H, T, 1), (), (B, 1, T, 1)], ids=str
)
def test_gradcheck_of_a_bias(shape: tuple[int, ...]) -> None:
    q, k, v = inputs()
    bias = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    more: dict[str, Any] = {"window": (3, 2), "softcap": 2.0, "alibi_slopes": torch.rand(H, dtype=torch.float64)}
    more |= {"sinks": torch.randn(H, dtype=torch.float64), "dropout_p": 0.3, "dropout_seed": 5}

    def run(bias: Tensor) -> tuple[Tensor, ...]:
        return flash_attention(q, k, v, attn_mask=bias, return_lse=True, backend="reference", **more)  # type: ignore[return-value]

    assert torch.autograd.gradcheck(run, (bias,))


@pytest.mark.parametrize(
    ("backend", "t"),
    [
        pytest.param(backend, t, marks=pytest.mark.slow if (backend, t) == ("triton", 70) else ())
        for backend in BACKENDS
        for t in (2, 70)
    ],
)
def test_rows_that_see_nothing(backend: str, t: int) -> None:
    """By a mask, or by -inf in a bias: 0, and nothing of them in any gradient."""
    q, k, v = drawn(t, 90)
    seen = torch.rand(t, 90, device=DEVICE) < 0.5
    seen[1::3] = False
    bias = torch.zeros(t, 90, device=DEVICE).masked_fill(~seen, -math.inf)
    empty = ~seen.any(-1)
    assert empty.any()
    for mask in (seen, bias, fk.AttentionMask(seen), bias.requires_grad_()):
        options: dict[str, Any] = {"attn_mask": mask, "return_lse": True, "return_stats": True, "backend": backend}
        out, lse, entropy, max_logit = flash_attention(q, k, v, **options)
        assert not out[:, :, empty].any()
        assert (lse[:, :, empty] == -math.inf).all()
        assert not entropy[:, :, empty].any()
        assert (max_logit[:, :, empty] == -math.inf).all()
        wanted = (q, k, v, mask) if isinstance(mask, Tensor) and mask.requires_grad else (q, k, v)
        found = gradients(out, *wanted)
        assert all(x.isfinite().all() for x in (out, *found))
        assert not found[0][:, :, empty].any()
        if len(found) == 4:
            assert not found[3][~seen].any()
        kept, q_kept = ~empty, q[:, :, ~empty]
        alone = flash_attention(q_kept, k, v, attn_mask=seen[kept], backend=backend)
        torch.testing.assert_close(out[:, :, kept], alone)


@over_backends
def test_nan_in_a_bias_goes_no_further_than_its_row(backend: str) -> None:
    q, k, v = drawn(70, 90)
    bias = torch.randn(70, 90, device=DEVICE)
    bias[40, 7] = math.nan
    bias[3, 80] = math.nan  # which the causal mask hides
    out = flash_attention(q, k, v, attn_mask=bias, causal=True, align="top_left", backend=backend)
    assert out[:, :, 40].isnan().all()
    others = [i for i in range(70) if i != 40]
    assert out[:, :, others].isfinite().all()
    clean = flash_attention(q, k, v, attn_mask=bias.nan_to_num(), causal=True, align="top_left", backend=backend)
    torch.testing.assert_close(out[:, :, others], clean[:, :, others])


@over_backends
def test_a_causal_mask_in_every_form(backend: str) -> None:
    n = 70 if _interpreted(backend) else 130
    q, k, v = drawn(n, n)
    expected = flash_attention(q, k, v, causal=True, backend=backend)
    causal = torch.ones(n, n, dtype=torch.bool, device=DEVICE).tril()
    lowered = torch.zeros(n, n, device=DEVICE).masked_fill(~causal, -math.inf)
    for mask in (causal, lowered, fk.AttentionMask(causal), lowered.bfloat16()):
        torch.testing.assert_close(flash_attention(q, k, v, attn_mask=mask, backend=backend), expected)
