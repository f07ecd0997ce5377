"""Generation of tokens with a key-value cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor

from foundry_kernels.core.checks import check_bool, check_int, check_positive
from foundry_kernels.core.registry import wide_dtype
from foundry_kernels.models import speculative
from foundry_kernels.models.blocks import TransformerBlock
from foundry_kernels.models.cache import KVCache
from foundry_kernels.models.context import Context
from foundry_kernels.models.decode_block import in_one_call
from foundry_kernels.models.inputs import ends_before, table_of
from foundry_kernels.models.log_probs import NO_TOKEN, LogProbs
from foundry_kernels.models.model import Model
from foundry_kernels.models.paged_cache import PagedBatch, PagedKVCache
from foundry_kernels.models.pages import OutOfPages
from foundry_kernels.models.sampling import GenerationStats, Prompts, Sampling, check_options, choose, now, read_prompts
from foundry_kernels.nn._tables import PositionTables

Step = Callable[[Model, Tensor, KVCache | PagedBatch, Context | None], Tensor]

#: On a GPU, the number of tokens between checks whether all rows have stopped. A check waits for the GPU.
_LOOK_EVERY = 16


class Options(TypedDict, total=False):
    """The keyword arguments of :func:`generate` except the one that selects the results."""

    temperature: float
    top_k: int | None
    top_p: float | None
    stop_token: int | None
    generator: torch.Generator | None
    compile: bool | Mapping[str, Any]
    context: Context | None
    cache: PagedKVCache | None
    draft: Model | None
    draft_tokens: int
    log_probs_temperature: float


@overload
def generate(
    model: Model, prompts: Prompts, max_new_tokens: int, *, return_log_probs: Literal[False] = False,
    return_stats: Literal[False] = False, **options: Unpack[Options],
) -> list[Tensor]: ...  # fmt: skip
@overload
def generate(
    model: Model, prompts: Prompts, max_new_tokens: int, *, return_log_probs: Literal[False] = False,
    return_stats: Literal[True], **options: Unpack[Options],
) -> tuple[list[Tensor], GenerationStats]: ...  # fmt: skip
@overload
def generate(
    model: Model, prompts: Prompts, max_new_tokens: int, *, return_log_probs: Literal[True],
    return_stats: Literal[False] = False, **options: Unpack[Options],
) -> tuple[list[Tensor], list[Tensor]]: ...  # fmt: skip
@overload
def generate(
    model: Model, prompts: Prompts, max_new_tokens: int, *, return_log_probs: Literal[True],
    return_stats: Literal[True], **options: Unpack[Options],
) -> tuple[list[Tensor], list[Tensor], GenerationStats]: ...  # fmt: skip
@torch.no_grad()
def generate(
    model: Model,
    prompts: Prompts,
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop_token: int | None = None,
    generator: torch.Generator | None = None,
    compile: bool | Mapping[str, Any] = False,
    context: Context | None = None,
    cache: PagedKVCache | None = None,
    draft: Model | None = None,
    draft_tokens: int = 4,
    return_log_probs: bool = False,
    log_probs_temperature: float = 1.0,
    return_stats: bool = False,
) -> Any:
    """Continues each prompt by at most `max_new_tokens` tokens.

    Prompts may differ in length, and a greedy continuation is the same as for the prompt alone. One pass reads the
    length of the shortest prompt in all rows. Then all rows continue token by token: a row first takes the rest of its
    prompt, then its own predictions. Padding is never attended to. Because tokens beyond the shortest prompt are read
    one at a time, group prompts of similar lengths, or use :class:`Generator`, which packs them.

    The model runs in evaluation mode without gradients; its mode is restored afterwards.

    Args:
        prompts: ``[B, T]`` integer tensor, or a sequence of 1-D integer tensors or lists of ints, each of at least one
            token.
        max_new_tokens: for each prompt; 0 or more.
        temperature: 0 takes the most likely token; above 0, logits are divided by it and a token is drawn.
        top_k: draw only from the k most likely tokens.
        top_p: draw only from the smallest set of tokens whose probabilities sum to at least top_p; after `top_k`.
        stop_token: ends a row and is kept as the row's last token. It has no effect inside a prompt.
        generator: random generator on the model's device.
        compile: run the steps of one token through ``torch.compile``; a mapping is passed to it as keyword arguments.
            One graph is used for all lengths and for later calls with the same model. The common part of the prompts is
            read without it. A compiled model is called as it is. True compiles nothing where one native call runs all
            blocks of a step (few rows on a CPU): a graph would only add its own calls and checks.
        context: for a model with `context_dim`, the result of its `read_context`, with a row for each prompt.
        cache: a cache in pages for the prompts' keys and values, which other sequences may share. Its pages are freed
            when this returns. None makes a cache for the call. Not together with `compile`.
        draft: a smaller model with the same vocabulary, whose proposals this model verifies, several in one pass (see
            :mod:`foundry_kernels.models.speculative`). Tokens have the same distribution as without a draft, and greedy
            tokens are the same. A pass over several tokens may round the last bits of logits differently from a pass
            over one token, so near-ties may differ, except within :func:`foundry_kernels.batch_invariant` (there too
            with linear attention). Both models read whole prompts in one pass. Not together with `compile`, a context
            or a cache.
        draft_tokens: proposed for each pass of the model, at most; 1 or more.
        return_log_probs: also return the log-probabilities of the new tokens, by the model itself: of the softmax over
            the whole vocabulary, before `temperature`, `top_k` and `top_p`. Within
            :func:`foundry_kernels.batch_invariant` they have the bits of :meth:`Transformer.log_probs` on the whole
            sequence, which training computes, for any batch and cache (without dropout, `compile` and linear
            attention). Not together with a draft.
        log_probs_temperature: the logits are divided by it for them. Give `temperature` for those of the distribution
            that the tokens are drawn from, if `top_k` and `top_p` exclude none.
        return_stats: also return the times of the two phases. This waits for the GPU before, between and after them.

    Returns:
        For each prompt the prompt and its continuation, 1-D int64 on the model's device. With a `return_` option a
        tuple ``(rows, [log_probs], [stats])``: for each prompt a 1-D float32 tensor with a value for each new token
        (float64 for a float64 model); and a :class:`GenerationStats`.

    Raises:
        TypeError: prompts or max_new_tokens are not integers.
        ValueError: a prompt is empty or has tokens outside the vocabulary; prompt and new tokens do not fit the table
            of learned positions; temperature < 0, top_k < 1 or top_p outside (0, 1]; a generator is on another device;
            the model is not causal or has no head; a context or a cache does not fit; a draft has another vocabulary or
            device or cannot generate; or a draft is combined with a context, a cache, `compile`, relative positions or
            "dynamic" frequencies beyond their table.
        OutOfPages: the cache has fewer free pages than all rows need.
    """
    config, device = model.config, model.tok_embeddings.weight.device
    if not (config.causal and config.head):
        raise ValueError("generate needs a model with causal=True and head=True")
    rows = read_prompts(prompts, config.vocab_size)
    check_options(max_new_tokens, temperature, top_k, top_p, stop_token, config.vocab_size)
    if generator is not None and generator.device.type != device.type:
        raise ValueError(f"generator must be on the model's device {device}; got {generator.device}")
    check_bool("return_log_probs", return_log_probs)
    check_bool("return_stats", return_stats)
    check_positive("log_probs_temperature", log_probs_temperature)
    check_int("draft_tokens", draft_tokens, minimum=1)
    if draft is not None:
        speculative.check_draft(
            model, draft, compile=compile, context=context, cache=cache, return_log_probs=return_log_probs
        )
    if not rows:
        return _chosen([], [] if return_log_probs else None, GenerationStats() if return_stats else None)
    lengths, scored = torch.tensor([len(row) for row in rows]), wide_dtype(model.tok_embeddings.weight.dtype)
    shortest, longest = int(lengths.min()), int(lengths.max())
    if ends_before(longest + max_new_tokens, config):
        raise ValueError(
            f"prompts of up to {longest} tokens and max_new_tokens={max_new_tokens} do not fit; {table_of(config)}"
        )
    if max_new_tokens == 0:
        same = [row.to(device) for row in rows]
        none = [torch.empty(0, dtype=scored, device=device) for _ in rows] if return_log_probs else None
        return _chosen(same, none, GenerationStats(prompt_tokens=int(lengths.sum())) if return_stats else None)

    total = longest + max_new_tokens
    tokens = torch.zeros(len(rows), total, dtype=torch.int64)
    for row, prompt in zip(tokens, rows, strict=True):
        row[: len(prompt)] = prompt
    tokens, begin = tokens.to(device), lengths.to(device)
    end = begin + max_new_tokens  # a row's length once it is finished
    alike = shortest == longest and stop_token is None  # then all rows take the same steps
    look_every = 1 if device.type == "cpu" else _LOOK_EVERY
    log_probs = torch.zeros(tokens.shape, dtype=scored, device=device) if return_log_probs else None
    request = LogProbs(temperature=log_probs_temperature)
    plain = _step if log_probs is None else _step_to_head
    step = plain if compile is False else _compiled(compile, plain)
    if cache is not None and compile is not False:
        raise ValueError("compile must be False with a cache in pages, because each step computes its tables")
    models = (model,) if draft is None else (model, draft)
    training = [(module, module.training) for one in models for module in one.modules()]
    for one in models:
        one.eval()
    kv_cache: KVCache | PagedBatch | None = None
    try:
        for module, _ in training:
            if isinstance(module, PositionTables) and not module.follows_length:
                module.reserve(total)  # once, outside of the compiled step
        if draft is not None:
            sampling = Sampling(temperature, top_k, top_p, generator)
            pair = speculative.speculate(model, draft, rows, max_new_tokens, draft_tokens, stop_token, sampling)
            return pair if return_stats else pair[0]
        kv_cache = model.make_cache(len(rows), total) if cache is None else _take_pages(cache, len(rows), total)
        if compile is True and context is None and _in_one_call(model, len(rows), kv_cache):  # type: ignore[arg-type]
            step = plain
        elif compile is not False:
            _fix_heads(kv_cache)  # type: ignore[arg-type]
        times = [now(device)] if return_stats else []
        new = tokens[:, :shortest]
        for position in range(shortest, total):
            last = (plain if kv_cache.length == 0 else step)(model, new, kv_cache, context)
            logits = last if log_probs is None else model._logits(last)
            drawn = choose(logits, temperature, top_k, top_p, generator)
            if log_probs is not None:
                log_probs[:, position] = request.of(model, last, drawn, NO_TOKEN)
            new = tokens[:, position : position + 1]
            if return_stats and position == shortest:
                times.append(now(device))
            if alike:
                new.copy_(drawn.unsqueeze(1))
                continue
            open_rows = (begin <= position) & (position < end)
            new.copy_(torch.where(open_rows, drawn, new[:, 0]).unsqueeze(1))
            if stop_token is not None:
                end = torch.where(open_rows & (drawn == stop_token), position + 1, end)
                if (position - shortest) % look_every == 0 and bool((end <= position + 1).all()):
                    break
        if return_stats:
            times.append(now(device))
    finally:
        if cache is not None and kv_cache is not None:
            for sequence in kv_cache.sequences:  # type: ignore[union-attr]
                cache.free(sequence)
        for module, mode in training:
            module.training = mode
    ends = end.tolist()
    found = [row[:stop].clone() for row, stop in zip(tokens, ends, strict=True)]
    of_new = None
    if log_probs is not None:
        of_new = [row[len(prompt) : stop].clone() for row, prompt, stop in zip(log_probs, rows, ends, strict=True)]
    if not return_stats:
        return _chosen(found, of_new, None)
    before, between, after = times
    read = int(lengths.sum())
    made = sum(map(len, found)) - read
    stats = GenerationStats(
        prompt_tokens=read,
        new_tokens=made,
        prefill_tokens=shortest * len(rows),
        decode_tokens=made - int((lengths == shortest).sum()),
        prefill_seconds=between - before,
        decode_seconds=after - between if total > shortest + 1 else 0.0,
    )
    return _chosen(found, of_new, stats)


def _chosen(rows: list[Tensor], log_probs: list[Tensor] | None, stats: GenerationStats | None) -> Any:
    """The results that were asked for."""
    found = (rows, *([] if log_probs is None else [log_probs]), *([] if stats is None else [stats]))
    return rows if len(found) == 1 else found


def _take_pages(cache: PagedKVCache, n_rows: int, total: int) -> PagedBatch:
    """Creates sequences of the cache with pages for `total` positions."""
    sequences: list[int] = []
    try:
        for _ in range(n_rows):
            sequences.append(cache.add())
        cache.reserve(dict.fromkeys(sequences, total))
    except OutOfPages:
        for sequence in sequences:
            cache.free(sequence)
        raise
    return cache.batch(sequences)


def _step(model: Model, tokens: Tensor, cache: KVCache | PagedBatch, context: Context | None) -> Tensor:
    """The logits ``[B, V]`` for the next token after `tokens` ``[B, T]``."""
    logits: Tensor = model(tokens, context=context, cache=cache, last_only=True)
    return logits[:, -1]


def _step_to_head(model: Model, tokens: Tensor, cache: KVCache | PagedBatch, context: Context | None) -> Tensor:
    """The input of the head ``[B, dim]`` for the next token after `tokens` ``[B, T]``."""
    hidden: Tensor = model(tokens, context=context, cache=cache, last_only=True, return_hidden=True)
    return hidden[:, -1]


def _compiled(compile: bool | Mapping[str, Any], step: Step) -> Step:
    """torch caches the graphs, so later calls with this model reuse them. Shapes are dynamic from the first call, to
    avoid a second graph for another length."""
    if compile is not True and not isinstance(compile, Mapping):
        raise TypeError(f"compile must be a bool or a mapping of torch.compile's arguments; got {compile!r:.60}")
    options: dict[str, Any] = {"dynamic": True, "fullgraph": True, **({} if compile is True else compile)}
    compiled: Step = torch.compile(step, **options)
    return compiled


def _in_one_call(model: Model, n_rows: int, cache: KVCache) -> bool:
    """Whether one native call runs all blocks of a step of one token."""
    if not isinstance(model, Model) or model.relative_bias is not None:
        return False
    stream = model.tok_embeddings.weight.new_empty(n_rows, 1, model.config.dim)
    return in_one_call(model.layers, TransformerBlock, stream, cache)


def _fix_heads(cache: KVCache) -> None:
    """Marks the sizes of heads as static. torch.compile treats sizes that happen to be equal as one size: without this,
    a graph for a batch with as many sequences as heads would fit no other batch."""
    for stored in (*cache.k, *cache.v):
        torch._dynamo.mark_static(stored, 1)
        torch._dynamo.mark_static(stored, 3)
