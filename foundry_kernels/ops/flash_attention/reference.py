"""Plain PyTorch, differentiated by autograd: what every kernel of the op must equal.

In bfloat16 and float16 both matmuls take and return that dtype, and everything between them is in float32, as in a
model without a fused kernel. `q` is folded to ``[B, Hk, G*T, D]`` so that no key or value is repeated.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from foundry_kernels.core.layout import inverse, storage_order
from foundry_kernels.core.registry import wide_dtype
from foundry_kernels.ops.flash_attention.attention_mask import dense
from foundry_kernels.ops.flash_attention.dropout import keep_mask, keep_pairs, keep_scale
from foundry_kernels.ops.flash_attention.options import AttentionOptions
from foundry_kernels.ops.flash_attention.pages import rows_of_all, rows_of_sequence
from foundry_kernels.ops.flash_attention.score_program.differentiable import modified


def flash_attention(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor | tuple[Tensor, ...]:
    options.refuse_others(AttentionOptions._fields, "flash_attention", "reference")
    out, *rows = (_each_by_itself if options.batch_invariant else _dense)(q, k, v, options)
    order = storage_order(q)
    return options.select(out.permute(order).contiguous().permute(inverse(order)), *rows)


def flash_attention_varlen(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor | tuple[Tensor, ...]:
    options.refuse_others(AttentionOptions._fields, "flash_attention", "reference")
    unknown = torch.compiler.is_compiling() or (options.cu_seqlens_q is not None and options.cu_seqlens_q.is_meta)
    attend = _in_one_matrix if unknown else _one_by_one
    return options.select(*(x.contiguous() for x in attend(q, k, v, options)))


def backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    options: AttentionOptions,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv) from an output and lse, which may be those of more keys than k holds: which autograd cannot
    compute."""
    if options.packed:
        dout, q, k, v, out = (x.transpose(0, 1).unsqueeze(0) for x in (dout, q, k, v, out))
        lse, dlse = lse.unsqueeze(0), None if dlse is None else dlse.unsqueeze(0)
        bias = _packed_bias(q.shape[1], q.shape[2], k.shape[2], options)
    else:
        bias = _dense_bias(q, k, options)
    with torch.enable_grad():
        leaves = q.detach().requires_grad_(), k.detach().requires_grad_()
        logits = _scores(*leaves, options, bias)
    empty = (lse == -torch.inf)[..., None]
    weights = torch.exp(logits.detach() - lse[..., None].masked_fill(empty, 0.0).to(logits.dtype))
    delta = (dout.to(logits.dtype) * out.to(logits.dtype)).sum(-1, keepdim=True)
    if dlse is not None:
        delta = delta - dlse[..., None].to(logits.dtype)
    dropped = weights if bias.factor is None else weights * bias.factor.to(weights.dtype)
    b, h, t, s = logits.shape
    folded, dout = (b, k.shape[1], (h // max(k.shape[1], 1)) * t, -1), dout.to(v.dtype)
    dv = torch.matmul(dropped.to(v.dtype).reshape(folded).transpose(-1, -2), dout.reshape(folded))
    of_weights = torch.matmul(dout.reshape(folded), v.transpose(-1, -2)).view(b, h, t, s).to(logits.dtype)
    dq, dk = torch.autograd.grad(logits, leaves, dropped * of_weights - weights * delta)
    if options.packed:
        dq, dk, dv = (x.squeeze(0).transpose(0, 1) for x in (dq, dk, dv))
    return dq, dk, dv


def scores(q: Tensor, k: Tensor, options: AttentionOptions) -> Tensor:
    """The logits ``[B, H, T, S]`` of the softmax of ``[B, H, T, D]`` queries; -inf where a query does not see a key."""
    return _scores(q, k, options, _dense_bias(q, k, options))


class _Bias(NamedTuple):
    """What is added to the scores, each None where it is not needed; what is no ``[T, S]`` broadcasts to
    ``[B, H, T, S]``."""

    rel_pos: Tensor | None  # [T, S], the key's position minus the query's
    hidden: Tensor | None  # which keys a query does not see
    slopes: Tensor | None  # of ALiBi
    added: Tensor | None = None  # a floating mask
    factor: Tensor | None = None  # what dropout multiplies the weights by
    places: tuple[Tensor, ...] = ()  # of score_mod: b, h, q and k


def _dense(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> tuple[Tensor, ...]:
    """(out, lse, entropy, max_logit) of ``[B, H, T, D]`` queries."""
    return _attend(q, k, v, options, _dense_bias(q, k, options))


def _each_by_itself(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> tuple[Tensor, ...]:
    """Does the same as `_dense`, one sequence after the other, so that matmuls have the same shapes in any batch."""

    def of(x: Tensor | None, n: int) -> Tensor | None:
        return x if x is None or x.shape[0] == 1 else x[n : n + 1]

    if q.shape[0] < 2:
        return _dense(q, k, v, options)
    heads = options.dropout_heads
    if _needs_heads(options) and heads is None:
        heads = torch.stack([_heads(options, n, q)[0] for n in range(q.shape[0])])
    slopes = options.alibi_slopes
    found = []
    for n in range(q.shape[0]):
        own = options._replace(
            attn_mask=of(options.attn_mask, n),
            mask_tiles=of(options.mask_tiles, n),
            dropout_heads=of(heads, n),
            alibi_slopes=slopes if slopes is None or slopes.dim() == 1 else slopes[n : n + 1],
        )
        qn, kn, vn = (x[n : n + 1].contiguous() for x in (q, k, v))
        found.append(_dense(qn, kn, vn, own))
    return tuple(torch.cat(each) for each in zip(*found, strict=True))


def _dense_bias(q: Tensor, k: Tensor, options: AttentionOptions) -> _Bias:
    rel_pos = None
    if options.alibi_slopes is not None or options.window_left is not None or options.window_right is not None:
        t, s = q.shape[2], k.shape[2]
        q_pos = torch.arange(t, device=q.device) + (s - t if options.bottom_right else 0)
        rel_pos = torch.arange(s, device=q.device) - q_pos[:, None]
    slopes = None if options.alibi_slopes is None else options.alibi_slopes[..., None, None]
    hidden, added = _outside_window(rel_pos, options), None
    if options.attn_mask is not None and options.attn_mask.dtype == torch.bool:
        hidden = _either(hidden, ~options.attn_mask)
    elif options.attn_mask is not None:
        added = options.attn_mask
    if options.mask_tiles is not None and options.mask_bits is not None:
        hidden = _either(hidden, ~dense(options.mask_tiles, options.mask_bits, q.shape[2], k.shape[2]))
    factor = None
    if options.dropout_p is not None and options.dropout_seed is not None:
        shape = (*q.shape[:3], k.shape[2])
        kept = keep_mask(shape, options.dropout_p, options.dropout_seed, options.dropout_heads)
        factor = kept * keep_scale(options.dropout_p)
    return _Bias(rel_pos, hidden, slopes, added, factor, _places(q, k, options) if options.score_mod else ())


def _places(q: Tensor, k: Tensor, options: AttentionOptions) -> tuple[Tensor, ...]:
    """The numbers of the sequences, heads, queries and keys, which broadcast to ``[B, H, T, S]``."""
    sizes = (*q.shape[:3], k.shape[2])
    ranges = [torch.arange(n, device=q.device).view([-1 if i == d else 1 for i in range(4)])
              for d, n in enumerate(sizes)]  # fmt: skip
    if options.dropout_heads is not None:
        heads = options.dropout_heads[..., None, None]
        ranges[:2] = heads >> 32, heads & 0xFFFFFFFF
    return tuple(ranges)


def _needs_heads(options: AttentionOptions) -> bool:
    """Whether a part of the batch must know the numbers that its heads have in the whole."""
    return options.dropout_p is not None or options.score_mod is not None


def _either(hidden: Tensor | None, other: Tensor) -> Tensor:
    return other if hidden is None else hidden | other


def _outside_window(rel_pos: Tensor | None, options: AttentionOptions) -> Tensor | None:
    """Which keys lie outside of the window; `rel_pos` is the key's position minus the query's, after alignment."""
    left, right = options.window_left, options.window_right
    if rel_pos is None or (left is None and right is None):
        return None
    hidden = torch.zeros_like(rel_pos, dtype=torch.bool)
    if left is not None:
        hidden = hidden | (rel_pos < -left)
    if right is not None:
        hidden = hidden | (rel_pos > right)
    return hidden


def _attend(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, bias: _Bias) -> tuple[Tensor, ...]:
    """(out, lse, entropy, max_logit)."""
    probabilities, *per_row = _softmax(_scores(q, k, options, bias), options.sinks)
    if bias.factor is not None:
        probabilities = probabilities * bias.factor.to(probabilities.dtype)
    return (weighted(probabilities, v), *per_row)


def _scores(q: Tensor, k: Tensor, options: AttentionOptions, bias: _Bias) -> Tensor:
    rel_pos, hidden, slopes, added, _, places = bias
    b, h, t, d = q.shape
    hk, s = k.shape[1:3]
    folded = q.reshape(b, hk, (h // hk) * t, d)
    scores = torch.matmul(folded, k.transpose(-1, -2)).view(b, h, t, s).to(wide_dtype(q.dtype)) * options.scale
    scores = _bent(scores, options)
    if slopes is not None:
        assert rel_pos is not None
        scores = scores - slopes.to(scores.dtype) * rel_pos.abs()
    if added is not None:
        scores = scores + added.to(scores.dtype)
    if options.score_mod:
        scores = modified(options.score_mod, scores, places, options.score_tensors or ())
    return scores if hidden is None else scores.masked_fill(hidden, -torch.inf)


def _bent(scores: Tensor, options: AttentionOptions) -> Tensor:
    """The scaled products after the soft cap."""
    return scores if options.softcap is None else options.softcap * torch.tanh(scores / options.softcap)


def bent_slope(scores: Tensor, options: AttentionOptions) -> Tensor | float:
    """The derivative of `_bent`, from its result."""
    return 1.0 if options.softcap is None else 1 - (scores / options.softcap).square()


def weighted(weights: Tensor, v: Tensor) -> Tensor:
    """``[B, H, T, Dv]``: the sums of the values by their weights ``[B, H, T, S]``."""
    b, h, t, s = weights.shape
    hk, dv = v.shape[1], v.shape[3]
    return torch.matmul(weights.to(v.dtype).view(b, hk, (h // hk) * t, s), v).view(b, h, t, dv)


def _softmax(scores: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Softmax of ``[B, H, T, S]`` over the last dimension with one sink per head and, for each row ``[B, H, T]``, its
    log-sum-exp and (outside of autograd) its entropy and largest score.

    A row of -inf gives probabilities 0 and lse -inf. Autograd multiplies the masked branch of a `where` by 0, and
    0 * inf is NaN: so every value that is not finite is replaced before the function whose derivative it would spoil.
    """
    peak = scores.detach().new_full((*scores.shape[:-1], 1), -torch.inf)
    if scores.shape[-1] > 0:
        peak = scores.detach().amax(-1, keepdim=True)
    largest, empty = peak, peak == -torch.inf
    if sinks is not None:
        logit = sinks.to(scores.dtype)[:, None, None]
        peak = torch.maximum(peak, logit.detach())
    peak = peak.masked_fill(empty, 0.0)
    weights = torch.exp(scores - peak)
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp((logit - peak).masked_fill(empty, -torch.inf))
    total = total.masked_fill(empty, 1.0)
    lse = (peak + torch.log(total)).masked_fill(empty, -torch.inf)
    with torch.no_grad():  # sum of p (s - peak): no number in it is large, and the weight of -inf counts as 0
        mean = (weights * (scores - peak).masked_fill(weights == 0, 0.0)).sum(-1, keepdim=True)
        if sinks is not None:
            below = (logit - peak).masked_fill(empty, 0.0)
            mean = mean + torch.exp(below).masked_fill(empty, 0.0) * below
        entropy = torch.log(total) - mean / total
    return weights / total, lse.squeeze(-1), entropy.squeeze(-1), largest.squeeze(-1)


def _one_by_one(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> tuple[Tensor, ...]:
    """Computes one sequence after the other. This is the least work, but it reads the lengths."""
    assert options.cu_seqlens_q is not None
    cu_seqlens_q, alibi_slopes = options.cu_seqlens_q.tolist(), options.alibi_slopes
    keys = list(_keys_of_sequences(k, v, options))
    if len(cu_seqlens_q) == 1:  # no sequence: one without tokens keeps the result on the graph
        cu_seqlens_q, alibi_slopes = [0, 0], None
        keys = [(k[:0], v[:0])] if options.block_table is None else [(k[:0, 0], v[:0, 0])]
    found = []
    for n in range(len(cu_seqlens_q) - 1):
        tokens_q = slice(*cu_seqlens_q[n : n + 2])
        qn, kn, vn = (x.transpose(0, 1).unsqueeze(0) for x in (q[tokens_q], *keys[n]))
        slopes = alibi_slopes[n] if alibi_slopes is not None and alibi_slopes.dim() == 2 else alibi_slopes
        heads = _heads(options, n, q) if _needs_heads(options) else None
        out, *rows = _dense(qn, kn, vn, options._replace(alibi_slopes=slopes, dropout_heads=heads))
        found.append((out.squeeze(0).transpose(0, 1), *(x.squeeze(0) for x in rows)))
    outs, *each = (list(x) for x in zip(*found, strict=True))
    return (torch.cat(outs), *(torch.cat(rows, dim=1) for rows in each))


def _keys_of_sequences(k: Tensor, v: Tensor, options: AttentionOptions) -> Iterator[tuple[Tensor, Tensor]]:
    """The keys and values ``[S, Hk, D]`` of each sequence."""
    if options.block_table is None:
        assert options.cu_seqlens_k is not None
        for tokens in pairwise(options.cu_seqlens_k.tolist()):
            yield k[slice(*tokens)], v[slice(*tokens)]
        return
    assert options.seqused_k is not None
    ends = options.seqused_k.tolist()
    begins = [0] * len(ends) if options.leftpad_k is None else options.leftpad_k.tolist()
    for table, begin, end in zip(options.block_table, begins, ends, strict=True):
        yield rows_of_sequence(k, table, begin, end), rows_of_sequence(v, table, begin, end)


def _heads(options: AttentionOptions, n: int, q: Tensor) -> Tensor:
    """``[1, H]``: the numbers of the heads of packed sequence n, see `dropout`."""
    if options.dropout_heads is not None:
        return options.dropout_heads[n : n + 1]
    return (n << 32) + torch.arange(q.shape[1], device=q.device)[None]


def _in_one_matrix(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> tuple[Tensor, ...]:
    """All sequences as one, with the pairs of different ones hidden: torch.compile can trace it, as nothing is read."""
    if options.block_table is not None:
        k, v, options = _packed_pages(q.shape[1], k, v, options)
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out, *rows = _attend(q, k, v, options, _packed_bias(q.shape[1], q.shape[2], k.shape[2], options))
    return (out.squeeze(0).transpose(0, 1), *(x.squeeze(0) for x in rows))


def _packed_pages(
    n_heads: int, k: Tensor, v: Tensor, options: AttentionOptions
) -> tuple[Tensor, Tensor, AttentionOptions]:
    """Pages as packed sequences of one length, that of the table. What a sequence does not attend to is a sequence that
    has no query, and 0, so that nothing in it spoils a sum."""
    table, ends, begins = options.block_table, options.seqused_k, options.leftpad_k
    assert table is not None
    assert ends is not None
    n_batch, length = table.shape[0], table.shape[1] * k.shape[1]
    begins = torch.zeros_like(ends) if begins is None else begins
    place = torch.arange(length, device=k.device)
    used = ((place >= begins[:, None]) & (place < ends[:, None]))[..., None, None]
    k, v = (rows_of_all(x, table).masked_fill(~used, 0.0).flatten(0, 1) for x in (k, v))
    # Three sequences for each: what is before the padding's end, what is attended to, what is behind.
    first = torch.arange(n_batch, device=k.device) * length
    cu_seqlens_k = torch.stack((first, first + begins, first + ends), 1).flatten()
    cu_seqlens_k = torch.cat((cu_seqlens_k, cu_seqlens_k.new_full((1,), n_batch * length)))
    starts = options.cu_seqlens_q
    assert starts is not None
    cu_seqlens_q = torch.cat((torch.stack((starts[:-1], starts[:-1], starts[1:]), 1).flatten(), starts[-1:]))
    slopes = options.alibi_slopes
    if slopes is not None and slopes.dim() == 2:
        slopes = slopes.repeat_interleave(3, 0)
    lengths = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    if options.score_mod:
        heads = (torch.arange(n_batch, device=k.device)[:, None] << 32) + torch.arange(n_heads, device=k.device)
        options = options._replace(dropout_heads=heads.repeat_interleave(3, 0))
    return k, v, options._replace(**lengths, alibi_slopes=slopes, block_table=None, seqused_k=None, leftpad_k=None)


def _packed_bias(n_heads: int, n_queries: int, n_keys: int, options: AttentionOptions) -> _Bias:
    """Returns the bias of packed sequences in one matrix, in which tokens of different ones do not see each other."""
    cu_seqlens_q, cu_seqlens_k = options.cu_seqlens_q, options.cu_seqlens_k
    assert cu_seqlens_q is not None
    assert cu_seqlens_k is not None
    index_q = torch.arange(n_queries, device=cu_seqlens_q.device)
    index_k = torch.arange(n_keys, device=cu_seqlens_q.device)
    sequence_q = torch.searchsorted(cu_seqlens_q[1:], index_q, right=True)
    sequence_k = torch.searchsorted(cu_seqlens_k[1:], index_k, right=True)
    q_pos = index_q - cu_seqlens_q[sequence_q]
    if options.bottom_right:
        q_pos = q_pos + (cu_seqlens_k.diff() - cu_seqlens_q.diff())[sequence_q]
    rel_pos = index_k - cu_seqlens_k[sequence_k] - q_pos[:, None]
    hidden = sequence_q[:, None] != sequence_k
    outside = _outside_window(rel_pos, options)
    if outside is not None:
        hidden = hidden | outside
    slopes = options.alibi_slopes
    if slopes is not None:
        slopes = slopes[:, None, None] if slopes.dim() == 1 else slopes[sequence_q].t()[..., None]
    factor = None
    places: tuple[Tensor, ...] = ()
    if _needs_heads(options):
        in_q, in_k = (index_q - cu_seqlens_q[sequence_q])[:, None], index_k - cu_seqlens_k[sequence_k]
        heads = torch.arange(n_heads, device=cu_seqlens_q.device)[:, None] + (sequence_q << 32)  # [H, T]
        if options.dropout_heads is not None:
            heads = options.dropout_heads[sequence_q].t()
        head, batch = heads[..., None] & 0xFFFFFFFF, heads[..., None] >> 32
        places = tuple([x[None] if x.dim() == 3 else x[None, None] for x in (batch, head, in_q, in_k)])
    if options.dropout_p is not None and options.dropout_seed is not None:
        kept = keep_pairs(in_q, in_k, head, batch, options.dropout_p, options.dropout_seed)
        factor = kept * keep_scale(options.dropout_p)
    return _Bias(rel_pos, hidden, slopes, None, factor, places)
