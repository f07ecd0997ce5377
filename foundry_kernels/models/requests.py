"""The requests of a :class:`Generator`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foundry_kernels.models.log_probs import NO_TOKEN, LogProbs
from foundry_kernels.models.model import Model


@dataclass
class Request:
    number: int
    tokens: list[int]  # of the prompt, and generated ones
    begin: int  # length of the prompt
    end: int  # its final length
    temperature: float
    top_k: int | None
    top_p: float | None
    stop_token: int | None
    generator: torch.Generator | None
    prefix_of: int | None
    scored_at: float | None = None  # the temperature of its log-probabilities, if they are returned
    sequence: int = -1  # its number in the cache

    @property
    def positions(self) -> int:
        """The final number of stored positions: all tokens but the last one."""
        return self.end - 1


def scores_of(
    model: Model, hidden: Tensor, read: Sequence[tuple[int, Request]], drawn: Sequence[int]
) -> dict[int, Tensor]:
    """Returns the log-probability of each drawn token by the number of its request, where it is asked for.

    hidden: ``[N, dim]``, the head's input. read: the rows of it that tokens were drawn from, and their requests.
    """
    by_temperature: dict[float, list[tuple[int, int, int]]] = {}
    for (row, request), token in zip(read, drawn, strict=True):
        if request.scored_at is not None:
            by_temperature.setdefault(request.scored_at, []).append((row, token, request.number))
    found: dict[int, Tensor] = {}
    for temperature, each in by_temperature.items():
        rows, tokens, _ = torch.tensor(each).T.to(hidden.device)
        scores = LogProbs(temperature=temperature).of(model, hidden[rows], tokens, NO_TOKEN)
        found |= zip([number for _, _, number in each], scores.unbind(), strict=True)
    return found
