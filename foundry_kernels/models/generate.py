"""Continue prompts with a key-value cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor

from foundry_kernels.core.checks import check_bool, check_int, check_not_negative, check_positive
from foundry_kernels.models.inputs import ends_before, table_of
from foundry_kernels.models.pages import OutOfPages
from foundry_kernels.nn._tables import PositionTables

if TYPE_CHECKING:
    from foundry_kernels.models.cache import KVCache
    from foundry_kernels.models.context import Context
    from foundry_kernels.models.paged_cache import PagedBatch, PagedKVCache
    from foundry_kernels.models.transformer import Transformer

Prompts = Tensor | Sequence[Tensor | Sequence[int]]
Step = Callable[["Transformer", Tensor, "KVCache | PagedBatch", "Context | None"], Tensor]

#: On a GPU, after how many tokens it is seen whether all rows have stopped: looking waits for the GPU.
_LOOK_EVERY = 16
#: Of how many of the most likely tokens `top_p` is tried first, where looking waits for no GPU.
_TOP_P_FIRST = 64


@dataclass(frozen=True)
class GenerationStats:
    """How fast :func:`generate` was, in its two phases: *prefill* reads the prompts in one pass, which is bound by
    arithmetic, and *decode* makes a token a step, which is bound by reading weights and cache.

    Attributes:
        prompt_tokens: of all prompts.
        new_tokens: of all rows, a stop token included.
        prefill_tokens: read in the first pass: as many of each prompt as the shortest has, with a draft all.
        decode_tokens: new tokens that steps of one token made: all but the first one of the rows whose prompt the first
            pass has read to its end. (Such a step may read the rest of a longer prompt beside, which counts as no
            token.)
        prefill_seconds: until the first tokens are drawn, and a draft has read the prompts too.
        decode_seconds: from then on, with what `compile` compiles in the first call.
        drafted_tokens: that a draft proposed and the model verified.
        accepted_tokens: of these, those that the model accepted.
    """

    prompt_tokens: int = 0
    new_tokens: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def prefill_tokens_per_second(self) -> float:
        """0 where no prompt was read."""
        return self.prefill_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        """Of all rows together; 0 where there was no step after the first pass."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted of drafted tokens; 0 where none was drafted."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else 0.0

    def __str__(self) -> str:
        drafted = f", accepted {self.accepted_tokens:,} of {self.drafted_tokens:,} drafted tokens"
        return (
            f"prefill {self.prefill_tokens:,} tokens at {self.prefill_tokens_per_second:,.0f} tokens/s, "
            f"decode {self.decode_tokens:,} tokens at {self.decode_tokens_per_second:,.0f} tokens/s"
            f"{drafted if self.drafted_tokens else ''}"
        )


class Options(TypedDict, total=False):
    """The keyword arguments of :func:`generate` without the one that decides what is returned."""

    temperature: float
    top_k: int | None
    top_p: float | None
    stop_token: int | None
    generator: torch.Generator | None
    compile: bool | Mapping[str, Any]
    context: Context | None
    cache: PagedKVCache | None
    draft: Transformer | None
    draft_tokens: int


@overload
def generate(
    model: Transformer,
    prompts: Prompts,
    max_new_tokens: int,
    *,
    return_stats: Literal[False] = False,
    **options: Unpack[Options],
) -> list[Tensor]: ...
@overload
def generate(
    model: Transformer,
    prompts: Prompts,
    max_new_tokens: int,
    *,
    return_stats: Literal[True],
    **options: Unpack[Options],
) -> tuple[list[Tensor], GenerationStats]: ...
@torch.no_grad()
def generate(
    model: Transformer,
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
    draft: Transformer | None = None,
    draft_tokens: int = 4,
    return_stats: bool = False,
) -> list[Tensor] | tuple[list[Tensor], GenerationStats]:
    """Continues each prompt by at most `max_new_tokens` tokens.

    Prompts may differ in length, and a greedy continuation is that of the prompt alone: all rows read as many tokens as
    the shortest prompt has in one pass, and then continue token by token: a row takes its prompt's tokens while there
    are any, then its own predictions. Padding is never attended to. In exchange, a prompt's tokens beyond the length
    of the shortest are read one at a time, so group prompts of similar lengths, or use :class:`Generator`, which packs
    them.

    The model runs in evaluation mode and without gradients, and is left in the mode that it was in.

    Args:
        prompts: ``[B, T]`` integer tensor, or a sequence of 1-D integer tensors or lists of ints, each of at least one
            token.
        max_new_tokens: for each prompt; 0 or more.
        temperature: 0 takes the most likely token; above 0, logits are divided by it and a token is drawn.
        top_k: draw only from the k most likely tokens.
        top_p: draw only from the smallest set of tokens whose probabilities sum to at least top_p; after `top_k`.
        stop_token: ends a row; it is kept as the row's last token. One inside a prompt ends nothing.
        generator: source of the draws, on the model's device.
        compile: run the steps of one token through ``torch.compile``; a mapping is passed to it as keyword arguments.
            One graph runs all lengths, and later calls with the same model; the prompts' common part is read without
            it. A model that is compiled already is called as it is.
        context: of a model with `context_dim`, what its `read_context` has read, a row for each prompt.
        cache: pages for the prompts' keys and values, beside what other sequences have there; they are free again when
            this returns. None makes a cache for the call. Not with `compile`.
        draft: a smaller model of the same vocabulary, whose proposals this one verifies, several in one pass (see
            :mod:`foundry_kernels.models.speculative`). Tokens are distributed as without it, and greedy ones are the
            same. A pass over several tokens may round the last bits of logits otherwise than one over a single token,
            so near-ties may be decided otherwise; not so within :func:`foundry_kernels.batch_invariant`. Both models
            read whole prompts in one pass. Not with `compile`, a context or a cache.
        draft_tokens: proposed for each pass of the model, at most; 1 or more.
        return_stats: return the times of the two phases too. A GPU is waited for before, between and behind them.

    Returns:
        For each prompt the prompt and its continuation, 1-D int64 on the model's device; with `return_stats` a pair of
        these and a :class:`GenerationStats`.

    Raises:
        TypeError: prompts or max_new_tokens are no integers.
        ValueError: an empty prompt, a prompt and new tokens beyond the table of learned positions, tokens outside the
            vocabulary, temperature < 0, top_k < 1, top_p outside (0, 1], a generator on another device, a model that is
            not causal or has no head, a context or a cache that does not fit, a draft of another vocabulary or device
            or that could not generate, and with one a context, a cache, `compile`, relative positions or "dynamic"
            frequencies beyond their table.
        OutOfPages: the cache has fewer free pages than all rows need to the end.
    """
    config, device = model.config, model.tok_embeddings.weight.device
    if not (config.causal and config.head):
        raise ValueError("generate needs a model with causal=True and head=True")
    rows = read_prompts(prompts, config.vocab_size)
    _check_options(max_new_tokens, temperature, top_k, top_p, stop_token, config.vocab_size)
    if generator is not None and generator.device.type != device.type:
        raise ValueError(f"generator must be on the model's device {device}; got {generator.device}")
    check_bool("return_stats", return_stats)
    check_int("draft_tokens", draft_tokens, minimum=1)
    if draft is not None:
        from foundry_kernels.models import speculative  # which draws by the functions of this file

        speculative.check_draft(model, draft, compile=compile, context=context, cache=cache)
    if not rows:
        return ([], GenerationStats()) if return_stats else []
    lengths = torch.tensor([len(row) for row in rows])
    shortest, longest = int(lengths.min()), int(lengths.max())
    if ends_before(longest + max_new_tokens, config):
        raise ValueError(
            f"prompts of up to {longest} tokens and max_new_tokens={max_new_tokens} do not fit; {table_of(config)}"
        )
    if max_new_tokens == 0:
        same = [row.to(device) for row in rows]
        return (same, GenerationStats(prompt_tokens=int(lengths.sum()))) if return_stats else same

    total = longest + max_new_tokens
    tokens = torch.zeros(len(rows), total, dtype=torch.int64)
    for row, prompt in zip(tokens, rows, strict=True):
        row[: len(prompt)] = prompt
    tokens, begin = tokens.to(device), lengths.to(device)
    end = begin + max_new_tokens  # a row's length once it is finished
    alike = shortest == longest and stop_token is None  # so that each row takes each token
    look_every = 1 if device.type == "cpu" else _LOOK_EVERY
    step = _step if compile is False else _compiled(compile)
    if cache is not None and compile is not False:
        raise ValueError("compile must be False with a cache in pages, whose tables each step makes")
    models = (model,) if draft is None else (model, draft)
    training = [(module, module.training) for one in models for module in one.modules()]
    for one in models:
        one.eval()
    rows_of: KVCache | PagedBatch | None = None
    try:
        for module, _ in training:
            if isinstance(module, PositionTables) and not module.follows_length:
                module.reserve(total)  # once, and not inside of a compiled step
        if draft is not None:
            sampling = speculative.Sampling(temperature, top_k, top_p, generator)
            pair = speculative.speculate(model, draft, rows, max_new_tokens, draft_tokens, stop_token, sampling)
            return pair if return_stats else pair[0]
        rows_of = model.make_cache(len(rows), total) if cache is None else _take_pages(cache, len(rows), total)
        if compile is not False:
            _fix_heads(rows_of)  # type: ignore[arg-type]
        times = [_now(device)] if return_stats else []
        new = tokens[:, :shortest]
        for position in range(shortest, total):
            logits = (_step if rows_of.length == 0 else step)(model, new, rows_of, context)
            drawn = _choose(logits, temperature, top_k, top_p, generator)
            new = tokens[:, position : position + 1]
            if return_stats and position == shortest:
                times.append(_now(device))
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
            times.append(_now(device))
    finally:
        if cache is not None and rows_of is not None:
            for sequence in rows_of.sequences:  # type: ignore[union-attr]
                cache.free(sequence)
        for module, mode in training:
            module.training = mode
    found = [row[:stop].clone() for row, stop in zip(tokens, end.tolist(), strict=True)]
    if not return_stats:
        return found
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
    return found, stats


def _now(device: torch.device) -> float:
    """Seconds, once the GPU has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _take_pages(cache: PagedKVCache, n_rows: int, total: int) -> PagedBatch:
    """New sequences of the cache, with pages for `total` positions."""
    sequences = [cache.add() for _ in range(n_rows)]
    try:
        cache.reserve(dict.fromkeys(sequences, total))
    except OutOfPages:
        for sequence in sequences:
            cache.free(sequence)
        raise
    return cache.batch(sequences)


def _step(model: Transformer, tokens: Tensor, cache: KVCache | PagedBatch, context: Context | None) -> Tensor:
    """Logits ``[B, V]`` of what follows `tokens` ``[B, T]``."""
    logits: Tensor = model(tokens, context=context, cache=cache, last_only=True)
    return logits[:, -1]


def _compiled(compile: bool | Mapping[str, Any]) -> Step:
    """torch keeps the graphs: what an earlier call compiled for this model is found again. Dynamic from the first call,
    or a second graph would be made for another length."""
    if compile is not True and not isinstance(compile, Mapping):
        raise TypeError(f"compile must be a bool or a mapping of torch.compile's arguments; got {compile!r:.60}")
    options: dict[str, Any] = {"dynamic": True, "fullgraph": True, **({} if compile is True else compile)}
    compiled: Step = torch.compile(_step, **options)
    return compiled


def _fix_heads(cache: KVCache) -> None:
    """The model fixes the sizes of heads. To torch.compile, sizes that are equal by chance are one: without this, a
    batch of as many sequences as there are heads would be compiled for no other."""
    for stored in (*cache.k, *cache.v):
        torch._dynamo.mark_static(stored, 1)
        torch._dynamo.mark_static(stored, 3)


def _choose(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator | None
) -> Tensor:
    """Returns one token a row ``[B]`` from logits ``[B, V]``."""
    if temperature == 0.0:
        return logits.argmax(-1)
    likely, kept = _likely(logits, temperature, top_k, top_p)
    drawn = _draw(likely, generator)
    return drawn if kept is None else kept.gather(-1, drawn.unsqueeze(-1)).squeeze(-1)


def _likely(logits: Tensor, temperature: float, top_k: int | None, top_p: float | None) -> tuple[Tensor, Tensor | None]:
    """Returns how likely tokens are ``[..., n]``, up to a factor and 0 for those that `top_p` leaves out, and which
    tokens the columns stand for; None: each for its own."""
    size = logits.shape[-1]
    logits = logits.float()
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature  # the likeliest is 0, however low the temperature
    kept = None
    if top_k is not None and top_k < size:
        # By index and not by value: of tokens that tie at the threshold, no more than k may stay.
        logits, kept = logits.topk(top_k, dim=-1)
    likely = logits.softmax(-1)
    if top_p is not None and top_p < 1.0:
        if kept is None:  # else they are in order
            likely, kept = _most_likely(likely, top_p)
        before = likely.cumsum(-1) - likely  # the sum over the tokens that are more likely
        likely = likely.masked_fill(before >= top_p, 0.0)
    return likely, kept


def _draw(likely: Tensor, generator: torch.Generator | None) -> Tensor:
    """Returns columns ``[B]`` of ``[B, n]``. As torch.multinomial draws one, but for its look at the probabilities,
    which waits for a GPU."""
    return (likely / torch.empty_like(likely).exponential_(1.0, generator=generator)).argmax(-1)


def _most_likely(likely: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """Probabilities ``[B, V]`` in descending order and the tokens they are of: as many as sum to `top_p` or more."""
    if likely.is_cpu and likely.shape[-1] >= 4 * _TOP_P_FIRST:
        values, tokens = likely.topk(_TOP_P_FIRST, dim=-1)
        if bool((values.sum(-1) >= top_p).all()):
            return values, tokens
    return likely.sort(dim=-1, descending=True, stable=True)


def read_prompts(prompts: Prompts, vocab_size: int, what: str = "prompts") -> list[Tensor]:
    """Returns the prompts as int64 tensors on the CPU, checked."""
    if isinstance(prompts, Tensor) and prompts.dim() != 2:
        raise ValueError(f"{what} must be a [B, T] tensor or a sequence of 1-D prompts; got {tuple(prompts.shape)}")
    if isinstance(prompts, str) or not isinstance(prompts, Tensor | Sequence):
        raise TypeError(f"{what} must be a tensor or a sequence of prompts; got {type(prompts).__name__}")
    return [read_prompt(prompt, f"{what}[{index}]", vocab_size) for index, prompt in enumerate(prompts)]


def read_prompt(prompt: Tensor | Sequence[int], name: str, vocab_size: int) -> Tensor:
    """Returns the prompt as an int64 tensor on the CPU, checked."""
    if not isinstance(prompt, Tensor):
        if not isinstance(prompt, Sequence) or not all(type(token) is int for token in prompt):
            raise TypeError(f"{name} must be a 1-D integer tensor or a sequence of ints; got {prompt!r:.60}")
        prompt = torch.tensor(prompt, dtype=torch.int64)
    if prompt.dtype.is_floating_point or prompt.dtype.is_complex or prompt.dtype == torch.bool:
        raise TypeError(f"{name} must hold integers; got {prompt.dtype}")
    if prompt.dim() != 1:
        raise ValueError(f"{name} must be 1-D; got shape {tuple(prompt.shape)}")
    if prompt.numel() == 0:
        raise ValueError(f"{name} is empty; it needs at least one token")
    row = prompt.detach().to("cpu", torch.int64)
    low, high = int(row.min()), int(row.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(f"{name} must hold tokens in 0 .. {vocab_size - 1}; got {low if low < 0 else high}")
    return row


def _check_options(
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    stop_token: int | None,
    vocab_size: int,
) -> None:
    if not isinstance(max_new_tokens, int):
        raise TypeError(f"max_new_tokens must be an int; got {type(max_new_tokens).__name__}")
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens must be at least 0; got {max_new_tokens}")
    check_not_negative("temperature", temperature)
    if top_k is not None:
        check_int("top_k", top_k, minimum=1)
    if top_p is not None:
        if not 0.0 < top_p <= 1.0:
            raise ValueError(f"top_p must be None or in (0, 1]; got {top_p}")
        check_positive("top_p", top_p)
    if stop_token is not None and not 0 <= stop_token < vocab_size:
        raise ValueError(f"stop_token must be None or in 0 .. {vocab_size - 1}; got {stop_token}")
