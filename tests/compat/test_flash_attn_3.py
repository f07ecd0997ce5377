"""FlashAttention 3's signatures and PyTorch's varlen_attn, against plain matrices of one sequence at a time."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_loops import EXACT, close, draw, over_backends, plain
from torch import Tensor

from foundry_kernels.compat import flash_attn_3, varlen_attn
from foundry_kernels.compat.flash_attn_3 import (
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True, "softmax_scale": 0.3},
    "window": {"window_size": (3, 1), "softcap": 2.0},
    "chunk": {"attention_chunk": 4},
    "causal-chunk": {"attention_chunk": 3, "causal": True, "softcap": 2.0},
    "window-chunk": {"attention_chunk": 4, "window_size": (2, 1)},
    "long-chunk": {"attention_chunk": 100, "causal": True},
}
over_options = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
over_qv = pytest.mark.parametrize("with_qv", [False, True], ids=["qk", "qv"])


def agree(found: Any, expected: Any, inputs: list[Tensor], tolerance: float) -> None:
    """Values and, of the first pair, gradients: `found` is of `inputs`, and so is `expected`."""
    for actual, wanted in zip(found, expected, strict=True):
        assert actual.shape == wanted.shape
        close(actual.detach(), wanted.detach(), tolerance)
    dout = draw(*found[0].shape, seed=9)
    grads = torch.autograd.grad(found[0], inputs, dout.to(found[0].dtype), allow_unused=True)
    wanted = torch.autograd.grad(expected[0], inputs, dout, allow_unused=True)
    for actual, other in zip(grads, wanted, strict=True):
        assert (actual is None) <= (other is None or not other.any())
        if actual is not None:
            close(actual, torch.zeros_like(actual) if other is None else other, 4 * tolerance)


def inputs_of(backend: str, *shapes: tuple[int, ...]) -> list[Tensor]:
    return [draw(*s, seed=i, dtype=EXACT[backend][0]).requires_grad_() for i, s in enumerate(shapes)]


@over_backends
@over_options
@over_qv
@pytest.mark.parametrize("tokens", [(6, 9), (9, 4), (20, 20), (1, 7), (3, 0)], ids=str)
def test_dense(backend: str, options: dict[str, Any], with_qv: bool, tokens: tuple[int, int]) -> None:
    """Few queries and many, which `qv` takes by other ways."""
    t, s = tokens
    q, k, v, qv = given = inputs_of(backend, (2, t, 4, 8), (2, s, 2, 8), (2, s, 2, 5), (2, t, 4, 5))
    own = {"qv": qv} if with_qv else {}
    found = flash_attn_func(q, k, v, **options, **own, return_attn_probs=True, backend=backend)
    assert torch.equal(flash_attn_func(q, k, v, **options, **own, backend=backend), found[0])  # type: ignore[arg-type]
    each = [plain(q[n], k[n], v[n], qv[n] if with_qv else None, **options) for n in range(2)]
    agree(found, [torch.stack(x) for x in zip(*each, strict=True)], given[: 4 if with_qv else 3], EXACT[backend][1])


CU_Q, CU_K = torch.tensor([0, 5, 5, 14, 16], dtype=torch.int32), torch.tensor([0, 7, 10, 14, 17], dtype=torch.int32)
USED: dict[str, dict[str, list[int]]] = {
    "all": {},
    "keys": {"seqused_k": [4, 3, 0, 1]},
    "queries": {"seqused_q": [5, 0, 6, 0]},
    "both": {"seqused_q": [2, 0, 9, 1], "seqused_k": [6, 0, 3, 3]},
}


def of_sequences(
    q: Tensor, k: Tensor, v: Tensor, qv: Tensor | None, used: dict[str, list[int]], **options: Any
) -> tuple[Tensor, Tensor]:
    """The packed result, with 0 and -inf for the queries that are not in use."""
    outs, lses = [], []
    for n in range(len(CU_Q) - 1):
        (first, after), (first_k, after_k) = CU_Q[n : n + 2].tolist(), CU_K[n : n + 2].tolist()
        last = first + used["seqused_q"][n] if "seqused_q" in used else after
        last_k = first_k + used["seqused_k"][n] if "seqused_k" in used else after_k
        here, keys = slice(first, last), slice(first_k, last_k)
        out, lse = plain(q[here], k[keys], v[keys], None if qv is None else qv[here], **options)
        outs += [out, out.new_zeros(after - last, *out.shape[1:])]
        lses += [lse, lse.new_full((lse.shape[0], after - last), -torch.inf)]
    return torch.cat(outs), torch.cat(lses, 1)


@over_backends
@over_options
@over_qv
@pytest.mark.parametrize("used", USED.values(), ids=USED)
def test_varlen(backend: str, options: dict[str, Any], with_qv: bool, used: dict[str, list[int]]) -> None:
    q, k, v, qv = given = inputs_of(backend, (16, 4, 8), (17, 2, 8), (17, 2, 5), (16, 4, 5))
    own: dict[str, Any] = {name: torch.tensor(x, dtype=torch.int32) for name, x in used.items()}
    own |= {"qv": qv} if with_qv else {}
    found = flash_attn_varlen_func(q, k, v, CU_Q, CU_K, 9, 7, **own, **options, return_attn_probs=True, backend=backend)
    expected = of_sequences(q, k, v, qv if with_qv else None, used, **options)
    agree(found, expected, given[: 4 if with_qv else 3], EXACT[backend][1])


@over_backends
def test_what_is_not_in_use_is_not_read(backend: str) -> None:
    q, k, v = inputs_of(backend, (16, 4, 8), (17, 2, 8), (17, 2, 5))
    used_k = torch.tensor([4, 3, 0, 1])
    idle = torch.cat([torch.arange(n) >= u for n, u in zip(CU_K.diff().tolist(), used_k.tolist(), strict=True)])
    spoilt = [x.detach().masked_fill(idle[:, None, None], torch.nan).requires_grad_() for x in (k, v)]
    out = flash_attn_varlen_func(q, *spoilt, CU_Q, CU_K, 9, 7, seqused_k=used_k, causal=True, backend=backend)
    assert isinstance(out, Tensor)
    grads = torch.autograd.grad(out.sum(), (q, *spoilt))
    assert all(x.isfinite().all() for x in (out, *grads))
    assert not any(g[idle].any() for g in grads[1:])


@over_backends
@pytest.mark.parametrize("tokens", [(3, 9), (18, 20)], ids=str)
def test_heads_of_512_and_latent_attention(backend: str, tokens: tuple[int, int]) -> None:
    """D of 64 and Dv of 512, together wider than a kernel takes: dense, packed, and with the roles exchanged."""
    t, s = tokens
    tolerance = EXACT[backend][1]
    for d, dv in ((64, 512), (500, 40)):
        shapes = ((t, 2, d), (s, 1, d), (s, 1, dv), (t, 2, dv))
        q, k, v, qv = given = [(x.detach() * 0.2).requires_grad_() for x in inputs_of(backend, *shapes)]
        options: dict[str, Any] = {"causal": True, "return_attn_probs": True, "backend": backend}
        out, lse = flash_attn_func(q[None], k[None], v[None], qv=qv[None], **options)
        agree((out[0], lse[0]), plain(q, k, v, qv, causal=True), given, tolerance)
        cu = torch.tensor([0, 0, t]), torch.tensor([0, 0, s])
        found = flash_attn_varlen_func(q, k, v, *cu, t, s, qv=qv, **options)
        agree(found, plain(q, k, v, qv, causal=True), given, tolerance)
        out, lse = flash_attn_func(q[None], k[None], v[None], **options)
        agree((out[0], lse[0]), plain(q, k, v, causal=True), given[:3], tolerance)
        none = (q[:0], k[:0], v[:0], *[torch.tensor([0])] * 2, 0, 0)
        assert flash_attn_varlen_func(*none, qv=qv[:0], backend=backend).shape == (0, 2, dv)  # type: ignore[union-attr]


@over_backends
def test_qkv_packed(backend: str) -> None:
    dtype, tolerance = EXACT[backend]
    qkv = draw(2, 6, 3, 4, 8, dtype=dtype)
    out, lse = flash_attn_qkvpacked_func(qkv, causal=True, return_attn_probs=True, backend=backend)
    close(out[1], plain(*qkv[1].unbind(1), causal=True)[0], tolerance)
    close(lse[1], plain(*qkv[1].unbind(1), causal=True)[1], tolerance)
    heads = draw(2, 6, 8, 8, dtype=dtype)
    out = flash_attn_qkvpacked_func(heads, attention_chunk=4, num_heads_q=4, backend=backend)
    close(out[1], plain(*heads[1].split((4, 2, 2), 1), attention_chunk=4)[0], tolerance)  # type: ignore[index]


@over_backends
@over_options
@over_qv
@pytest.mark.parametrize("ragged", [False, True], ids=["one-length", "ragged"])
def test_kvcache(backend: str, options: dict[str, Any], with_qv: bool, ragged: bool) -> None:
    dtype, tolerance = EXACT[backend]
    q, qv = draw(2, 3, 4, 8, dtype=dtype), draw(2, 3, 4, 5, seed=1, dtype=dtype) if with_qv else None
    cache_k, cache_v = draw(3, 20, 2, 8, seed=2, dtype=dtype), draw(3, 20, 2, 5, seed=3, dtype=dtype)
    new_k, new_v = draw(2, 3, 2, 8, seed=4, dtype=dtype), draw(2, 3, 2, 5, seed=5, dtype=dtype)
    lengths, rows, pads = ([9, 6], [2, 0], [2, 0]) if ragged else ([9, 9], [0, 1], [0, 0])
    where: dict[str, Any] = {"cache_seqlens": 9, "cache_batch_idx": torch.tensor([0, 1])}
    if ragged:
        where = {"cache_seqlens": torch.tensor(lengths), "cache_batch_idx": torch.tensor(rows)}
        where["cache_leftpad"] = torch.tensor(pads)
    written_k, written_v = cache_k.clone(), cache_v.clone()
    out, lse = flash_attn_with_kvcache(
        q, written_k, written_v, new_k, new_v, qv, **where, **options, return_softmax_lse=True, backend=backend
    )
    for n, (length, row, pad) in enumerate(zip(lengths, rows, pads, strict=True)):
        cache_k[row, length : length + 3], cache_v[row, length : length + 3] = new_k[n], new_v[n]
        keys, values = cache_k[row, pad : length + 3], cache_v[row, pad : length + 3]
        expected = plain(q[n], keys, values, None if qv is None else qv[n], **options)
        close(out[n], expected[0], tolerance)
        close(lse[n], expected[1], tolerance)
    assert torch.equal(written_k, cache_k)
    assert torch.equal(written_v, cache_v)


def test_queries_of_a_chunk_are_rotated_one_by_one() -> None:
    """As with a causal mask or a window: they have positions of their own."""
    cos, sin = torch.rand(12, 4).double(), torch.rand(12, 4).double()
    q, k = draw(1, 3, 2, 8), draw(1, 3, 2, 8, seed=1)
    outs = []
    for options in ({"attention_chunk": 100}, {"window_size": (100, 100)}):
        cache = torch.zeros(1, 12, 2, 8, dtype=torch.float64)
        outs.append(
            flash_attn_with_kvcache(q, cache, cache.clone(), k, k, None, cos, sin, cache_seqlens=2, **options)  # type: ignore[arg-type]
        )
    assert torch.equal(*outs)  # type: ignore[arg-type]


# --- torch.nn.attention.varlen ----------------------------------------------------------------------------------------


class Aux:
    lse = True


@over_backends
@pytest.mark.parametrize("used", [None, [4, 3, 0, 1]], ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"window_size": (-1, 0)}, {"window_size": (2, 1), "scale": 0.3}, {"scale": -0.3}], ids=str
)
def test_varlen_attn(backend: str, used: list[int] | None, options: dict[str, Any]) -> None:
    q, k, v = given = inputs_of(backend, (16, 4, 8), (17, 2, 8), (17, 2, 5))
    seqused = None if used is None else torch.tensor(used)
    own = {"enable_gqa": True, "seqused_k": seqused, "backend": backend, **options}
    found = varlen_attn(q, k, v, CU_Q, CU_K, 9, 7, return_aux=Aux, **own)
    assert torch.equal(varlen_attn(q, k, v, CU_Q, CU_K, 9, 7, **own), found[0])  # type: ignore[arg-type]
    named = {"softmax_scale" if name == "scale" else name: x for name, x in options.items()}
    expected = of_sequences(q, k, v, None, {} if used is None else {"seqused_k": used}, **named)
    agree(found, expected, given, EXACT[backend][1])


def test_varlen_attn_has_torchs_signature() -> None:
    torchs = pytest.importorskip("torch.nn.attention.varlen")
    own = inspect.signature(varlen_attn).parameters
    for name, wanted in inspect.signature(torchs.varlen_attn).parameters.items():
        if name != "is_causal":  # of torch 2.11 and before
            assert (own[name].kind, own[name].default) == (wanted.kind, wanted.default)
    request = torchs.AuxRequest(lse=False)
    x = torch.ones(4, 2, 8)
    cu_seq = torch.tensor([0, 4], dtype=torch.int32)
    assert isinstance(varlen_attn(x, x, x, cu_seq, cu_seq, 4, 4, return_aux=request), Tensor)


# --- compiled, signatures, refusals -----------------------------------------------------------------------------------


DESCALE = "q_descale=None k_descale=None v_descale=None"
SIGNATURES = {
    flash_attn_func: (
        f"q k v softmax_scale=None causal=False qv=None {DESCALE} window_size=(-1,-1) attention_chunk=0 softcap=0.0 "
        "num_splits=1 pack_gqa=None deterministic=False sm_margin=0 return_attn_probs=False"
    ),
    flash_attn_qkvpacked_func: (
        f"qkv softmax_scale=None causal=False {DESCALE} window_size=(-1,-1) attention_chunk=0 softcap=0.0 "
        "deterministic=False num_heads_q=None sm_margin=0 return_attn_probs=False"
    ),
    flash_attn_varlen_func: (
        "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k seqused_q=None seqused_k=None softmax_scale=None "
        f"causal=False qv=None {DESCALE} window_size=(-1,-1) attention_chunk=0 softcap=0.0 num_splits=1 pack_gqa=None "
        "deterministic=False sm_margin=0 return_attn_probs=False"
    ),
    flash_attn_with_kvcache: (
        "q k_cache v_cache k=None v=None qv=None rotary_cos=None rotary_sin=None cache_seqlens=None "
        "cache_batch_idx=None cache_leftpad=None page_table=None cu_seqlens_q=None cu_seqlens_k_new=None "
        f"max_seqlen_q=None rotary_seqlens=None {DESCALE} softmax_scale=None causal=False window_size=(-1,-1) "
        "attention_chunk=0 softcap=0.0 rotary_interleaved=True scheduler_metadata=None num_splits=0 pack_gqa=None "
        "sm_margin=0 return_softmax_lse=False"
    ),
}


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda f: f.__name__)
def test_signatures(function: Callable[..., object]) -> None:
    parameters = inspect.signature(function).parameters.values()
    own = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    found = [p.name if p.default is p.empty else f"{p.name}={p.default}".replace(" ", "") for p in own]
    assert found == SIGNATURES[function].split()
    assert [p.name for p in parameters if p not in own] == ["backend"]
    assert function.__name__ in flash_attn_3.__all__


X, PACKED, ONE, WIDE = torch.ones(2, 3, 4, 8), torch.ones(6, 4, 8), torch.tensor([0, 6]), torch.ones(1, 2, 1, 300)


def dense(q: Any = X, k: Any = X, **options: Any) -> Any:
    return flash_attn_func(q, k, k, **options)


def cached(**options: Any) -> Any:
    return flash_attn_with_kvcache(X, X, X, **options)


def varlen(**options: Any) -> Any:
    return flash_attn_varlen_func(PACKED, PACKED, PACKED, ONE, ONE, 6, 6, **options)


def torchs(cu_seq_k: Any = ONE, q: Any = PACKED, k: Any = PACKED, **options: Any) -> Any:
    return varlen_attn(q, k, k, ONE, cu_seq_k, 6, 6, **options)


BAD: list[tuple[Callable[[], Any], str]] = [
    (lambda: dense(q_descale=X), "q_descale must be None: 8-bit inputs"),
    (lambda: dense(X[0]), r"q must be \[B, tokens, heads, head_dim\]"),
    (lambda: dense(WIDE, WIDE, qv=WIDE, softcap=1.0), "softcap must be 0 with qv .* 512 dimensions together; got 600"),
    (lambda: dense(k=X[:, :, :3], qv=X), "q must have a multiple of k's 3 heads; got 4"),
    (lambda: cached(page_table=ONE, cache_seqlens=1), r"page_table must be \[B, max_blocks\]"),
    (lambda: cached(page_table=ONE[None], qv=X), "qv does not support page_table or"),
    (lambda: cached(cu_seqlens_q=ONE), r"q must be \[total, heads, head_dim\]"),
    (lambda: cached(cu_seqlens_k_new=ONE), "cu_seqlens_k_new needs cu_seqlens_q"),
    (lambda: cached(rotary_seqlens=ONE), "rotary_seqlens must be None"),
    (lambda: cached(qv=X[..., :5]), r"qv must have shape \(2, 3, 4, 8\)"),
    (lambda: cached(attention_chunk=1.5), "attention_chunk must be an int; got 1.5"),
    (lambda: varlen(num_splits=-1), "num_splits must be an int >= 0; got -1"),
    (lambda: varlen(sm_margin=0.5), "sm_margin must be an int; got 0.5"),
    (lambda: varlen(attention_chunk=-1), "attention_chunk must be >= 0; got -1"),
    (lambda: varlen(qv=PACKED.double()), "qv must have q's dtype"),
    (lambda: varlen(seqused_k=torch.tensor([7])), "seqused_k must be in 0 .. 6, .* got 7"),
    (lambda: varlen(seqused_q=ONE), r"seqused_q must have shape \(1,\)"),
    (lambda: varlen(seqused_q=torch.ones(1)), "seqused_q must be int32 or int64"),
    (lambda: flash_attn_qkvpacked_func(X, num_heads_q=3), "must leave an even number of qkv's 4 heads; got 3"),
    (lambda: flash_attn_qkvpacked_func(X), "num_heads_q must be given"),
    (lambda: torchs(block_table=ONE), r"key must be \[num_blocks, page_block"),
    (lambda: torchs(None), "cu_seq_k must be given"),
    (lambda: torchs(k=PACKED[:, :2]), "key must have query's 4 heads unless enable_gqa=True; got 2"),
    (lambda: torchs(scale="1"), "scale must be a float; got '1'"),
]


@pytest.mark.parametrize(("call", "message"), BAD, ids=range(len(BAD)))
def test_bad_input(call: Callable[[], Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        call()
