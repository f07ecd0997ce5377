"""flash-attn's packed forms, padding and rotary embedding: against the unpacked forms, and plain loops."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_loops import EXACT, close, draw, over_backends, over_options
from torch import Tensor

import foundry_kernels as fk
from foundry_kernels import compat
from foundry_kernels.compat import (
    apply_rotary_emb,
    apply_rotary_emb_kv_,
    apply_rotary_emb_qkv_,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from foundry_kernels.compat.bert_padding import pad_input, unpad_input

# Signatures --------------------------------------------------------------------------------------------------------

OPTIONS = (
    "dropout_p=0.0 softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0 alibi_slopes=None "
    "deterministic=False return_attn_probs=False"
)
FLASH_ATTN_2 = {
    flash_attn_func: "q k v " + OPTIONS,
    flash_attn_qkvpacked_func: "qkv " + OPTIONS,
    flash_attn_kvpacked_func: "q kv " + OPTIONS,
    flash_attn_varlen_func: f"q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k {OPTIONS} block_table=None",
    flash_attn_varlen_qkvpacked_func: "qkv cu_seqlens max_seqlen " + OPTIONS,
    flash_attn_varlen_kvpacked_func: "q kv cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k " + OPTIONS,
    apply_rotary_emb: ("x cos sin interleaved=False inplace=False seqlen_offsets=0 cu_seqlens=None max_seqlen=None"),
    apply_rotary_emb_qkv_: ("qkv cos sin cos_k=None sin_k=None interleaved=False seqlen_offsets=0 num_heads_q=None"),
    apply_rotary_emb_kv_: "kv cos sin interleaved=False seqlen_offsets=0",
    unpad_input: "hidden_states attention_mask unused_mask=None",
    pad_input: "hidden_states indices batch seqlen",
}


@pytest.mark.parametrize("function", FLASH_ATTN_2, ids=lambda f: f.__name__)
def test_signatures(function: Callable[..., object]) -> None:
    parameters = inspect.signature(function).parameters.values()
    own = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    found = [p.name if p.default is p.empty else f"{p.name}={p.default}".replace(" ", "") for p in own]
    assert found == FLASH_ATTN_2[function].split()
    assert [p.name for p in parameters if p not in own] in ([], ["backend"])
    assert function.__name__ in (*compat.__all__, *dir(compat.bert_padding))


# Attention ---------------------------------------------------------------------------------------------------------


def same_as_separate(packed: Tensor, attend: Callable[..., Any], separate: Callable[..., Any]) -> None:
    """Of packed tensors: the results of the form and of its parts, and their gradients, bit for bit."""
    found = []
    for function in (attend, separate):
        leaf = packed.clone().requires_grad_()
        out, lse, none = function(leaf)
        assert none is None
        found.append((out, lse, *torch.autograd.grad(out.square().sum(), leaf)))
    assert all(map(torch.equal, *found))


@over_backends
@over_options
def test_packed_attention(backend: str, options: dict[str, Any]) -> None:
    dtype = EXACT[backend][0]
    qkv, q, kv = draw(3, 6, 3, 4, 8, dtype=dtype), draw(3, 5, 4, 8, dtype=dtype), draw(3, 7, 2, 2, 8, dtype=dtype)
    given: dict[str, Any] = {**options, "backend": backend}
    probs: dict[str, Any] = {**given, "return_attn_probs": True}
    same_as_separate(
        qkv, lambda x: flash_attn_qkvpacked_func(x, **probs), lambda x: flash_attn_func(*x.unbind(2), **probs)
    )
    same_as_separate(
        kv, lambda x: flash_attn_kvpacked_func(q, x, **probs), lambda x: flash_attn_func(q, *x.unbind(2), **probs)
    )
    assert torch.equal(flash_attn_qkvpacked_func(qkv, **given), flash_attn_qkvpacked_func(qkv, **probs)[0])  # type: ignore[arg-type]
    assert torch.equal(flash_attn_kvpacked_func(q, kv, **given), flash_attn_kvpacked_func(q, kv, **probs)[0])  # type: ignore[arg-type]


@over_backends
@over_options
def test_packed_varlen_attention(backend: str, options: dict[str, Any]) -> None:
    dtype = EXACT[backend][0]
    cu_q, cu_k = torch.tensor([0, 5, 5, 9], dtype=torch.int32), torch.tensor([0, 7, 10, 12], dtype=torch.int32)
    qkv, q, kv = draw(9, 3, 4, 8, dtype=dtype), draw(9, 4, 8, dtype=dtype), draw(12, 2, 2, 8, dtype=dtype)
    probs: dict[str, Any] = {**options, "return_attn_probs": True, "backend": backend}
    same_as_separate(
        qkv,
        lambda x: flash_attn_varlen_qkvpacked_func(x, cu_q, 5, **probs),
        lambda x: flash_attn_varlen_func(*x.unbind(1), cu_q, cu_q, 5, 5, **probs),
    )
    same_as_separate(
        kv,
        lambda x: flash_attn_varlen_kvpacked_func(q, x, cu_q, cu_k, 5, 7, **probs),
        lambda x: flash_attn_varlen_func(q, *x.unbind(1), cu_q, cu_k, 5, 7, **probs),
    )


# Padding -----------------------------------------------------------------------------------------------------------

MASK = torch.tensor([[0, 1, 1, 0, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0], [1, 0, 0, 0, 0]])


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32], ids=str)
@pytest.mark.parametrize("unused", [False, True])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3)], ids=str)
def test_padding(dtype: torch.dtype, unused: bool, shape: tuple[int, ...]) -> None:
    x = draw(4, 5, *shape).requires_grad_()
    other = torch.zeros_like(MASK)
    other[0, 0] = other[2, 3] = int(unused)
    packed, indices, cu_seqlens, max_seqlen, seqused = unpad_input(
        x, MASK.to(dtype), other.to(dtype) if unused else None
    )
    chosen = [(b, s) for b in range(4) for s in range(5) if MASK[b, s] or other[b, s]]
    lengths = [sum(b == n for b, _ in chosen) for n in range(4)]
    assert torch.equal(packed, torch.stack([x[at] for at in chosen]))
    assert indices.tolist() == [5 * b + s for b, s in chosen]
    assert cu_seqlens.tolist() == [sum(lengths[:n]) for n in range(5)]
    assert (max_seqlen, type(max_seqlen)) == (5, int)
    assert seqused.tolist() == [3, 5, 0, 1]
    assert (indices.dtype, cu_seqlens.dtype, seqused.dtype) == (torch.int64, torch.int32, torch.int32)

    padded = pad_input(packed, indices, torch.tensor(4), 5)
    kept = (MASK + other).bool().view(4, 5, *(1 for _ in shape))
    assert torch.equal(padded, torch.where(kept, x, 0.0))
    (gradient,) = torch.autograd.grad(padded.square().sum(), x)
    assert torch.equal(gradient, torch.where(kept, 2 * x, 0.0))


def test_padding_of_nothing() -> None:
    for batch in (0, 2):
        packed, indices, cu_seqlens, max_seqlen, seqused = unpad_input(torch.ones(batch, 3, 4), torch.zeros(batch, 3))
        assert packed.shape == (0, 4)
        assert cu_seqlens.tolist() == [0] * (batch + 1)
        assert max_seqlen == 0
        assert seqused.tolist() == [0] * batch
        assert not pad_input(packed, indices, batch, 3).any()


# Rotary embedding --------------------------------------------------------------------------------------------------


def rotated(x: Tensor, cos: Tensor, sin: Tensor, position: int, interleaved: bool) -> Tensor:
    """x ``[H, D]`` at a position, pair by pair."""
    out, half = x.clone(), cos.shape[1]
    for pair in range(half):
        a, b = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + half)
        c, s = cos[position, pair], sin[position, pair]
        out[:, a], out[:, b] = x[:, a] * c - x[:, b] * s, x[:, b] * c + x[:, a] * s
    return out


ROPE_BACKENDS = ("reference", *(("native",) if "native" in fk.OPS["rope"].backends("cpu") else ()))
OFFSETS: dict[str, tuple[Any, list[int]]] = {
    "none": (0, [0, 0, 0]),
    "int": (3, [3, 3, 3]),
    "one tensor": (torch.tensor(3), [3, 3, 3]),
    "each": (torch.tensor([4, 0, 2], dtype=torch.int32), [4, 0, 2]),
}


@pytest.mark.parametrize("backend", ROPE_BACKENDS)
@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("varlen", [False, True])
def test_rotary(backend: str, offset: str, interleaved: bool, varlen: bool) -> None:
    dtype, tolerance = EXACT[backend]
    given, firsts = OFFSETS[offset]
    cos, sin = (t.to(dtype) for t in fk.rope_table(6, 9))
    cu = [0, 4, 4, 9] if varlen else [0, 5, 10, 15]
    flat = draw(cu[-1], 2, 8, dtype=dtype)
    tokens = [(cu[n] + i, firsts[n] + i) for n in range(3) for i in range(cu[n + 1] - cu[n])]
    expected = torch.stack([rotated(flat[token], cos, sin, at, interleaved) for token, at in tokens])
    x = flat if varlen else flat.view(3, 5, 2, 8)
    options: dict[str, Any] = {"interleaved": interleaved, "seqlen_offsets": given, "backend": backend}
    if varlen:
        options |= {"cu_seqlens": torch.tensor(cu, dtype=torch.int32), "max_seqlen": 5}
    before = x.clone()
    out = apply_rotary_emb(x, cos, sin, **options)
    assert torch.equal(x, before)
    assert out.shape == x.shape
    assert out.is_contiguous()
    close(out.view(-1, 2, 8), expected, tolerance)
    inside = apply_rotary_emb(x, cos, sin, inplace=True, **options)
    assert inside is x
    assert torch.equal(x, out)


@pytest.mark.parametrize("backend", ROPE_BACKENDS)
@pytest.mark.parametrize("form", ["qkv", "heads", "tables of k", "kv"])
@pytest.mark.parametrize("of", ["leaf", "view of a leaf", "result", "no gradient"])
def test_rotary_in_place(backend: str, form: str, of: str) -> None:
    """Against apply_rotary_emb of each part; the values stay. Of a leaf too, whose gradient is that of what it held."""
    dtype, tolerance = EXACT[backend]
    cos, sin, cos_k, sin_k = (t.to(dtype) for theta in (10000.0, 100.0) for t in fk.rope_table(4, 9, base=theta))
    shape = {"qkv": (2, 5, 3, 2, 6), "kv": (2, 5, 2, 2, 6)}.get(form, (2, 5, 7, 6))
    start = draw(*shape, dtype=dtype)
    options: dict[str, Any] = {"interleaved": True, "seqlen_offsets": torch.tensor([1, 3])}
    own_k = {"cos_k": cos_k, "sin_k": sin_k} if form == "tables of k" else {}

    def separately(x: Tensor) -> Tensor:
        if form == "kv":
            parts = [*x.unbind(2)]
            return torch.stack([apply_rotary_emb(parts[0], cos, sin, **options, backend=backend), parts[1]], 2)
        parts = [*(x.unbind(2) if form == "qkv" else x.split((3, 2, 2), 2))]
        parts[0] = apply_rotary_emb(parts[0], cos, sin, **options, backend=backend)
        of_k = (cos_k, sin_k) if own_k else (cos, sin)
        parts[1] = apply_rotary_emb(parts[1], *of_k, **options, backend=backend)
        return torch.stack(parts, 2) if form == "qkv" else torch.cat(parts, 2)

    def inside(x: Tensor) -> Tensor:
        if form == "kv":
            return apply_rotary_emb_kv_(x, cos, sin, **options, backend=backend)
        heads = {} if form == "qkv" else {"num_heads_q": 3}
        return apply_rotary_emb_qkv_(x, cos, sin, **own_k, **heads, **options, backend=backend)

    leaf = start.clone().requires_grad_(of != "no gradient")
    x = {"leaf": leaf, "view of a leaf": leaf[:], "result": leaf * 1.0}.get(of, leaf)
    out = inside(x)
    plain = start.clone().requires_grad_()
    expected = separately(plain)
    close(out, expected, tolerance)
    assert out.data_ptr() == x.data_ptr()
    assert torch.equal(x, out)
    assert (out is x) == (of in ("result", "no gradient"))
    assert out.requires_grad == (of != "no gradient")
    if out.requires_grad:
        assert leaf.is_leaf
        dout = draw(*shape, seed=1, dtype=dtype)
        (gradient,) = torch.autograd.grad(out, leaf, dout)
        close(gradient, torch.autograd.grad(expected, plain, dout)[0], tolerance)


@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize("view", [False, True])
def test_rotary_in_place_of_a_leaf(varlen: bool, view: bool) -> None:
    cos, sin = (t.double() for t in fk.rope_table(4, 9))
    options: dict[str, Any] = {"seqlen_offsets": torch.tensor([2, 0])}
    if varlen:
        options |= {"cu_seqlens": torch.tensor([0, 1, 4]), "max_seqlen": 3}
    leaf = draw(*((4,) if varlen else (2, 4)), 2, 6).requires_grad_()
    before = leaf.detach().clone().requires_grad_()
    expected = apply_rotary_emb(before, cos, sin, **options)
    out = apply_rotary_emb(leaf[:] if view else leaf, cos, sin, inplace=True, **options)
    assert out.data_ptr() == leaf.data_ptr()
    assert torch.equal(leaf, expected)
    out.backward(torch.ones_like(out))
    expected.backward(torch.ones_like(out))
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, before.grad)  # type: ignore[arg-type]
