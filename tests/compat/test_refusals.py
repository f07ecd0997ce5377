"""What the functions refuse: a table for each kind, of values and of types. Nothing of the caller's is written to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import foundry_kernels as fk
from foundry_kernels import compat
from foundry_kernels.compat import bert_padding
from foundry_kernels.compat.flash_attn_3 import flash_attn_combine

Row = tuple[Callable[[], Any], str]


def ones(*shape: int) -> Tensor:
    return torch.ones(shape)


def ints(*numbers: int) -> Tensor:
    return torch.tensor(numbers)


Q, KEYS, QKV = ones(2, 3, 4, 8), ones(2, 3, 2, 8), ones(2, 3, 3, 4, 8)
PACKED, TOTAL = ones(6, 2, 8), ints(0, 6)
CACHES = ones(2, 16, 2, 8), ones(2, 16, 2, 8)
NEW = torch.full((2, 3, 2, 8), 2.0)  # not what the caches hold
COS = ones(16, 4)
PAGES, BOTH = ones(6, 4, 2, 8), ones(6, 4, 2, 16)  # of keys and of values side by side
TABLE, STARTS, AT = ones(5, 4), ints(0, 3), ints(0, 2)
LOGITS, TARGET = torch.linspace(-1.0, 1.0, 35).view(5, 7), ints(0, 3, 6, 1, 2)
PROBABILITIES = ones(5, 7) / 7
X = torch.linspace(-4.0, 4.0, 24).view(2, 3, 4)
GIVEN = (Q, KEYS, QKV, PACKED, *CACHES, PAGES, BOTH, TABLE)


def dense(q: Any = Q, k: Any = KEYS, v: Any = KEYS, **options: Any) -> Any:
    return compat.flash_attn_func(q, k, v, **options)


def varlen(*rest: Any, **options: Any) -> Any:
    return compat.flash_attn_varlen_func(PACKED, PACKED, PACKED, TOTAL, TOTAL, *(rest or (6, 6)), **options)


def sdpa(*given: Any, **options: Any) -> Any:
    return compat.scaled_dot_product_attention(*(given or (Q, Q, Q)), **options)


def rotary(x: Any = Q, cos: Tensor = TABLE, sin: Tensor = TABLE, **options: Any) -> Any:
    return compat.apply_rotary_emb(x, cos, sin, **options)


def packed_rotary(cu_seqlens: Tensor = STARTS, max_seqlen: int | None = 3, **options: Any) -> Any:
    return rotary(Q[0], cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, **options)


def qkv_rotary(x: Tensor, *of_k: Tensor, **options: Any) -> Any:
    return compat.apply_rotary_emb_qkv_(x, TABLE, TABLE, *of_k, **options)


def cached(**changed: Any) -> Any:
    given = {"q": Q, "k_cache": CACHES[0], "v_cache": CACHES[1], "k": NEW, "v": NEW, "cache_seqlens": ints(4, 5)}
    return compat.flash_attn_with_kvcache(**(given | changed))  # type: ignore[arg-type]


def paged(*rows: list[int], **changed: Any) -> Any:
    """rows: the table of the pages."""
    table = torch.tensor(rows or ([0, 1], [2, 3])).int()
    given = {"q": Q[:, :1], "k_cache": PAGES, "v_cache": 3 * PAGES, "k": NEW[:, :1], "v": NEW[:, :1]}
    return cached(**given | {"block_table": table, "cache_seqlens": ints(5, 6)} | changed)


def picked(index: Any = TARGET, **options: Any) -> Any:
    return compat.selective_log_softmax(LOGITS, index, **options)


def combined(out: Any = Q[None], lse: Any = Q[None, ..., 0], *rest: Any) -> Any:
    return flash_attn_combine(out, lse, *rest)


def loss(*given: Any, **options: Any) -> Any:
    return compat.cross_entropy(*(given or (LOGITS, TARGET)), **options)


def norms(*given: Any, **options: Any) -> list[Callable[[], Any]]:
    return [lambda f=f: f(*given, **options) for f in (compat.rms_norm, compat.layer_norm)]  # type: ignore[misc]


VALUES: dict[str, list[Row]] = {
    "flash_attn": [
        (lambda: dense(dropout_p=1.0), r"dropout_p must be in \[0, 1\); got 1.0"),
        (lambda: dense(Q[0]), r"q must be \[B, tokens, heads, head_dim\]"),
        (lambda: dense(softmax_scale=-1.0), "softmax_scale must be finite"),
        (lambda: dense(softcap=-1.0), "softcap must be finite and > 0"),
        (lambda: dense(window_size=(-2, 0)), "window_size must hold ints >= 0"),
        (lambda: dense(window_size=torch.tensor([True, True])), "window_size must hold ints"),
        (lambda: varlen(block_table=TOTAL), r"k must be \[num_blocks, page_block_size, Hk, D\] with block_table"),
        (lambda: compat.flash_attn_qkvpacked_func(Q), r"qkv must be \[B, T, 3, H, D\]"),
        (lambda: compat.flash_attn_kvpacked_func(Q, QKV), r"kv must be \[B, S, 2, Hk, D\]"),
        (lambda: compat.flash_attn_varlen_qkvpacked_func(Q[0], STARTS, 3), r"qkv must be \[total, 3, H, D\]"),
        (lambda: compat.flash_attn_varlen_kvpacked_func(Q[0], Q, STARTS, STARTS, 3, 3), r"kv must be \[total_k, 2, Hk"),
    ],
    "scaled_dot_product_attention": [
        (lambda: sdpa(Q, Q, Q, ones(4, 3).bool()), r"attn_mask must broadcast to .* = \(2, 3, 4, 4\); got .*\(4, 3\)"),
        (lambda: sdpa(Q, Q, Q, ones(4, 4), is_causal=True), "attn_mask must be None with is_causal=True"),
        (lambda: sdpa(*3 * (Q[None],), ones(3, 1, 1, 4, 4)), r"to the batch \(1, 2\); got .*\(3, 1, 1, 4, 4\)"),
        (lambda: sdpa(dropout_p=1.5), r"dropout_p must be in \[0, 1\); got 1.5"),
        (lambda: sdpa(ones(1, 4, 3, 8), *2 * (ones(1, 2, 3, 8),)), "key must have query's 4 heads unless enable_gqa"),
        (lambda: sdpa(ones(1, 4, 3, 8), ones(1, 1, 3, 8), ones(1, 2, 3, 8)), "value must have query's 4 heads unless"),
        (lambda: sdpa(*(ones(1, n, 3, 8) for n in (6, 3, 4)), enable_gqa=True), "multiple of value's 4 heads .* got 6"),
        (lambda: sdpa(*(ones(1, n, 3, 8) for n in (4, 0, 0)), enable_gqa=True), "must have a multiple of key's 0"),
        (lambda: sdpa(Q, *2 * (ones(3, 3, 4, 8),)), r"key must have query's batch \(2,\), or .*\(3, 3, 4, 8\)"),
        (lambda: sdpa(Q, ones(3, *Q.shape), ones(4, *Q.shape)), r"value must have query's batch \(3, 2\), or one that"),
        (lambda: sdpa(*3 * (ones(8),)), "query must be"),
    ],
    "padding": [
        (lambda: bert_padding.unpad_input(Q, ones(2, 4)), r"attention_mask must have shape \(2, 3\)"),
        (lambda: bert_padding.unpad_input(Q, ones(2, 3), ones(3)), "unused_mask must have shape"),
        (lambda: bert_padding.unpad_input(ones(8), ones(8)), r"hidden_states must be \[B, S, ...\]"),
        (lambda: bert_padding.pad_input(Q, AT[:1], 2, 3), r"indices must have shape \(2,\)"),
    ],
    "rotary": [
        (lambda: rotary(Q[0]), r"x must be \[B, T, H, D\] without cu_seqlens"),
        (lambda: rotary(cu_seqlens=STARTS, max_seqlen=3), r"x must be \[total, H, D\] with cu_seqlens"),
        (lambda: packed_rotary(max_seqlen=None), "max_seqlen must be given with cu_seqlens"),
        (lambda: packed_rotary(max_seqlen=2), "max_seqlen must be at least the longest sequence, 3; got 2"),
        (lambda: packed_rotary(STARTS - 1), "cu_seqlens must start at 0"),
        (lambda: packed_rotary(STARTS[:0]), r"starting with 0; got shape \(0,\)"),
        (lambda: rotary(sin=TABLE[:3]), r"sin must have shape \(5, 4\)"),
        (lambda: rotary(Q, Q[..., 0], Q[..., 0]), r"cos must be \[P, R/2\]"),
        (lambda: rotary(seqlen_offsets=-1), "seqlen_offsets must be >= 0; got -1"),
        (lambda: rotary(seqlen_offsets=ints(1)), r"seqlen_offsets must have shape \(2,\)"),
        (lambda: qkv_rotary(Q[:, :, None]), r"qkv must be \[B, T, 3, H, D\]; got shape \(2, 3, 1, 4, 8\)"),
        (lambda: qkv_rotary(Q), "num_heads_q must be given for qkv of"),
        (lambda: qkv_rotary(Q, num_heads_q=3), "num_heads_q must leave an even number of qkv's 4 heads; got 3"),
        (lambda: qkv_rotary(Q, TABLE, num_heads_q=2), "cos_k and sin_k must be given together"),
        (lambda: qkv_rotary(Q, TABLE[:2], TABLE[:2], num_heads_q=2), "cos must have a row for each of 3 positions"),
        (lambda: compat.apply_rotary_emb_kv_(Q, TABLE, TABLE), r"kv must be \[B, S, 2, Hk, D\]"),
        (lambda: compat.apply_rotary_emb_kv_(QKV, TABLE, TABLE), r"kv must be \[B, S, 2, Hk, D\]; got .*2, 3, 3, 4, 8"),
    ],
    "a cache": [
        (lambda: cached(cache_seqlens=ints(4, 14)), r"k_cache is full: sequence 1 has 14 of 16 .*, 3 more do not fit"),
        (lambda: cached(cache_seqlens=ints(4, -1)), "cache_seqlens must be in 0 .. 16.*-1"),
        (lambda: cached(cache_seqlens=ints(4)), r"cache_seqlens must have shape \(2,\)"),
        (lambda: cached(cache_seqlens=None), "cache_seqlens must be given with k and v"),
        (lambda: cached(cache_batch_idx=ints(0, -1)), "cache_batch_idx must be in 0 .. 1"),
        (lambda: cached(cache_batch_idx=ints(1, 1)), "cache_batch_idx must name no row twice"),
        (lambda: cached(cache_leftpad=ints(0, 6)), "cache_leftpad must be in 0 .. cache_seqlens=5"),
        (lambda: cached(k_cache=CACHES[0][:1], v_cache=CACHES[1][:1]), "k_cache must have q's batch size 2"),
        (lambda: cached(k_cache=CACHES[0].double()), "k_cache must have q's dtype"),
        (lambda: cached(v_cache=CACHES[1].to("meta")), "v_cache must be on q's device cpu; got meta"),
        (lambda: cached(k_cache=CACHES[0][..., :4]), r"k_cache must have shape \(2, 16, 2, 8\)"),
        (lambda: cached(v_cache=CACHES[1][:, :9]), r"v_cache must have shape \(2, 16, 2, 8\)"),
        (lambda: cached(q=Q[:, :, :3]), "q must have a multiple of k_cache's 2 heads; got 3"),
        (lambda: cached(v=None), "k and v must be given together"),
        (lambda: cached(k=NEW[:, :, :1]), r"k must have shape \(2, 3, 2, 8\)"),
        (lambda: cached(v=NEW[:, :2]), r"v must have shape \(2, 3, 2, 8\)"),
        (lambda: cached(k=NEW.bfloat16()), "k must have q's dtype"),
        (lambda: cached(k=CACHES[0][:, :3]), "k must not share memory with k_cache"),
        (lambda: cached(q=CACHES[1].view(2, 8, 4, 8)[:, :3]), "q must not share memory with v_cache"),
        (lambda: cached(v_cache=CACHES[0]), "v_cache must not share memory with k_cache"),
        (lambda: cached(k_cache=CACHES[0][:1].expand(2, -1, -1, -1)), "k_cache must have a place of its own for each"),
        (lambda: cached(rotary_cos=COS), "rotary_cos and rotary_sin must be given together"),
        (lambda: cached(k=None, v=None, rotary_cos=COS, rotary_sin=COS), "with new keys k to be rotated"),
        (lambda: cached(rotary_cos=ones(16, 5), rotary_sin=ones(16, 5)), "cos must have a last dimension R/2 of 1"),
        (lambda: cached(rotary_cos=COS, rotary_sin=COS[:9]), r"rotary_sin must have shape \(16, 4\)"),
        (lambda: cached(num_splits=-1), "num_splits must be an int >= 0"),
        (lambda: cached(alibi_slopes=ones(3)), r"alibi_slopes must be \[H\]"),
        (lambda: cached(v_cache=ones(2, 16, 2, 600), v=ones(2, 3, 2, 600)), "v_cache must have a head dimension of 1"),
    ],
    "pages": [
        (lambda: paged([0, 1], [-1, 3]), "block_table must be in 0 .. 5.*got -1 for"),
        (lambda: paged([0, 1]), "block_table must have a row for each of 2 sequences"),
        (lambda: paged(block_table=AT[None].to("meta")), "block_table must be on k_cache's device cpu; got meta"),
        (lambda: paged(cache_seqlens=ints(5, 8)), "block_table is too short: sequence 1 has 8 of 8 positions"),
        (lambda: paged(k=None, v=None, cache_seqlens=ints(5, 9)), "cache_seqlens must be in 0 .. 8.*got 9"),
        (lambda: paged(k=None, v=None, cache_seqlens=None), "cache_seqlens must be given with block_table"),
        (lambda: paged(cache_leftpad=ints(0, 7)), "cache_leftpad must be in 0 .. cache_seqlens=6; got 7"),
        (lambda: paged([0, 3], [2, 3], cache_seqlens=ints(4, 4)), "0 and 1 write to position 0 of page 3"),
        (lambda: paged([0, 3], [2, 3], cache_seqlens=ints(4, 7)), "0 would write over what 1 has in page 3"),
        (lambda: paged([1, 1], [2, 3]), "pages of their own: 0 would write over what 0 has in page 1"),
        (lambda: paged(cache_batch_idx=ints(0, 2)), "cache_batch_idx must be in 0 .. 1, block_table's"),
        (lambda: paged(k_cache=BOTH[..., :8], v_cache=BOTH[..., 7:15]), "v_cache must not share memory with k_cache"),
        (lambda: paged(k_cache=BOTH[..., ::2]), "k_cache must have a last stride of 1"),
        (lambda: paged(rotary_cos=COS[:6], rotary_sin=COS[:6], causal=True), "rotary_cos must have a row for each of"),
    ],
    "parts": [
        (lambda: combined(Q[0, 0], Q[None]), r"out_partial must be \[num_splits, B, T, H, D\] or .*\(4, 8\)"),
        (lambda: combined(Q[None][:0], Q[None, ..., 0][:0]), "out_partial must have at least one split"),
        (lambda: combined(lse=Q[None, ..., 0].transpose(2, 3)), r"lse_partial must have shape \(1, 2, 3, 4\)"),
        (lambda: combined(lse=Q[None, ..., 0].to("meta")), "lse_partial must be on out_partial's device cpu; got meta"),
        (lambda: combined(Q[None], Q[None, ..., 0], Q[None]), r"out must have shape \(2, 3, 4, 8\)"),
        (lambda: combined(Q[None], Q[None, ..., 0], Q.to("meta")), "out must be on out_partial's device"),
        (lambda: combined(Q[None], Q[None, ..., 0], Q, torch.float16), r"out must have out_dtype torch\.float16; got"),
    ],
    "logits": [
        (lambda: compat.selective_log_softmax(X, ints(*range(4))), r"index must have the shape of logits, \(2, 3, 4\)"),
        (lambda: picked(temperature=0.0), "temperature must be"),
        (lambda: picked(row_mask=ones(2, 4)), "row_mask must"),
        (lambda: compat.entropy_from_logits(LOGITS, 0), "chunk_size"),
        (lambda: loss(LOGITS, TARGET[:4]), r"target must have shape \(5,\), input's without the classes; got \(4,\)"),
        (lambda: loss(LOGITS[0], TARGET), r"target must have shape \(\)"),
        (lambda: loss(reduction="max"), "reduction must be one of none, mean, sum; got 'max'"),
        (lambda: loss(LOGITS, PROBABILITIES[:, 0]), r"target must have shape \(5, 7\) \(input's, for prob.*5,"),
        (lambda: loss(LOGITS, PROBABILITIES, ignore_index=1), "ignore_index must be negative where target holds prob"),
        (lambda: loss(LOGITS, PROBABILITIES, ones(6)), r"weight must have shape \(7,\)"),
        (lambda: loss(LOGITS, PROBABILITIES.to("meta")), "target must be on input's device cpu; got meta"),
        (lambda: loss(LOGITS, PROBABILITIES, reduction="max"), "reduction must be one of none, mean, sum; got 'max'"),
        (lambda: loss(LOGITS, PROBABILITIES, label_smoothing=1.5), r"label_smoothing must be in 0 \.\. 1; got 1\.5"),
        (lambda: loss(LOGITS[:, :0], PROBABILITIES[:, :0]), "input must have at least one class"),
        (lambda: loss(LOGITS, PROBABILITIES, backend="cuda"), "backend must be one of"),
    ],
    "norms": [
        *((call, r"input must end in normalized_shape \(3,\)") for call in norms(X, (3,))),
        *((call, r"input must end in normalized_shape \(\)") for call in norms(X, ())),
        *((call, r"weight must have shape \(4,\), normalized_shape") for call in norms(X, (4,), ones(3))),
        *((call, "backend must be one of") for call in norms(X, (4,), eps=-1.0, backend="cuda")),
        (lambda: compat.gelu(X, approximate="x"), "approximate must be one of none, tanh; got 'x'"),
    ],
}  # fmt: skip
TYPES: list[Row] = [
    (lambda: dense(dropout_p="0.1"), "dropout_p must be a float; got '0.1'"),
    (lambda: dense([1]), r"q must be a torch\.Tensor"),
    (lambda: dense(window_size=3), "window_size must be a pair"),
    (lambda: dense(window_size=ints(1, 2, 3)), "window_size must be a pair"),
    (lambda: dense(causal="yes"), "causal must be a bool; got 'yes'"),
    (lambda: dense(causal=torch.tensor([True, False])), "causal must be a bool; got tensor"),
    (lambda: dense(deterministic="no"), "deterministic must be a bool; got 'no'"),
    (lambda: dense(softmax_scale=ones(2)), "softmax_scale must be a float; got tensor"),
    (lambda: varlen(torch.tensor(6.0), 6), r"max_seqlen_q must be an int; got tensor\(6\.\)"),
    (lambda: compat.flash_attn_qkvpacked_func([1]), r"qkv must be a torch\.Tensor"),  # type: ignore[arg-type]
    (lambda: sdpa(Q, Q, Q, ones(4, 4).long()), "attn_mask must be bool, float32, .* or float64; got torch.int64"),
    (lambda: sdpa(Q, Q, Q, [[True]]), r"attn_mask must be a torch\.Tensor or an AttentionMask; got list"),
    (lambda: sdpa(scale="1"), "scale must be a float; got '1'"),
    (lambda: sdpa(is_causal="yes"), "is_causal must be a bool; got 'yes'"),
    (lambda: bert_padding.pad_input(Q, AT.float(), 2, 3), "indices must be int32 or int64"),
    (lambda: bert_padding.pad_input(Q, AT, 2.0, 3), "batch must be an int; got 2.0"),  # type: ignore[arg-type]
    (lambda: rotary(seqlen_offsets=ones(2)), "seqlen_offsets must be int32 or int64"),
    (lambda: cached(cache_seqlens=ones(2)), "cache_seqlens must be int32 or int64"),
    (lambda: combined(None), r"out_partial must be a torch\.Tensor; got NoneType"),
    (lambda: combined(lse=Q[None, ..., 0].int()), r"lse_partial must be float32, .*; got torch\.int32"),
    (lambda: combined(Q[None], Q[None, ..., 0], None, torch.int32), r"out_dtype must be float32, .*; got torch\.int32"),
    (lambda: picked(torch.zeros(5)), "index must be"),
    (lambda: loss([1.0], TARGET), r"input must be a torch\.Tensor; got list"),
    (lambda: loss(ignore_index=1.5), "ignore_index must be an int"),
    (lambda: loss(LOGITS, PROBABILITIES.to(torch.float8_e4m3fn)), "target must be float32"),
    *((call, "weight must be a torch.Tensor; got list") for call in norms(X, (4,), [1.0] * 4)),
    *((call, r"input must be a torch\.Tensor") for call in norms([1.0], (1,))),
    *((call, "eps must be a float") for call in norms(X, (4,), eps="1")),
    (lambda: compat.gelu(X.int()), "input must be float32"),
    (lambda: compat.silu([1.0]), r"input must be a torch\.Tensor; got list"),  # type: ignore[arg-type]
]
INDICES: list[Row] = [
    (lambda: packed_rotary(seqlen_offsets=3), "position|index out of range"),
    (lambda: picked(TARGET - 1), "got -1"),
    (lambda: loss(LOGITS, TARGET + 7), r"target must be in 0 \.\. 6"),
]
DOUBLES = {"q": Q, "k_cache": CACHES[0], "v_cache": CACHES[1], "k": NEW, "v": NEW}
UNSERVED: list[Row] = [
    (lambda: cached(backend="native", **{n: x.double() for n, x in DOUBLES.items()}), "does not support float64"),
    *((call, "takes no negative eps") for call in norms(X, (4,), eps=-1.0, backend="triton")),
]


@pytest.mark.parametrize(
    ("call", "message"),
    [pytest.param(*row, id=f"{name}-{i}") for name, rows in VALUES.items() for i, row in enumerate(rows)],
)
def test_values(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
    assert all(bool((x == 1).all()) for x in GIVEN)


@pytest.mark.parametrize(("call", "message"), TYPES, ids=range(len(TYPES)))
def test_types(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call()
    assert all(bool((x == 1).all()) for x in GIVEN)


@pytest.mark.parametrize(("call", "message"), UNSERVED, ids=range(len(UNSERVED)))
def test_backends(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(fk.BackendUnavailable, match=message):
        call()
    assert all(bool((x == 1).all()) for x in GIVEN)


@pytest.mark.parametrize(("call", "message"), INDICES, ids=range(len(INDICES)))
def test_indices(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(IndexError, match=message):
        call()
    assert all(bool((x == 1).all()) for x in GIVEN)
