"""FlashAttention 3's `flash_attn_combine`: the results of parts of the keys against those of all keys at once."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from attention_loops import close, draw
from torch import Tensor

from foundry_kernels.compat.flash_attn_3 import flash_attn_combine, flash_attn_func

#: Rounding of the partial results alone.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}


def whole(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """out [B, T, H, D], lse [B, T, H] in plain matrices; `seen` [T, S]."""
    scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(q.shape[-1])
    none = ~seen.any(-1, keepdim=True)
    scores = scores.masked_fill(~(seen | none), -torch.inf)
    out = torch.einsum("bhts,bshd->bthd", scores.softmax(-1).masked_fill(none, 0.0), v)
    return out, scores.logsumexp(-1).masked_fill(none[:, 0], -torch.inf).transpose(1, 2)


def of_parts(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, sizes: list[int]) -> tuple[Tensor, Tensor]:
    split = zip(k.split(sizes, 1), v.split(sizes, 1), seen.split(sizes, 1), strict=True)
    out, lse = zip(*(whole(q, *part) for part in split), strict=True)
    return torch.stack(out), torch.stack(lse)


#: Who sees what of 7 keys in parts of 2, 4 and 1: all; the last one nothing of the first part, and the first nothing.
SEEN = {"all": torch.ones(5, 7, dtype=torch.bool), "some": torch.ones(5, 7, dtype=torch.bool)}
SEEN["some"][0] = False
SEEN["some"][3, :2] = SEEN["some"][4, 2:] = False


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("seen", SEEN)
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_parts_of_the_keys_are_the_whole(packed: bool, seen: str, dtype: torch.dtype) -> None:
    """Values of both results, and gradients of all inputs through both, in float64 on the other side."""
    given = [draw(2, n, 3, 4, seed=i).requires_grad_() for i, n in enumerate((5, 7, 7))]
    expected, expected_lse = whole(*given, SEEN[seen])
    parts, lse = of_parts(*given, SEEN[seen], [2, 4, 1])
    parts, lse = parts.to(dtype), lse if dtype == torch.float64 else lse.float()
    if packed:
        parts, lse = parts.flatten(1, 2), lse.flatten(1, 2)
    out, out_lse = flash_attn_combine(parts, lse)
    assert (out.dtype, out_lse.dtype) == (dtype, torch.float64 if dtype == torch.float64 else torch.float32)
    if packed:
        out, out_lse = out.unflatten(0, (2, 5)), out_lse.unflatten(0, (2, 5))
    tolerance = TOLERANCE[dtype]
    close(out.detach(), expected.detach(), tolerance)
    close(out_lse.detach(), expected_lse.detach(), 1e-12 if dtype == torch.float64 else 1e-5)
    finite = expected_lse.isfinite()
    assert finite.all() == (seen == "all")
    dout, dlse = draw(*out.shape, seed=7), draw(*out_lse.shape, seed=8)[finite]
    grads = (
        torch.autograd.grad((a.double() * dout).sum() + (b[finite].double() * dlse).sum(), given)
        for a, b in ((out, out_lse), (expected, expected_lse))
    )
    for actual, wanted in zip(*grads, strict=True):
        close(actual, wanted, 4 * tolerance)


def test_a_part_without_a_key_contributes_nothing_whatever_it_holds() -> None:
    """FlashAttention leaves what was in memory there; nor does it get a gradient."""
    parts, lse = draw(3, 2, 5, 3, 4), draw(3, 2, 5, 3, seed=1)
    lse[0], parts[0] = -math.inf, math.nan
    lse[:, 1, 2], parts[:, 1, 2] = -math.inf, math.nan
    given = parts.clone().requires_grad_(), lse.clone().requires_grad_()
    out, out_lse = flash_attn_combine(*given)
    rest = torch.ones(2, 5, dtype=torch.bool)
    rest[1, 2] = False
    expected, expected_lse = flash_attn_combine(parts[1:], lse[1:])
    assert torch.equal(out[rest], expected[rest])
    assert torch.equal(out_lse, expected_lse)
    assert not out[1, 2].any()
    assert (out_lse[1, 2] == -math.inf).all()
    for grad in torch.autograd.grad(out.sum() + out_lse[rest].sum(), given):
        assert grad.isfinite().all()
        assert not grad[0].any()
        assert not grad[:, 1, 2].any()
        assert grad[1:, rest].any()
    grads = torch.autograd.grad(flash_attn_combine(*given)[1].sum(), given[1])[0]
    assert grads.isfinite().all()


def test_gradients() -> None:
    given = [draw(3, 2, 3, 2, 2, seed=1).requires_grad_(), draw(3, 2, 3, 2, seed=2).requires_grad_()]
    assert torch.autograd.gradcheck(flash_attn_combine, given)
    assert torch.autograd.gradgradcheck(flash_attn_combine, given)


def test_of_this_packages_parts() -> None:
    """Which have heads before queries in lse."""
    q, k, v = (draw(2, n, 4, 8, seed=i).float() for i, n in enumerate((5, 9, 9)))
    found = [flash_attn_func(q, k[:, part], v[:, part], return_attn_probs=True) for part in (slice(4), slice(4, 9))]
    out, lse = (torch.stack(x) for x in zip(*found, strict=True))
    combined, combined_lse = flash_attn_combine(out, lse.transpose(2, 3))
    expected, expected_lse = flash_attn_func(q, k, v, return_attn_probs=True)
    torch.testing.assert_close(combined, expected, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(combined_lse, expected_lse.transpose(1, 2), rtol=2e-5, atol=2e-5)


def test_where_the_result_goes() -> None:
    """Into `out` of any strides, rounded once to its dtype; large lse does not overflow."""
    parts, lse = draw(2, 3, 5, 2, 4).float(), draw(2, 3, 5, 2, seed=1).float() * 100 + 1000
    expected, expected_lse = flash_attn_combine(parts, lse)
    exact, exact_lse = flash_attn_combine(parts.double(), lse.double())
    close(expected, exact, 1e-5)
    close(expected_lse, exact_lse, 1e-6)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        assert torch.equal(flash_attn_combine(parts, lse, None, dtype)[0], expected.to(dtype))
        out = torch.empty(3, 2, 5, 4, dtype=dtype).transpose(1, 2)
        found, found_lse = flash_attn_combine(parts, lse, out)
        assert found is out
        assert torch.equal(out, expected.to(dtype))
        assert torch.equal(found_lse, expected_lse)
    single = flash_attn_combine(parts[:1], lse[:1])
    assert torch.equal(single[0], parts[0])
    assert torch.equal(single[1], lse[0])
    assert [x.shape for x in flash_attn_combine(parts[:, :0], lse[:, :0])] == [(0, 5, 2, 4), (0, 5, 2)]


def test_signature() -> None:
    parameters = inspect.signature(flash_attn_combine).parameters
    assert list(parameters) == ["out_partial", "lse_partial", "out", "out_dtype"]
    assert [p.default for p in parameters.values()][2:] == [None, None]
