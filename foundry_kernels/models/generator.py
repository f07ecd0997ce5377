"""Continuous batching: requests join and leave a running batch at any step, with a cache in pages.

Yu et al., "Orca", 2022 (a new batch for each step); Kwon et al., "PagedAttention", 2023, arXiv:2309.06180; Agrawal et
al., "Sarathi", 2023, arXiv:2308.16369 (chunks of prompts together with decoding).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foundry_kernels.core.checks import check_bool, check_int, check_positive
from foundry_kernels.core.registry import wide_dtype
from foundry_kernels.models.inputs import ends_before, table_of
from foundry_kernels.models.model import Model
from foundry_kernels.models.paged_cache import PagedKVCache
from foundry_kernels.models.pages import OutOfPages
from foundry_kernels.models.requests import Request, scores_of
from foundry_kernels.models.sampling import check_options, choose, read_prompt
from foundry_kernels.models.validate import check_linear_layers, check_served, follows_length
from foundry_kernels.nn._linear_layers import batched_decode


class GeneratedToken(NamedTuple):
    """A token that a step has generated.

    Attributes:
        request: the number of its request.
        token: the new token, which may be a stop token.
        last: whether it completes the request.
    """

    request: int
    token: int
    last: bool


class Generator:
    """Continues many prompts at a time, each with the same result as :meth:`Transformer.generate` alone. Requests may
    arrive at any time.

    A :meth:`step` is one forward pass: for each decoding sequence it processes the newest token, and it also reads up
    to `chunk_size` tokens of prompts, so that a long prompt does not block other requests. Sequences of any lengths are
    packed, and each ends independently.

    A request waits until there is room in the batch and there are pages for all its positions, which it then reserves
    until it ends. So a running request never waits for pages and is never preempted or recomputed; in exchange,
    reserved pages may be empty. Requests start in the order in which they were added, so none starves.

    With linear attention in some layers, each running request also has states there, whose size does not depend on the
    length. There are no earlier states to begin from, so a prompt is always read as a whole, also with `prefix_of`; and
    after a step that fails, the sequences of all running requests are read again.

    Tokens are those of ``model.generate`` with the same options, if each request that samples has its own generator.
    Logits may differ in the last bits between batches, so ties may be decided differently; within
    :func:`foundry_kernels.batch_invariant` they are bitwise equal, except with linear attention. The model runs in
    evaluation mode without gradients; its mode is restored afterwards. A generator is not thread-safe.

    Args:
        model: causal, with a head; without a context and relative positions.
        n_pages: number of pages of a new cache, on the model's device and in the dtype of its keys (autocast's dtype,
            under autocast).
        page_size: positions of a page.
        max_batch: the maximum number of running sequences.
        chunk_size: the maximum number of prompt tokens in a step.
        cache: an existing cache to use instead of `n_pages` new pages; it may hold other sequences. For linear
            attention a new one has states for `max_batch` sequences; if an existing one has fewer, requests wait.

    Attributes:
        cache: the pages.

    Raises:
        TypeError: model is not a Transformer, cache has another type, or a size is not an integer.
        ValueError: the model is not supported, a size is below 1, both or neither of `n_pages` and `cache` are given,
            or the cache does not fit the model.
    """

    def __init__(
        self,
        model: Model,
        *,
        n_pages: int | None = None,
        page_size: int | None = None,
        max_batch: int = 32,
        chunk_size: int = 512,
        cache: PagedKVCache | None = None,
    ) -> None:
        if not isinstance(model, Model):
            raise TypeError(f"model must be a Transformer; got {type(model).__name__}")
        check_served(model.config)
        check_int("max_batch", max_batch, minimum=1)
        check_int("chunk_size", chunk_size, minimum=1)
        if (n_pages is None) == (cache is None):
            raise ValueError(f"one of n_pages and cache must be given; got {'neither' if cache is None else 'both'}")
        weight, dtype = model.tok_embeddings.weight, model._key_dtype()
        if cache is None:
            assert n_pages is not None
            page_size = 16 if page_size is None else page_size
            states = max_batch if model.config.linear_layers else None
            options: Any = {"n_sequences": states, "device": weight.device, "dtype": dtype}
            cache = PagedKVCache(model.config, n_pages, page_size, **options)
        elif not isinstance(cache, PagedKVCache):
            raise TypeError(f"cache must be a PagedKVCache; got {type(cache).__name__}")
        elif page_size is not None:
            raise ValueError(f"page_size must be None with a cache, which has its own; got {page_size}")
        cache.check(weight.device, dtype, model.config.n_layers)
        check_linear_layers(model.config, cache.linear_layers)
        if cache.heads != (heads := model.config.cached_heads):
            raise ValueError(f"cache must have heads (n_kv_heads, head_dim, v_head_dim)={heads}; got {cache.heads}")
        self.model, self.cache = model, cache
        self.max_batch, self.chunk_size = max_batch, chunk_size
        self._next = 0
        self._waiting: dict[int, Request] = {}
        self._running: dict[int, Request] = {}
        self._results: dict[int, Tensor] = {}
        self._log_probs: dict[int, list[Tensor]] = {}

    @property
    def waiting(self) -> tuple[int, ...]:
        """The numbers of the waiting requests, in the order in which they will start."""
        return tuple(self._waiting)

    @property
    def running(self) -> tuple[int, ...]:
        """The numbers of the running requests, in the order in which they started."""
        return tuple(self._running)

    def add(
        self,
        prompt: Tensor | Sequence[int],
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        stop_token: int | None = None,
        generator: torch.Generator | None = None,
        prefix_of: int | None = None,
        return_log_probs: bool = False,
        log_probs_temperature: float = 1.0,
    ) -> int:
        """Adds a request, which starts in a later step, and returns its number.

        Args:
            prompt: a 1-D integer tensor or a list of ints, of at least one token.
            max_new_tokens: 0 or more; with 0 the request is done at once.
            temperature, top_k, top_p, stop_token: as for :func:`generate`.
            generator: random generator on the model's device. Give each request its own: requests that share one, or
                PyTorch's default, draw in the order in which their tokens are generated.
            prefix_of: the number of an earlier request with a common prefix. If that one is running when this one could
                start, this one waits until the common prefix has been read and then shares its pages instead of reading
                it again. Later requests wait too. If it is done by then, or the model has linear attention, the prompt
                is read as usual.
            return_log_probs, log_probs_temperature: as for :func:`generate`; :meth:`log_probs` returns them.

        Raises:
            TypeError: prompt or max_new_tokens are not integers.
            ValueError: the prompt is empty or has tokens outside the vocabulary; there are more positions than the
                cache, the table of learned positions or dynamic scaling supports; temperature < 0, top_k < 1 or top_p
                outside (0, 1]; a generator is on another device; or `prefix_of` is unknown.
        """
        config, device, cache = self.model.config, self.model.tok_embeddings.weight.device, self.cache
        row = read_prompt(prompt, "prompt", config.vocab_size)
        check_options(max_new_tokens, temperature, top_k, top_p, stop_token, config.vocab_size)
        check_bool("return_log_probs", return_log_probs)
        check_positive("log_probs_temperature", log_probs_temperature)
        if generator is not None and generator.device.type != device.type:
            raise ValueError(f"generator must be on the model's device {device}; got {generator.device}")
        if prefix_of is not None:
            check_int("prefix_of", prefix_of)
            if not 0 <= prefix_of < self._next:
                raise ValueError(f"prefix_of must be the number of a request that was added before; got {prefix_of}")
        begin, end = len(row), len(row) + max_new_tokens
        asked = f"a prompt of {begin} tokens and max_new_tokens={max_new_tokens}"
        if ends_before(end, config):
            raise ValueError(f"{asked} do not fit; {table_of(config)}")
        if end > config.max_seq_len and follows_length(config):
            why = "dynamic scaling rotates all sequences of a batch by the length of the longest"
            raise ValueError(f"{asked} exceed max_seq_len={config.max_seq_len}, beyond which {why}")
        request = Request(
            self._next, row.tolist(), begin, end, temperature, top_k, top_p, stop_token, generator, prefix_of,
            log_probs_temperature if return_log_probs else None,
        )  # fmt: skip
        if max_new_tokens:
            needed = -(-request.positions // cache.page_size)
            if needed > cache.n_pages:
                raise ValueError(
                    f"{asked} need {needed} pages of {cache.page_size} positions; the cache has {cache.n_pages}"
                )
            self._waiting[request.number] = request
        else:
            self._results[request.number] = self._tokens_of(request)
        if return_log_probs:
            self._log_probs[request.number] = []
        self._next += 1
        return request.number

    @torch.no_grad()
    def step(self) -> list[GeneratedToken]:
        """Runs one forward pass and returns its tokens: one for each running request whose prompt has been read.
        Without requests, it does nothing. After a step that fails or is interrupted, the next step repeats it, but
        generators may have advanced.

        Raises:
            OutOfPages: no request is running, and other sequences in the cache hold what the next request needs.
                Nothing has changed.
        """
        self._admit()
        parts = self._parts()
        if not parts:
            return []
        before = [(request, self.cache.length(request.sequence)) for request in self._running.values()]
        try:
            hidden, logits = self._forward(*zip(*parts, strict=True))
            read = [(row, r) for row, (r, _) in enumerate(parts) if self.cache.length(r.sequence) == len(r.tokens)]
            drawn = _draw(logits, read)
            scores = {} if hidden is None else scores_of(self.model, hidden, read, drawn)
        except BaseException:
            for request, length in before:
                kept = 0 if self.cache.linear_layers else length  # a state does not go back
                self.cache.truncate(request.sequence, kept)
                self.cache.reserve({request.sequence: request.positions - kept})
            raise
        made = []
        for (_, request), token in zip(read, drawn, strict=True):
            request.tokens.append(token)
            last = token == request.stop_token or len(request.tokens) == request.end
            if last:
                self._results[request.number] = self._stop(request)
            made.append(GeneratedToken(request.number, token, last))
        for number, score in scores.items():
            self._log_probs[number].append(score)
        return made

    def __iter__(self) -> Iterator[GeneratedToken]:
        """Runs steps until all requests are done, including requests that are added meanwhile, and yields each
        token."""
        while self._running or self._waiting:
            yield from self.step()

    def run(self) -> dict[int, Tensor]:
        """Runs steps until all requests are done. Returns :meth:`result` of each unfetched request by its number."""
        for _ in self:
            pass
        found, self._results = self._results, {}
        return found

    def result(self, request: int) -> Tensor:
        """Returns the prompt and its continuation, 1-D int64 on the model's device, and forgets the request.

        Raises:
            ValueError: it is not done, or was fetched already.
        """
        if request in self._waiting or request in self._running:
            raise ValueError(f"request {request} is not done; step() until then, or cancel it")
        if request not in self._results:
            raise ValueError(f"request must be one that is done and not fetched yet; got {request!r}")
        return self._results.pop(request)

    def log_probs(self, request: int) -> Tensor:
        """Returns the log-probabilities of the tokens that a request has generated so far, 1-D float32 (float64 for a
        float64 model) on the model's device; those of a request that is done once. `result` and `run` leave them, and
        `cancel` forgets them.

        Raises:
            ValueError: the request was added without `return_log_probs`, or they were fetched or forgotten.
        """
        if request not in self._log_probs:
            raise ValueError(f"request must be one with return_log_probs=True, not fetched yet; got {request!r}")
        going = request in self._running or request in self._waiting
        found = self._log_probs[request] if going else self._log_probs.pop(request)
        weight = self.model.tok_embeddings.weight
        return torch.stack(found) if found else weight.new_empty(0, dtype=wide_dtype(weight.dtype))

    def cancel(self, request: int) -> Tensor:
        """Cancels the request, frees its pages and forgets it. Returns the prompt and the tokens generated so far.

        Raises:
            ValueError: the request does not exist.
        """
        self._log_probs.pop(request, None)
        if request in self._running:
            return self._stop(self._running[request])
        if request in self._waiting:
            return self._tokens_of(self._waiting.pop(request))
        return self.result(request)

    def _stop(self, request: Request) -> Tensor:
        self.cache.free(request.sequence)
        del self._running[request.number]
        return self._tokens_of(request)

    def _tokens_of(self, request: Request) -> Tensor:
        return torch.tensor(request.tokens, dtype=torch.int64).to(self.model.tok_embeddings.weight.device)

    def _admit(self) -> None:
        """Starts requests while there is room for them."""
        while self._waiting and len(self._running) < self.max_batch:
            request = next(iter(self._waiting.values()))
            other = None
            if request.prefix_of is not None and not self.cache.linear_layers:
                other = self._running.get(request.prefix_of)
            shared = 0
            if other is not None:
                # At least one token must be read, because the first new token is predicted from it.
                alike = zip(request.tokens[:-1], other.tokens, strict=False)
                shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], alike))
                stored = self.cache.length(other.sequence)
                if stored < min(shared, other.begin):
                    return  # it is still reading
                shared = min(shared, stored)
            try:
                request.sequence = self._take_pages(request.positions, other, shared)
            except OutOfPages:
                if not self._running:  # otherwise a running request will free pages
                    raise
                return
            self._running[request.number] = self._waiting.pop(request.number)

    def _take_pages(self, positions: int, other: Request | None, shared: int) -> int:
        """Creates a sequence with pages for `positions`; the first `shared` positions are those of `other`.

        Shared pages are not written: `other` continues after its stored positions, and if the new sequence continues
        within a page, `reserve` gives it a copy.
        """
        cache = self.cache
        sequence = cache.add() if other is None else cache.fork(other.sequence)
        try:
            if other is not None:
                cache.truncate(sequence, shared)
            cache.reserve({sequence: positions - shared})
        except OutOfPages:
            cache.free(sequence)
            raise
        return sequence

    def _parts(self) -> list[tuple[Request, list[int]]]:
        """The running requests in this step, with their tokens to read."""
        parts, budget = [], self.chunk_size
        for request in self._running.values():
            unread = request.tokens[self.cache.length(request.sequence) :]
            if len(unread) > 1:
                unread = unread[:budget]
                budget -= len(unread)
            if unread:
                parts.append((request, unread))
        return parts

    def _forward(self, requests: Sequence[Request], parts: Sequence[list[int]]) -> tuple[Tensor | None, Tensor]:
        """The input of the head ``[N, dim]``, None where no request needs it, and logits ``[N, V]``, of the last token
        of each part."""
        device = self.model.tok_embeddings.weight.device
        tokens = torch.tensor([[token for part in parts for token in part]]).to(device)
        cu_seqlens = torch.tensor([0, *accumulate(map(len, parts))], dtype=torch.int32).to(device)
        batch = self.cache.batch([request.sequence for request in requests])
        # Set as plain attributes, because nn.Module's `__setattr__` takes a tenth of each step.
        training = [vars(module) for module in self.model.modules() if module.training]
        for attributes in training:
            attributes["training"] = False
        try:
            with batched_decode():
                scored = any(request.scored_at is not None for request in requests)
                options: Any = {"cu_seqlens": cu_seqlens, "last_only": True, "return_hidden": scored}
                found: Tensor = self.model(tokens, cache=batch, **options)
                logits = self.model._logits(found) if scored else found
        finally:
            for attributes in training:
                attributes["training"] = True
        return found[0] if scored else None, logits[0]

    def __repr__(self) -> str:
        return (
            f"Generator(running={len(self._running)}, waiting={len(self._waiting)}, done={len(self._results)}, "
            f"max_batch={self.max_batch}, chunk_size={self.chunk_size}, cache={self.cache})"
        )


def _draw(logits: Tensor, read: list[tuple[int, Request]]) -> list[int]:
    """Draws the next token of each request from its row of `logits` ``[N, V]``."""
    if not read:
        return []
    likeliest = logits.argmax(-1)
    rows = [
        choose(logits[row : row + 1], r.temperature, r.top_k, r.top_p, r.generator)
        if r.temperature
        else likeliest[row : row + 1]
        for row, r in read
    ]
    drawn: list[int] = torch.cat(rows).tolist()
    return drawn
