"""The states of linear attention of the sequences in a paged cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from foundry_kernels.core.registry import wide_dtype
from foundry_kernels.models.config import ModelConfig
from foundry_kernels.models.pages import OutOfPages
from foundry_kernels.nn import GatedDeltaState
from foundry_kernels.nn._paged import PagedStep
from foundry_kernels.nn.linear_attention import LinearMixer


def make_states(
    config: ModelConfig, count: int, device: Any, dtype: torch.dtype | None
) -> list[GatedDeltaState | None]:
    """Returns for each layer with linear attention the state of `count` sequences before their first token, and None
    for the others. dtype: of the convolution's inputs."""
    found: list[GatedDeltaState | None] = [None] * config.n_layers
    heads, taps = config.linear_heads, config.linear_conv_size
    for layer in config.linear_layers:
        conv = torch.zeros(count, heads.channels, taps - 1, device=device, dtype=dtype)
        shape = count, heads.v_heads, heads.k_dim, heads.v_dim
        recurrent = torch.zeros(shape, device=device, dtype=wide_dtype(conv.dtype))
        found[layer] = GatedDeltaState(conv, recurrent)
    return found


class StateSlots:
    """A slot for the state of each of at most `n_slots` sequences, in every layer with linear attention.

    The states of a batch lie one after the other in its order, so each layer overwrites a view of them. If they do not,
    because sequences have come or gone, `arrange` moves them; between two steps of the same sequences nothing moves.

    A state does not go back to an earlier position. So a forward pass that fails leaves states that are useless,
    and `check` refuses them until they are reset.
    """

    def __init__(self, config: ModelConfig, n_slots: int, device: Any, dtype: torch.dtype | None) -> None:
        self.n_slots = n_slots
        self.layers = make_states(config, n_slots, device, dtype)
        self._slots: dict[int, int] = {}  # of each sequence
        self._free = list(range(n_slots - 1, -1, -1))
        self._written: set[int] = set()  # sequences whose layers are, or may be, at different positions

    @property
    def tensors(self) -> list[Tensor]:
        return [x for state in self.layers if state is not None for x in state]

    def check_free(self) -> None:
        """Raises OutOfPages if every slot has a sequence."""
        if not self._free:
            raise OutOfPages(
                f"cache is full: it has states of linear attention for n_sequences={self.n_slots}, and all are in use"
            )

    def add(self, sequence: int, source: int | None = None) -> None:
        """Gives the sequence a free slot, whose state is that of `source`, or the one before the first token."""
        slot = self._free[-1]
        if source is not None and source in self._written:
            self._written.add(sequence)
        for x in self.tensors:
            x[slot] = 0 if source is None else x[self._slots[source]]
        self._slots[sequence] = self._free.pop()

    def free(self, sequence: int) -> None:
        self._free.append(self._slots.pop(sequence))
        self._written.discard(sequence)

    def reset(self, sequence: int) -> None:
        """Makes it the state before the first token."""
        for x in self.tensors:
            x[self._slots[sequence]] = 0
        self._written.discard(sequence)

    def check(self, sequences: Sequence[int]) -> None:
        """Raises ValueError if a pass over one of the sequences has failed."""
        for sequence in sequences:
            if sequence in self._written:
                raise ValueError(
                    f"sequence {sequence} has states of a forward pass that failed, so its layers are at different "
                    "positions; truncate it to 0 positions and read it again"
                )

    def arrange(self, sequences: Sequence[int]) -> slice:
        """Returns the slots of the sequences, after moving them beside each other in this order."""
        slots = [self._slots[sequence] for sequence in sequences]
        start = slots[0] if slots else 0
        if slots == list(range(start, start + len(slots))):
            return slice(start, start + len(slots))
        chosen = set(sequences)
        order = [*sequences, *(other for other in self._slots if other not in chosen)]
        moved = {sequence: slot for slot, sequence in enumerate(order) if self._slots[sequence] != slot}
        before = torch.tensor([self._slots[sequence] for sequence in moved], device=self.tensors[0].device)
        after = torch.tensor(list(moved.values()), device=before.device)
        intact = moved.keys() - self._written
        self._written |= intact
        for x in self.tensors:
            x[after] = x[before]
        self._slots |= moved
        self._free = list(range(self.n_slots - 1, len(order) - 1, -1))
        self._written -= intact
        return slice(0, len(slots))

    def begin(self, layer: int, sequences: Sequence[int], slots: slice) -> GatedDeltaState:
        """Returns the states of one layer, which the caller overwrites; `finish` follows after all layers."""
        self._written.update(sequences)
        state = self.layers[layer]
        assert state is not None
        return GatedDeltaState(state.conv[slots], state.recurrent[slots])

    def finish(self, sequences: Sequence[int]) -> None:
        self._written.difference_update(sequences)


class PagedState:
    """A layer of linear attention in a forward pass over sequences of a paged cache."""

    def __init__(
        self, states: StateSlots, layer: int, sequences: Sequence[int], slots: slice, step: PagedStep, packed: bool
    ) -> None:
        self._states, self._layer, self._sequences, self._slots = states, layer, sequences, slots
        self._step, self._packed = step, packed

    def read(self, attention: LinearMixer, y: Tensor) -> Tensor:
        """Returns ``attention(y)``, which continues the sequences and overwrites their states."""
        step, state = self._step, self._states.begin(self._layer, self._sequences, self._slots)
        if not self._packed:
            found: Tensor = attention(y, state=state)
        elif step.max_seqlen_q == 1 and len(self._sequences) == len(step.page):
            # One token of each sequence is a step, which updates the states in place.
            found = attention(y.transpose(0, 1), state=state).transpose(0, 1)
        else:
            found = attention(y, cu_seqlens=step.cu_seqlens_q, state=state)
        return found
