"""Shared code of generation: prompts, options, sampling and timing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from foundry_kernels.core.checks import check_int, check_not_negative, check_positive

Prompts = Tensor | Sequence[Tensor | Sequence[int]]

#: On a CPU, `top_p` is first tried on this number of most likely tokens.
_TOP_P_FIRST = 64


@dataclass(frozen=True)
class GenerationStats:
    """The speed of the two phases of :func:`generate`: *prefill* reads the prompts in one pass, which is compute-bound,
    and *decode* generates one token per step, which is bound by reading weights and cache.

    Attributes:
        prompt_tokens: tokens of all prompts.
        new_tokens: new tokens of all rows, including a stop token.
        prefill_tokens: tokens read in the first pass: from each prompt as many as the shortest has; with a draft, all.
        decode_tokens: new tokens of the later steps: all except the first tokens of rows whose prompts the first pass
            read completely. (A step may also read the rest of a longer prompt; these tokens do not count.)
        prefill_seconds: the time until the first tokens are drawn and, with a draft, until it has read the prompts.
        decode_seconds: the time of the later steps, including the compilation in the first call with `compile`.
        drafted_tokens: tokens that a draft proposed and the model verified.
        accepted_tokens: drafted tokens that the model accepted.
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
        """0 if no prompt was read."""
        return self.prefill_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        """The speed of all rows together; 0 if there was no step after the first pass."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def acceptance_rate(self) -> float:
        """The accepted fraction of drafted tokens; 0 if none was drafted."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else 0.0

    def __str__(self) -> str:
        drafted = f", accepted {self.accepted_tokens:,} of {self.drafted_tokens:,} drafted tokens"
        return (
            f"prefill {self.prefill_tokens:,} tokens at {self.prefill_tokens_per_second:,.0f} tokens/s, "
            f"decode {self.decode_tokens:,} tokens at {self.decode_tokens_per_second:,.0f} tokens/s"
            f"{drafted if self.drafted_tokens else ''}"
        )


class Sampling(NamedTuple):
    """The sampling options; see :func:`foundry_kernels.models.generate`."""

    temperature: float
    top_k: int | None
    top_p: float | None
    generator: torch.Generator | None

    def probabilities(self, logits: Tensor) -> Tensor:
        """Returns float32 probabilities for logits ``[..., V]``, 0 for excluded tokens."""
        probs, kept = likely_tokens(logits, self.temperature, self.top_k, self.top_p)
        if kept is not None:
            probs = torch.zeros(logits.shape, device=logits.device).scatter(-1, kept, probs)
        return probs / probs.sum(-1, keepdim=True)


def now(device: torch.device) -> float:
    """The time in seconds, after synchronizing with the GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def choose(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator | None
) -> Tensor:
    """Returns a token for each row ``[B]`` of logits ``[B, V]``."""
    if temperature == 0.0:
        return logits.argmax(-1)
    probs, kept = likely_tokens(logits, temperature, top_k, top_p)
    drawn = draw(probs, generator)
    return drawn if kept is None else kept.gather(-1, drawn.unsqueeze(-1)).squeeze(-1)


def likely_tokens(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float | None
) -> tuple[Tensor, Tensor | None]:
    """Returns unnormalized probabilities ``[..., n]``, 0 for tokens that `top_p` excludes, and the tokens of the
    columns; None if column i is token i."""
    size = logits.shape[-1]
    logits = logits.float()
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature  # the largest is 0 for any temperature
    kept = None
    if top_k is not None and top_k < size:
        # By index and not by value, so that no more than k tokens remain if some tie at the threshold.
        logits, kept = logits.topk(top_k, dim=-1)
    probs = logits.softmax(-1)
    if top_p is not None and top_p < 1.0:
        if kept is None:  # otherwise they are already sorted
            probs, kept = _most_likely(probs, top_p)
        before = probs.cumsum(-1) - probs  # the sum over more likely tokens
        probs = probs.masked_fill(before >= top_p, 0.0)
    return probs, kept


def draw(probs: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draws one column ``[B]`` per row of ``[B, n]``, like torch.multinomial but without its check of the
    probabilities, which waits for a GPU."""
    return (probs / torch.empty_like(probs).exponential_(1.0, generator=generator)).argmax(-1)


def _most_likely(probs: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """Probabilities ``[B, V]`` in descending order and their tokens, at least as many as sum to `top_p`."""
    if probs.is_cpu and probs.shape[-1] >= 4 * _TOP_P_FIRST:
        values, tokens = probs.topk(_TOP_P_FIRST, dim=-1)
        if bool((values.sum(-1) >= top_p).all()):
            return values, tokens
    return probs.sort(dim=-1, descending=True, stable=True)


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


def check_options(
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
