"""Masks, biases and dropout by the signatures of PyTorch and flash-attn: against torch's own, and plain matrices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention_loops import EXACT, close, draw, over_backends, over_options
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import foundry_kernels as fk
from foundry_kernels.compat import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    scaled_dot_product_attention,
    sdpa,
)
from foundry_kernels.ops.flash_attention.dropout import keep_mask, keep_scale


def plain(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    **options: Any,
) -> Tensor:  # fmt: skip
    """By torch's matrices; dropout by the kernels' mask, its seed from torch's generator."""
    if not dropout_p:
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, is_causal=is_causal, **options)
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    weights = scores.softmax(-1)
    shape = weights.shape if weights.dim() == 4 else (1, *weights.shape)  # heads and no batch
    kept = keep_mask(tuple(shape), dropout_p, torch.randint(2**63 - 1, ()))  # type: ignore[arg-type]
    return weights * (kept * keep_scale(dropout_p)).view(weights.shape) @ v


def agree(backend: str, inputs: list[Tensor], options: dict[str, Any]) -> None:
    """Output and the gradients of all inputs that are differentiable, a bias among them."""
    dtype, tolerance = EXACT[backend]
    found = []
    for function, cast in ((scaled_dot_product_attention, dtype), (plain, torch.float64)):
        given = [x if x.dtype == torch.bool else x.detach().to(cast).requires_grad_() for x in inputs]
        torch.manual_seed(0)
        out = function(*given, **options, **({"backend": backend} if function is not plain else {}))
        leaves = [x for x in given if x.requires_grad]
        cotangent = draw(*out.shape, seed=3).to(cast)
        found.append((out, *torch.autograd.grad(out, leaves, cotangent)))
    for actual, expected in zip(*found, strict=True):
        assert actual.dtype == dtype
        assert actual.shape == expected.shape
        size = max(1.0, float(expected.detach().abs().max()))
        close(actual / size, expected / size, tolerance)


def mask_of(kind: str, *shape: int) -> Tensor:
    """In a bool one each query sees its first key."""
    if kind == "bias":
        return draw(*shape, seed=7)
    mask = draw(*shape, seed=7) > 0.0
    if mask.dim() and mask.shape[-1] > 1:
        mask[..., 0] = True
    return mask if mask.dim() and mask.shape[-1] > 1 else torch.ones_like(mask)


over_kinds = pytest.mark.parametrize("kind", ["bool", "bias"])


@over_backends
@over_kinds
@pytest.mark.parametrize(
    ("front", "mask"),
    [
        ((2, 3), ()),
        ((2, 3), (6,)),
        ((2, 3), (5, 6)),
        ((2, 3), (5, 1)),
        ((2, 3), (3, 1, 6)),
        ((2, 3), (2, 1, 5, 6)),
        ((2, 3), (2, 3, 5, 6)),
        ((2, 3), (2, 1, 1, 6)),
        ((3,), (5, 6)),
        ((3,), (3, 5, 6)),
        ((), (5, 6)),
        ((), (6,)),
        ((2, 2, 3), (5, 6)),
        ((2, 2, 3), (3, 5, 6)),
        ((2, 2, 3), (1, 1, 3, 1, 6)),
        ((2, 2, 3), (2, 1, 5, 6)),
        ((2, 2, 3), (2, 2, 3, 5, 6)),
        ((2, 2, 3), (2, 1, 1, 1, 6)),
    ],
    ids=str,
)
def test_masks_of_every_rank(backend: str, kind: str, front: tuple[int, ...], mask: tuple[int, ...]) -> None:
    q, k, v = draw(*front, 5, 8), draw(*front, 6, 8, seed=1), draw(*front, 6, 4, seed=2)
    agree(backend, [q, k, v, mask_of(kind, *mask)], {})


@over_backends
@over_kinds
@pytest.mark.parametrize(
    ("shapes", "mask", "options"),
    [
        (((2, 4, 5, 8), (2, 2, 6, 8)), (2, 4, 5, 6), {"enable_gqa": True}),
        (((2, 4, 5, 8), (2, 2, 6, 8)), (4, 1, 6), {"enable_gqa": True, "scale": -0.4}),
        (((4, 5, 8), (2, 4, 6, 8)), (2, 1, 5, 6), {}),
        (((1, 4, 5, 8), (3, 2, 4, 6, 8)), (3, 1, 1, 5, 6), {"scale": 0.0}),
        (((2, 1, 5, 8), (2, 4, 6, 8)), (4, 5, 6), {}),
    ],
    ids=str,
)
def test_masks_with_heads_and_batches_that_are_broadcast(
    backend: str, kind: str, shapes: tuple[tuple[int, ...], ...], mask: tuple[int, ...], options: dict[str, Any]
) -> None:
    q, k, v = draw(*shapes[0]), draw(*shapes[1], seed=1), draw(*shapes[1], seed=2)
    agree(backend, [q, k, v, mask_of(kind, *mask)], options)


@pytest.mark.parametrize(
    ("front", "mask", "copied"),
    [
        ((2, 3), (5, 6), False),
        ((2, 3), (2, 1, 1, 6), False),
        ((2, 2, 3), (3, 5, 6), False),
        ((2, 2, 3), (1, 1, 1, 5, 6), False),
        ((2, 2, 3), (2, 2, 1, 5, 6), False),
        ((2, 2, 3), (2, 1, 1, 5, 6), True),
    ],
    ids=str,
)
def test_masks_are_not_copied(
    front: tuple[int, ...], mask: tuple[int, ...], copied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, taken = torch.ones(mask, dtype=torch.bool), []
    call = sdpa.flash_attention

    def spy(*args: Any, attn_mask: Tensor, **options: Any) -> Any:
        taken.append(attn_mask)
        return call(*args, attn_mask=attn_mask, **options)

    monkeypatch.setattr(sdpa, "flash_attention", spy)
    scaled_dot_product_attention(torch.ones(*front, 5, 8), *[torch.ones(*front, 6, 8)] * 2, given, backend="reference")
    assert (taken[0].untyped_storage().data_ptr() != given.untyped_storage().data_ptr()) == copied


@over_backends
def test_masks_of_tiles(backend: str) -> None:
    """B of the mask is that of all dimensions in front of the heads."""
    dtype, tolerance = EXACT[backend]
    dense = draw(4, 1, 70, 90, seed=7) > 0.0
    q, k, v = draw(2, 2, 3, 70, 8), draw(2, 2, 3, 90, 8, seed=1), draw(2, 2, 3, 90, 8, seed=2)
    out = scaled_dot_product_attention(*(x.to(dtype) for x in (q, k, v)), fk.AttentionMask(dense), backend=backend)
    close(out, plain(q, k, v, dense.unflatten(0, (2, 2))), tolerance)


# --- dropout ----------------------------------------------------------------------------------------------------------


def dropped(q: Tensor, k: Tensor, v: Tensor, p: float, kept: Tensor) -> Tensor:
    """q, k, v ``[B, T, H, D]``, kept ``[B, H, T, S]``."""
    weights = (torch.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5).softmax(-1)
    return torch.einsum("bhts,bshd->bthd", weights * (kept * keep_scale(p)), v)


DENSE: dict[str, Callable[..., Any]] = {
    "func": lambda q, k, v, p, **o: flash_attn_func(q, k, v, p, **o),
    "kv": lambda q, k, v, p, **o: flash_attn_kvpacked_func(q, torch.stack((k, v), 2), p, **o),
    "qkv": lambda q, k, v, p, **o: flash_attn_qkvpacked_func(torch.stack((q, k, v), 2), p, **o),
}
VARLEN: dict[str, Callable[..., Any]] = {
    "func": lambda q, k, v, c, p, **o: flash_attn_varlen_func(q, k, v, c, c, 40, 40, p, **o),
    "kv": lambda q, k, v, c, p, **o: flash_attn_varlen_kvpacked_func(q, torch.stack((k, v), 1), c, c, 40, 40, p, **o),
    "qkv": lambda q, k, v, c, p, **o: flash_attn_varlen_qkvpacked_func(torch.stack((q, k, v), 1), c, 40, p, **o),
}


def seed_of(seed: int) -> Tensor:
    """What a call draws after ``torch.manual_seed(seed)``."""
    return torch.randint(2**63 - 1, (), generator=torch.Generator().manual_seed(seed))


@over_backends
@pytest.mark.parametrize("form", DENSE)
def test_dropout_of_flash_attn(backend: str, form: str) -> None:
    dtype, tolerance = EXACT[backend]
    q, k, v = (draw(2, 40, 3, 8, seed=i) for i in range(3))
    given = tuple(x.to(dtype) for x in (q, k, v))
    torch.manual_seed(1)
    out, lse, probs = DENSE[form](*given, 0.3, return_attn_probs=True, backend=backend)
    torch.manual_seed(1)
    assert torch.equal(DENSE[form](*given, 0.3, backend=backend), out)
    kept = keep_mask((2, 3, 40, 40), 0.3, seed_of(1))
    close(out, dropped(q, k, v, 0.3, kept), tolerance)
    close(lse, flash_attn_func(*given, return_attn_probs=True, backend=backend)[1], tolerance)
    assert torch.equal(probs >= 0, kept)
    close(probs.abs(), (torch.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5).softmax(-1), tolerance)
    assert not probs.requires_grad


@over_backends
@pytest.mark.parametrize("form", VARLEN)
def test_dropout_of_packed_sequences_is_that_of_a_batch(backend: str, form: str) -> None:
    dtype, tolerance = EXACT[backend]
    q, k, v = (draw(51, 3, 8, seed=i) for i in range(3))
    given, cu_seqlens = tuple(x.to(dtype) for x in (q, k, v)), torch.tensor([0, 40, 51], dtype=torch.int32)
    torch.manual_seed(1)
    out, _, probs = VARLEN[form](*given, cu_seqlens, 0.3, return_attn_probs=True, backend=backend)
    assert probs.shape == (2, 3, 40, 40)
    assert torch.equal(probs[0] >= 0, keep_mask((2, 3, 40, 40), 0.3, seed_of(1))[0])
    assert not probs[1, :, 11:].any()
    assert not probs[1, :, :, 11:].any()
    kept = keep_mask((2, 3, 40, 40), 0.3, seed_of(1))
    for n, (begin, end) in enumerate(((0, 40), (40, 51))):
        one, size = slice(begin, end), end - begin
        expected = dropped(q[None, one], k[None, one], v[None, one], 0.3, kept[n : n + 1, :, :size, :size])
        close(out[one], expected[0], tolerance)


@over_backends
@over_options
@pytest.mark.parametrize("packed", [False, True])
def test_probabilities_give_the_output(backend: str, options: dict[str, Any], packed: bool) -> None:
    """With every option: those that were kept, times the values. A query that sees no key has none."""
    dtype, tolerance = EXACT[backend]
    if packed:
        cu_q, cu_k = torch.tensor([0, 5, 5, 14]), torch.tensor([0, 7, 10, 14])
        given = (draw(14, 4, 8, dtype=dtype), *(draw(14, 2, 8, seed=i, dtype=dtype) for i in (1, 2)), cu_q, cu_k, 9, 7)
        out, _, probs = flash_attn_varlen_func(*given, 0.25, return_attn_probs=True, backend=backend, **options)
        places = [(n, slice(*cu_q[n : n + 2].tolist()), slice(*cu_k[n : n + 2].tolist())) for n in range(3)]
        found = [(out[a], probs[n, :, : a.stop - a.start, : b.stop - b.start], given[2][b]) for n, a, b in places]
    else:
        given = (draw(3, 9, 4, 8, dtype=dtype), *(draw(3, 7, 2, 8, seed=i, dtype=dtype) for i in (1, 2)))
        out, _, probs = flash_attn_func(*given, 0.25, return_attn_probs=True, backend=backend, **options)
        found = [(out[n], probs[n], given[2][n]) for n in range(3)]
    assert probs.dtype == dtype
    assert (probs < 0).any()
    for out_n, probs_n, v in found:
        kept = probs_n.clamp_min(0.0).double() * keep_scale(0.25)
        close(out_n, torch.einsum("hts,shd->thd", kept, v.double().repeat_interleave(2, 1)), tolerance)
        sums = probs_n.abs().sum(-1)
        close(sums, (sums > 0.5).to(dtype), tolerance)


# --- torch's own samples ----------------------------------------------------------------------------------------------


@over_backends
def test_torchs_samples_of_sdpa(backend: str) -> None:
    """All of them, with masks, `is_causal` and dropout, of which torch compares none with dropout."""
    from torch.testing._internal.common_methods_invocations import op_db

    info = next(op for op in op_db if op.name == "nn.functional.scaled_dot_product_attention")
    count = {"attn_mask": 0, "dropout_p": 0, "is_causal": 0}
    for sample in info.sample_inputs("cpu", EXACT[backend][0], requires_grad=True):
        options = {name: value for name, value in sample.kwargs.items() if value is not None}
        mask = options.pop("attn_mask", None)
        for name in count:
            count[name] += bool(options.get(name)) or (name == "attn_mask" and mask is not None)
        agree(backend, [sample.input, *sample.args, *([] if mask is None else [mask])], options)
    assert all(count.values()), "samples that are not there show nothing"
