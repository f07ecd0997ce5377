"""Functions of attention's scores and masks that people write, by name, each written once.

A suite takes `EXAMPLES`, makes a function from tensors of any dtype, and compares it with `eager`, which calls the same
function on whole tensors: `eager` in float64 is what every backend and every derivative must give.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

Function = Callable[..., Any]
Tensors = dict[str, Tensor]


class Sizes(NamedTuple):
    batch: int = 2
    heads: int = 4
    queries: int = 20
    keys: int = 20


class Example(NamedTuple):
    """A function of scores, of masks, or both. Each of `score` and `mask` takes the captured tensors and returns what
    `flex_attention` or `create_block_mask` takes."""

    score: Callable[[Tensors], Function] | None = None
    mask: Callable[[Tensors], Function] | None = None
    tensors: Callable[[Sizes], Tensors] = lambda sizes: {}
    trained: tuple[str, ...] = ()  # the captured tensors for which a gradient has a meaning
    square: bool = False  # whether it only has a meaning for as many keys as queries

    def captured(self, sizes: Sizes, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensors:
        """The captured tensors: floating-point ones in `dtype`, and with `requires_grad` where they are trained."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            found = self.tensors(sizes)
        floating = {name: x.to(dtype) for name, x in found.items() if x.is_floating_point()}
        for name in self.trained:
            floating[name].requires_grad_()
        return found | floating

    def score_mod(self, captured: Tensors) -> Function:
        """The whole example as a function of scores: a pair that its mask hides gets -inf."""
        if self.mask is None:
            assert self.score is not None
            return self.score(captured)
        seen = self.mask(captured)
        changed = None if self.score is None else self.score(captured)

        def masked(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            inner = score if changed is None else changed(score, b, h, q_idx, kv_idx)
            return torch.where(seen(b, h, q_idx, kv_idx), inner, -math.inf)

        return masked


def _alibi(t: Tensors) -> Function:
    slopes = t["slopes"]
    return lambda score, b, h, q_idx, kv_idx: score + slopes[h] * (kv_idx - q_idx)


def _soft_cap(t: Tensors) -> Function:
    return lambda score, b, h, q_idx, kv_idx: 3.0 * torch.tanh(score / 3.0)


def _relative(t: Tensors) -> Function:
    return lambda score, b, h, q_idx, kv_idx: score + 0.125 * (q_idx - kv_idx)


def _relative_table(t: Tensors) -> Function:
    table = t["table"]

    def fn(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + table[h, torch.clamp(kv_idx - q_idx, -4, 4) + 4]

    return fn


def _bucket(distance: Tensor, buckets: int = 8, far: int = 20) -> Tensor:
    """T5's, of both directions. No whole distance is within a rounding error of the border of two buckets."""
    half = buckets // 2
    exact = half // 2
    away = torch.abs(distance)
    share = torch.log(torch.clamp(away, min=1).float() / exact) / math.log(far / exact)
    large = torch.clamp(exact + (share * (half - exact)).to(torch.int64), max=half - 1)
    return torch.where(distance > 0, half, 0) + torch.where(away < exact, away, large)


def _t5_bias(t: Tensors) -> Function:
    table = t["table"]
    return lambda score, b, h, q_idx, kv_idx: score + table[_bucket(kv_idx - q_idx), h]


def _of_document(inner: Function, t: Tensors) -> Function:
    """A mask within documents, whose positions begin at 0 in each."""
    document, start = t["document"], t["start"]

    def fn(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        own, other = document[q_idx], document[kv_idx]
        return (own == other) & inner(b, h, q_idx - start[own], kv_idx - start[other])

    return fn


def _documents(t: Tensors) -> Function:
    return _of_document(lambda b, h, q_idx, kv_idx: (kv_idx <= q_idx) & (q_idx % 8 >= kv_idx % 3), t)


def _document_alibi(t: Tensors) -> Function:
    document, start, slopes = t["document"], t["start"], t["slopes"]

    def fn(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        at_q, at_k = q_idx - start[document[q_idx]], kv_idx - start[document[kv_idx]]
        return score - slopes[h] * abs(at_q - at_k)

    return fn


def _document_tensors(sizes: Sizes) -> Tensors:
    starts = torch.tensor([0, sizes.queries // 4, sizes.queries * 2 // 3])
    document = torch.bucketize(torch.arange(sizes.queries), starts, right=True) - 1
    return {"document": document.to(torch.int32), "start": starts.to(torch.int32), "slopes": _slopes(sizes.heads)}


def _prefix_lm(t: Tensors) -> Function:
    length = t["length"]
    return lambda b, h, q_idx, kv_idx: (kv_idx < length[b]) | (kv_idx <= q_idx)


def _dilated(t: Tensors) -> Function:
    def fn(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        away = torch.abs(q_idx - kv_idx)
        return (away <= 6) & (away % 2 == 0)

    return fn


def _natten(t: Tensors, width: int = 5, window: int = 3) -> Function:
    """Neighbours on a canvas of `width` columns: the window of a pixel at an edge is moved inwards."""
    reach = window // 2

    def fn(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        row, column = q_idx // width, torch.clamp(q_idx % width, reach, width - 1 - reach)
        near = torch.abs(column - kv_idx % width) <= reach
        return near & (torch.abs(torch.clamp(row, min=reach) - kv_idx // width) <= reach)

    return fn


def _flamingo(t: Tensors, per_image: int = 4) -> Function:
    """Cross attention from text to images, each seen by an interval of the text."""
    interval = t["interval"]

    def fn(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        image = kv_idx // per_image
        return (q_idx >= interval[image, 0]) & (q_idx < interval[image, 1])

    return fn


def _intervals(sizes: Sizes) -> Tensors:
    images = -(-sizes.keys // 4)
    begin = torch.arange(images) * sizes.queries // images
    return {"interval": torch.stack([begin, begin + max(sizes.queries // 2, 1)], 1)}


def _mla_rope(t: Tensors) -> Function:
    """The part of a score that depends on positions, from rotated queries and one rotated key for all heads."""
    of_q, of_k = t["q_rope"], t["k_rope"]

    def fn(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        for i in range(of_q.shape[3]):
            score = score + of_q[b, h, q_idx, i] * of_k[b, kv_idx, i]
        return score

    return fn


def _sigmoid_gated(t: Tensors) -> Function:
    return lambda score, b, h, q_idx, kv_idx: score * torch.sigmoid(score)


def _head_gate(t: Tensors) -> Function:
    gate = t["gate"]
    return lambda score, b, h, q_idx, kv_idx: score * torch.sigmoid(gate[b, h])


def _pair_table(t: Tensors) -> Function:
    table = t["table"]
    return lambda score, b, h, q_idx, kv_idx: score + table[q_idx, kv_idx]


def _temperature(t: Tensors) -> Function:
    """A number for all scores, and a power of the distance: a captured tensor without an index."""
    power, scale = t["power"], t["scale"]

    def fn(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score * torch.exp(scale) - (1.0 + abs(q_idx - kv_idx)) ** power[h]

    return fn


def _slopes(heads: int) -> Tensor:
    return 0.5 ** torch.arange(1, heads + 1)


EXAMPLES: dict[str, Example] = {
    "alibi": Example(_alibi, None, lambda n: {"slopes": _slopes(n.heads)}, ("slopes",)),
    "soft_cap": Example(_soft_cap),
    "relative": Example(_relative),
    "relative_table": Example(_relative_table, None, lambda n: {"table": torch.randn(n.heads, 9)}, ("table",)),
    "t5_bias": Example(_t5_bias, None, lambda n: {"table": torch.randn(8, n.heads)}, ("table",)),
    "documents": Example(_document_alibi, _documents, _document_tensors, ("slopes",), square=True),
    "prefix_lm": Example(None, _prefix_lm, lambda n: {"length": torch.arange(n.batch) * 5 % n.keys}),
    "dilated": Example(None, _dilated),
    "natten": Example(None, _natten, square=True),
    "flamingo": Example(None, _flamingo, _intervals),
    "mla_rope": Example(
        _mla_rope,
        None,
        lambda n: {"q_rope": torch.randn(*n[:3], 2), "k_rope": torch.randn(n.batch, n.keys, 2)},
        ("q_rope", "k_rope"),
    ),
    "sigmoid_gated": Example(_sigmoid_gated),
    "head_gate": Example(_head_gate, None, lambda n: {"gate": torch.randn(n.batch, n.heads)}, ("gate",)),
    "pair_table": Example(_pair_table, None, lambda n: {"table": torch.randn(n.queries, n.keys)}, ("table",)),
    "temperature": Example(
        _temperature,
        None,
        lambda n: {"power": 0.25 + 0.5 * torch.rand(n.heads), "scale": torch.tensor(0.1)},
        ("power", "scale"),
    ),
}


def whole(fn: Function, *score: Tensor, sizes: Sizes, device: Any = None) -> Tensor:
    """`fn` of all pairs at once: a score ``[B, H, T, S]`` if it takes one, and indices that broadcast to this shape."""
    places = [torch.arange(n, device=device).view([-1 if i == d else 1 for i in range(4)]) for d, n in enumerate(sizes)]
    return torch.broadcast_to(fn(*score, *places), sizes)


def eager(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: Function | None = None,
    seen: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) in the arithmetic of q's dtype: what all backends must give. `seen`: a bool mask that broadcasts."""
    sizes = Sizes(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * (q.shape[3] ** -0.5 if scale is None else scale)
    if score_mod is not None:
        scores = whole(score_mod, scores, sizes=sizes, device=q.device)
    if seen is not None:
        scores = scores.masked_fill(~seen, -math.inf)
    top = scores.detach().amax(-1, keepdim=True).clamp_min(torch.finfo(q.dtype).min)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    lse = (total.log() + top).masked_fill(total == 0, -math.inf).squeeze(-1)
    return weights / total.masked_fill(total == 0, 1.0) @ v, lse
