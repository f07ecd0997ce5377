"""Documents of 5, 9 and 4 tokens in one row, and the arguments that describe them to a model."""

from __future__ import annotations

from typing import Any

import torch
from patching import close
from torch import Tensor

LENGTHS = (5, 9, 4)
IDS = torch.randint(3, 61, (1, 18), generator=torch.Generator().manual_seed(0))
CHANGED = torch.cat([(IDS[:, :5] + 7) % 57 + 3, IDS[:, 5:]], 1)
POSITIONS = torch.cat([torch.arange(n) for n in LENGTHS])[None]
ONES = torch.ones_like(IDS)
SEGMENTS = torch.tensor([[1] * 5 + [2] * 9 + [3] * 4])
TOTALS = torch.tensor([0, 5, 14, 18], dtype=torch.int32)
GIVEN: dict[str, Any] = {"cu_seq_lens_q": TOTALS, "cu_seq_lens_k": TOTALS, "max_length_q": 9, "max_length_k": 9}
CAUSAL = torch.ones(1, 1, 18, 18, dtype=torch.bool).tril()

#: Arguments that describe the documents, by positions and in other ways.
BY_POSITIONS: dict[str, dict[str, Any]] = {
    "positions": {"position_ids": POSITIONS},
    "positions, mask": {"position_ids": POSITIONS, "attention_mask": ONES},
    "positions, no cache": {"position_ids": POSITIONS, "use_cache": False},
    "positions, mask, no cache": {"position_ids": POSITIONS, "attention_mask": ONES, "use_cache": False},
    "positions, lengths": {"position_ids": POSITIONS, **GIVEN},
    "positions, segments": {"position_ids": POSITIONS, "attention_mask": SEGMENTS},
}
OTHERS: dict[str, dict[str, Any]] = {
    "lengths": GIVEN,
    "lengths, mask": {**GIVEN, "attention_mask": ONES},
    "lengths as tensors": {**GIVEN, "max_length_q": torch.tensor(9), "max_length_k": torch.tensor([9])},
    "segments": {"attention_mask": SEGMENTS},
    "seq_idx": {"seq_idx": SEGMENTS - 1},
}
DENSE: dict[str, dict[str, Any]] = {
    "lengths, a bool mask": {**GIVEN, "attention_mask": CAUSAL},
    "lengths, a float mask": {**GIVEN, "attention_mask": torch.zeros(CAUSAL.shape).masked_fill(~CAUSAL, -1e9)},
}


def leaks(model: Any, **given: Any) -> bool:
    """Whether another first document changes the logits of the others."""
    first, second = (model(ids, **given)[0] for ids in (IDS, CHANGED))
    return not close(first[:, 5:], second[:, 5:])


def refused(model: Any, ids: Tensor, **given: Any) -> bool:
    """Whether the model refuses a call in words about documents."""
    try:
        model(ids, **given)
    except ValueError as error:
        return "document" in str(error)
    return False
