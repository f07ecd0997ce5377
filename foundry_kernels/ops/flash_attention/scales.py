"""The size of what a result of attention sums, by which the parity suite says how exact it must be."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from foundry_kernels.core.contract import Options, Scales, Tensors
from foundry_kernels.ops.flash_attention import reference
from foundry_kernels.ops.flash_attention.checks import dense_options
from foundry_kernels.ops.flash_attention.dropout import keep_mask, keep_scale
from foundry_kernels.ops.flash_attention.pages import rows_of_sequence

#: Gradients that a kernel computes from delta, which comes from the rounded output: whatever their own dtype and size,
#: they are allowed one rounding for each row.
FROM_OUTPUT = ("q", "k", "sinks", "attn_mask")


def of_output(
    options: Options, cotangents: tuple[Tensor, ...], error: Tensor
) -> tuple[dict[str, Any], tuple[Tensor, ...]]:
    """``delta = dout . out - dlse`` is all that a kernel makes of the output: it is off by as much as if lse's gradient
    were."""
    dlse = -(cotangents[0] * error).sum(-1)
    if error.dim() == 3:
        dlse = dlse.t()  # packed: out is [total, H, Dv], lse [H, total]
    rest = cotangents[1:]
    if options.get("return_lse"):
        dlse, rest = dlse + rest[0], rest[1:]
    return {**options, "return_lse": True}, (cotangents[0], dlse, *rest)


#: Two float32 roundings, as a fraction of the error that tiny() allows for a sum.
_ROUNDING = 1 / 16


def scales(args: Tensors, options: Options, cotangents: tuple[Tensor, ...]) -> Scales:
    """Size of the terms that each result sums (float64 inputs), by name: the root of the sum of their squares.

    In gradients ``dout . v - delta`` of each score cancels, and so do the sums over keys (q), queries (k, v) and both
    (sinks). In all results a score is itself a sum, and the exponential multiplies its error by ``p``: large scores
    that happen to leave a small or saturated result are not compared with the size of that result.
    """
    tensors = dict(args)
    cotangents = cotangents[: 2 if options.get("return_lse") else 1]  # statistics have none
    q, k, v = (tensors.pop(name) for name in "qkv")
    if "cu_seqlens_q" not in tensors:
        return _scales(q, k, v, {**options, **tensors}, cotangents)
    cu_seqlens_q = tensors.pop("cu_seqlens_q")
    keys = _keys_of_sequences(k, v, tensors)
    options = {name: value for name, value in options.items() if not name.startswith("max_seqlen")}
    score_mod = options.get("score_mod")
    most: dict[str, float] = {}
    for n, ((q0, q1), of_keys) in enumerate(zip(pairwise(cu_seqlens_q.tolist()), keys, strict=True)):
        one = [x.transpose(0, 1)[None] for x in (q[q0:q1], *of_keys, cotangents[0][q0:q1])]
        into_lse = tuple(c[None, :, q0:q1] for c in cotangents[1:])
        own = dict(tensors)
        slopes = own.get("alibi_slopes")
        if slopes is not None and slopes.dim() == 2:
            own["alibi_slopes"] = slopes[n]
        if score_mod is not None:
            options["score_mod"] = partial(_in_sequence, score_mod, n)
        found = _scales(one[0], one[1], one[2], {**options, **own}, (one[3], *into_lse), n)
        most |= {name: max(size, most.get(name, 0.0)) for name, size in found.items()}
    return most


def _in_sequence(score_mod: Callable[..., Any], n: int, score: Any, b: Any, *places: Any) -> Any:
    return score_mod(score, b + n, *places)


def _keys_of_sequences(k: Tensor, v: Tensor, tensors: dict[str, Any]) -> list[tuple[Tensor, Tensor]]:
    """The keys and values of each packed sequence; takes what says where they are out of `tensors`."""
    cu_seqlens_k, table = tensors.pop("cu_seqlens_k"), tensors.pop("block_table", None)
    ends, begins = tensors.pop("seqused_k", None), tensors.pop("leftpad_k", None)
    if table is None:
        return [(k[i:j], v[i:j]) for i, j in pairwise(cu_seqlens_k.tolist())]
    if ends is None:
        ends = cu_seqlens_k.diff()
    begins = torch.zeros_like(ends) if begins is None else begins
    places = zip(table, begins.tolist(), ends.tolist(), strict=True)
    return [(rows_of_sequence(k, *place), rows_of_sequence(v, *place)) for place in places]


def _distances(every: Tensor, lse: Tensor, unmasked: Tensor) -> Tensor:
    """The sizes of the numbers whose difference the exponent of a weight is. Where a bias or a sink absorbs the whole
    score in float64, it does so in any arithmetic, and the difference to an equal maximum is exact."""
    exact = every + torch.cat([unmasked, torch.ones_like(lse)], -1) == every
    top, at = every.max(-1, keepdim=True)
    size = torch.where(exact, every - top, every).abs()
    return size + torch.where(exact.gather(-1, at), (every - top).logsumexp(-1, keepdim=True), lse).abs()


def _scales(
    q: Tensor, k: Tensor, v: Tensor, options: Options, cotangents: tuple[Tensor, ...], n: int = 0
) -> dict[str, float]:
    """Returns the scales of dense tensors. Their first sequence is sequence n for dropout."""
    group = q.shape[1] // k.shape[1]
    if q.numel() == 0 or k.numel() == 0:
        return {}
    asked = dense_options(q, k, **options)
    scale, sinks, bias = asked.scale, asked.sinks, asked.attn_mask
    whole = asked._replace(window_left=None, window_right=None, attn_mask=None, mask_tiles=None, mask_bits=None)
    scores, unmasked = reference.scores(q, k, asked), reference.scores(q, k, whole)
    unbiased = reference.scores(q, k, whole._replace(alibi_slopes=None))
    hidden = scores == -torch.inf
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    error2 = scale**2 * q.square() @ k.square().transpose(-1, -2)  # of a score, as tiny() counts errors
    capped = reference.scores(q, k, whole._replace(alibi_slopes=None, score_mod=()))
    error2 = error2 * reference.bent_slope(capped, asked) ** 2
    error2 = error2 + (_ROUNDING * (unbiased - unmasked)).square().nan_to_num(0.0)  # -inf of score_mod in both
    if bias is not None and bias.dtype != torch.bool:
        of_bias = (_ROUNDING * bias.nan_to_num(0.0, 0.0, 0.0)).square()
        error2 = torch.where(scores + unmasked == scores, 0.0, error2 + of_bias)
    sink = scores.new_full((*scores.shape[:-1], 1), -torch.inf)
    if sinks is not None:
        sink = sink.masked_fill(~hidden.all(-1, keepdim=True), 0.0) + sinks[:, None, None]
    every = torch.cat([scores, sink], -1)
    lse = every.logsumexp(-1, keepdim=True)
    every_p = every.softmax(-1).nan_to_num(0.0)  # a row without keys is 0 / 0
    error2 = torch.cat([error2, torch.zeros_like(sink)], -1)
    absorbs = sinks is not None or (bias is not None and bias.dtype != torch.bool)
    sizes = _distances(every, lse, unmasked) if absorbs else every.abs().add_(lse.abs())
    error2 = error2 + sizes.mul_(_ROUNDING).square_().nan_to_num_(0.0, posinf=0.0)
    del sizes
    p, p_sink = every_p[..., :-1], every_p[..., -1:]
    factor = p.new_ones(())  # of dropout
    if asked.dropout_p is not None and asked.dropout_seed is not None:
        rows, columns = torch.arange(n, n + q.shape[0], device=q.device), torch.arange(q.shape[1], device=q.device)
        heads = (rows[:, None] << 32) + columns
        kept = keep_mask(tuple(p.shape), asked.dropout_p, asked.dropout_seed, heads)  # type: ignore[arg-type]
        factor = kept * keep_scale(asked.dropout_p)
    out = (p * factor) @ v
    kept_in = _output_scales(options, every, every_p, error2, out, v, factor)
    found = {f"output {i}": float(x.max().sqrt()) for i, x in enumerate(kept_in)}
    error2 = error2 + (every_p.square() * error2).sum(-1, keepdim=True)  # of a weight's logarithm: score - lse

    dout2 = cotangents[0].square()
    delta2 = (dout2 * (out.square() + kept_in[0])).sum(-1, keepdim=True)
    if len(cotangents) > 1:
        delta2 = delta2 + cotangents[1].square()[..., None]
    p2 = p.square() * (1 + error2[..., :-1])
    ds2 = p2 * (factor**2 * (dout2 @ v.square().transpose(-1, -2)) + delta2)

    def over_group(squares: Tensor) -> float:
        return float(squares.unflatten(1, (-1, group)).sum(2).max().sqrt())

    found |= {
        "q": scale * float((ds2 @ k.square()).max().sqrt()),
        "k": scale * over_group(ds2.transpose(-1, -2) @ q.square()),
        "v": over_group((factor**2 * p2).transpose(-1, -2) @ dout2),
    }
    if sinks is not None:
        found["sinks"] = float((p_sink.square() * (1 + error2[..., -1:]) * delta2).sum((0, 2, 3)).max().sqrt())
    if bias is not None:
        found["attn_mask"] = float(ds2.sum_to_size(bias.shape).max().sqrt())
    return found


def _output_scales(
    options: Options, scores: Tensor, p: Tensor, error2: Tensor, out: Tensor, v: Tensor, factor: Tensor
) -> list[Tensor]:
    """The squares of what errors of the scores (the sink's last) leave in each output: ``p_j (z_j v_j - y)``, ``p_j``
    and ``p_j (log p_j + H)`` times that of score j, and that of the largest score itself."""
    weighted2 = p.square() * error2
    keys2 = weighted2[..., :-1]
    in_out = factor**2 * keys2 @ v.square() - 2 * out * ((factor * keys2) @ v)
    in_out = in_out + weighted2.sum(-1, keepdim=True) * out.square()
    kept = [in_out.clamp_min(0.0)]
    if options.get("return_lse"):
        kept.append(weighted2.sum(-1))
    if options.get("return_stats"):
        log_p = p.log().nan_to_num(0.0, neginf=0.0)
        entropy = -(p * log_p).sum(-1, keepdim=True)
        # and a rounding of the sum of exponentials, which is at least 1, under the logarithm
        kept.append((weighted2 * (log_p + entropy).square()).sum(-1) + _ROUNDING**2)
        kept.append(error2.gather(-1, scores[..., :-1].argmax(-1, keepdim=True)))
    return kept
