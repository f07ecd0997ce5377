"""Speculative decoding: a small model drafts several tokens, and the large one verifies them in one pass.

The large model accepts a drafted token x with probability ``min(1, p(x) / q(x))``, where p are its own probabilities
and q the draft's. It replaces the first rejected token by a draw from ``max(p - q, 0)``. If it accepts all, it draws
one more token from p. So every token has the distribution p: Leviathan, Kalman and Matias, "Fast Inference from
Transformers via Speculative Decoding", 2023, arXiv:2211.17192; Chen et al., "Accelerating Large Language Model Decoding
with Speculative Sampling", 2023, arXiv:2302.01318. Temperature, top-k and top-p apply to both p and q. With greedy
decoding, a drafted token is accepted if it is the large model's most likely one.

Keys and values of rejected tokens are discarded. A state of linear attention does not go back: a copy of it is kept
from before the drafted tokens, and if one of them is rejected, the accepted ones are read again from there. The large
model reads them together with its next proposals, or in a pass of their own once they are more than `draft_tokens`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from foundry_kernels.models.inputs import ends_before, table_of
from foundry_kernels.models.model import Model
from foundry_kernels.models.paged_cache import PagedKVCache
from foundry_kernels.models.sampling import GenerationStats, Sampling, choose, draw, now
from foundry_kernels.nn._tables import PositionTables

#: Positions of a page.
_PAGE = 16


def check_draft(model: Model, draft: object, **refused: Any) -> None:
    """Checks the draft for `model`. refused: arguments of `generate` that are not supported with a draft.

    Raises:
        TypeError: draft is not a Transformer.
        ValueError: it does not fit the model, or an argument is not supported with a draft.
    """
    if not isinstance(draft, Model):
        raise TypeError(f"draft must be a Transformer; got {type(draft).__name__}")
    for argument, value in refused.items():
        if value is not None and value is not False:
            raise ValueError(f"{argument} must be left out with a draft, whose rows advance by different counts")
    if not (draft.config.causal and draft.config.head):
        raise ValueError("draft must be a model with causal=True and head=True")
    ours, theirs = model.config.vocab_size, draft.config.vocab_size
    if theirs != ours:
        raise ValueError(f"draft must have the model's vocab_size={ours}; got {theirs}")
    device = model.tok_embeddings.weight.device
    if draft.tok_embeddings.weight.device != device:
        raise ValueError(f"draft must be on the model's device {device}; got {draft.tok_embeddings.weight.device}")
    for name, one in (("draft", draft), ("model", model)):
        if one.config.context_dim is not None or one.config.relative:
            raise ValueError(f"{name} must be a decoder without a context or a bias of positions")


def speculate(
    model: Model,
    draft: Model,
    prompts: Sequence[Tensor],
    max_new_tokens: int,
    draft_tokens: int,
    stop_token: int | None,
    sampling: Sampling,
) -> tuple[list[Tensor], GenerationStats]:
    """Continues prompts like :func:`foundry_kernels.models.generate`, which has checked the arguments, with models in
    evaluation mode. In a round each row gets at most `draft_tokens` proposals and one more token from the model itself.

    Args:
        prompts: 1-D int64.

    Returns:
        For each prompt the prompt and its continuation, and the times.

    Raises:
        ValueError: the draft has too few positions, or the model's frequencies depend on the length.
    """
    device, longest = model.tok_embeddings.weight.device, max(map(len, prompts)) + max_new_tokens
    if ends_before(longest, draft.config):
        raise ValueError(
            f"draft must have {longest} positions, those of prompts and new tokens; {table_of(draft.config)}"
        )
    for module in model.modules():
        if isinstance(module, PositionTables) and module.follows_length and longest > module.max_positions:
            raise ValueError(
                "model must not have frequencies that follow the length, which differ in passes over several tokens; "
                f"extended({longest}) fixes them"
            )
    began = now(device)
    rows: list[list[int]] = [prompt.tolist() for prompt in prompts]
    ends = [len(row) + max_new_tokens for row in rows]
    target, drafter = _Reader(model, ends), _Reader(draft, ends)
    logits = target.read(dict(enumerate(rows)), last_only=True)
    for row, token in zip(rows, choose(logits, *sampling).tolist(), strict=True):
        row.append(token)
    drafter.read({n: row[:-1] for n, row in enumerate(rows)}, last_only=True)
    decoding = now(device)
    drafted = accepted = 0
    while True:
        left = {n: ends[n] - len(row) for n, row in enumerate(rows) if len(row) < ends[n] and row[-1] != stop_token}
        if not left:
            break
        # Rows with the most proposals come first, so that each step has the first rows.
        counts = {n: min(draft_tokens, left[n] - 1) for n in sorted(left, key=lambda n: -left[n])}
        tokens, q = _propose(drafter, rows, counts, sampling)
        drawn = zip(counts.items(), tokens.tolist(), strict=True)
        proposals = {n: _until(proposed[:count], stop_token) for (n, count), proposed in drawn}
        lengths = [len(proposed) for proposed in proposals.values()]
        unread = {n: rows[n][target.length(n) : -1] for n in proposals}
        if again := {n: part for n, part in unread.items() if len(part) > draft_tokens}:
            target.read(again, last_only=True)
        target.mark(proposals)
        new = {n: rows[n][target.length(n) :] + proposed for n, proposed in proposals.items()}
        parts = target.read(new).split([len(part) for part in new.values()])
        padded = pad_sequence([x[-length - 1 :] for x, length in zip(parts, lengths, strict=True)], batch_first=True)
        taken, behind = _verify(padded, tokens, q, torch.tensor(lengths, device=device), sampling)
        for n, count, token in zip(counts, taken.tolist(), behind.tolist(), strict=True):
            rows[n] += _until([*proposals[n][:count], token], stop_token)
            target.keep(n, len(rows[n]) - 1)
            drafter.keep(n, len(rows[n]) - 1)
            drafted, accepted = drafted + len(proposals[n]), accepted + count
    found = [torch.tensor(row, device=device) for row in rows]
    read, made = sum(map(len, prompts)), sum(map(len, rows))
    return found, GenerationStats(
        prompt_tokens=read,
        new_tokens=made - read,
        prefill_tokens=read,
        decode_tokens=made - read - len(rows),
        prefill_seconds=decoding - began,
        decode_seconds=now(device) - decoding if max_new_tokens > 1 else 0.0,
        drafted_tokens=drafted,
        accepted_tokens=accepted,
    )


class _Reader:
    """A model, with a sequence of a paged cache for each row that it reads."""

    def __init__(self, model: Model, ends: list[int]) -> None:
        self.model, device = model, model.tok_embeddings.weight.device
        pages, states = sum(-(-end // _PAGE) for end in ends), None
        if model.config.linear_layers:  # with a copy of each sequence, which shares all pages but the last
            pages, states = pages + len(ends), 2 * len(ends)
        options: dict[str, Any] = {"n_sequences": states, "device": device, "dtype": model._key_dtype()}
        self.cache = PagedKVCache(model.config, pages, _PAGE, **options)
        self.sequences = [self.cache.add() for _ in ends]
        self._marked: dict[int, int] = {}  # of a row, a copy of its sequence

    def length(self, row: int) -> int:
        return self.cache.length(self.sequences[row])

    def read(self, new: dict[int, list[int]], last_only: bool = False) -> Tensor:
        """Appends tokens to rows. Returns the logits ``[total, V]`` after each token, or ``[N, V]`` after the last."""
        device, lengths = self.cache.device, [len(tokens) for tokens in new.values()]
        tokens = torch.tensor([[*chain.from_iterable(new.values())]], device=device)
        starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
        batch = self.cache.batch([self.sequences[row] for row in new])
        logits: Tensor = self.model(
            tokens, cu_seqlens=starts, max_seqlen=max(lengths), cache=batch, last_only=last_only
        )
        return logits[0]

    def step(self, rows: Sequence[int], tokens: Tensor) -> Tensor:
        """Appends a token ``[N]`` to each row. Returns the logits ``[N, V]`` after it."""
        batch = self.cache.batch([self.sequences[row] for row in rows])
        logits: Tensor = self.model(tokens.unsqueeze(1), cache=batch)
        return logits[:, -1]

    def mark(self, rows: Iterable[int]) -> None:
        """Positions that rows get from here on may be removed."""
        if self.cache.linear_layers:
            self._marked |= {row: self.cache.fork(self.sequences[row]) for row in rows}

    def keep(self, row: int, length: int) -> None:
        """Removes the positions of a row from `length` on; with linear attention all positions since `mark`, if it has
        any of these."""
        marked = self._marked.pop(row, None)
        if marked is None:
            self.cache.truncate(self.sequences[row], min(length, self.length(row)))
        elif self.length(row) <= length:
            self.cache.free(marked)
        else:
            self.cache.free(self.sequences[row])
            self.sequences[row] = marked


def _propose(
    drafter: _Reader, rows: list[list[int]], counts: dict[int, int], sampling: Sampling
) -> tuple[Tensor, Tensor | None]:
    """Drafts `counts` tokens for the rows. The counts do not increase.

    Returns:
        The tokens ``[N, K]`` in the order of `counts`, and the draft's probabilities ``[N, K, V]``, or None for greedy
        decoding.
    """
    drawn: list[Tensor] = []
    probs: list[Tensor] = []
    for step in range(max(counts.values())):
        going = [n for n, count in counts.items() if count > step]
        if step == 0:
            logits = drafter.read({n: rows[n][drafter.length(n) :] for n in going}, last_only=True)
            drafter.mark(going)
        else:
            logits = drafter.step(going, drawn[-1][: len(going)])
        if sampling.temperature == 0.0:
            drawn.append(logits.argmax(-1))
        else:
            probs.append(sampling.probabilities(logits))
            drawn.append(draw(probs[-1], sampling.generator))
    if not drawn:
        return torch.empty(len(counts), 0, dtype=torch.int64, device=drafter.cache.device), None
    missing = [len(counts) - len(tokens) for tokens in drawn]
    tokens = torch.stack([F.pad(one, (0, n)) for one, n in zip(drawn, missing, strict=True)], 1)
    if not probs:
        return tokens, None
    return tokens, torch.stack([F.pad(one, (0, 0, 0, n)) for one, n in zip(probs, missing, strict=True)], 1)


def _verify(
    logits: Tensor, tokens: Tensor, q: Tensor | None, lengths: Tensor, sampling: Sampling
) -> tuple[Tensor, Tensor]:
    """Returns the number of accepted tokens in each row, and the token after them.

    Args:
        logits: the model's logits ``[N, K + 1, V]`` before each drafted token and after the last.
        tokens: the drafted tokens ``[N, K or more]``.
        q: the draft's probabilities ``[N, K or more, V]``; None for greedy decoding, or without drafted tokens.
        lengths: ``[N]``, the number of drafted tokens in each row.

    Returns:
        Two ``[N]`` int64 tensors.
    """
    size = logits.shape[1] - 1
    tokens = tokens[:, :size]
    counts = torch.arange(size, device=logits.device) < lengths.unsqueeze(1)
    if sampling.temperature == 0.0:
        best = logits.argmax(-1)
        taken = _leading(counts & (tokens == best[:, :-1]))
        return taken, best.gather(1, taken.unsqueeze(1)).squeeze(1)
    p = sampling.probabilities(logits)
    # After the last drafted token q is 0, so the row draws from p.
    q = torch.zeros_like(p) if q is None else F.pad(q[:, :size] * counts.unsqueeze(-1), (0, 0, 0, 1))
    likely_p, likely_q = (x[:, :-1].gather(-1, tokens.unsqueeze(-1)).squeeze(-1) for x in (p, q))
    uniform = torch.rand(likely_p.shape, generator=sampling.generator, device=p.device)
    taken = _leading(counts & (uniform * likely_q < likely_p))
    p, q = (x.take_along_dim(taken[:, None, None], 1).squeeze(1) for x in (p, q))
    rest = (p - q).clamp(min=0.0)
    # If p and q are equal up to rounding, nothing may be left; then draw from p.
    return taken, draw(torch.where(rest.sum(-1, keepdim=True) > 0.0, rest, p), sampling.generator)


def _leading(accepted: Tensor) -> Tensor:
    """Returns the number of leading True values, ``[N]`` for bool ``[N, K]``."""
    return accepted.long().cumprod(1).sum(1)


def _until(tokens: list[int], stop_token: int | None) -> list[int]:
    """Returns the tokens up to the first `stop_token`, which is kept."""
    return tokens[: tokens.index(stop_token) + 1] if stop_token in tokens else tokens
