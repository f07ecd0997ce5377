"""The running call of a patched model, from which masks, layers and the loss get its packed documents.

Transformers does not pass the arguments that describe documents to all masks and layers. So a patched model reads them
before it runs, and every mask that is made in the call separates its documents (`mask_functions.py`). A layer that is
computed again for a gradient runs outside of the call. It gets documents as arguments: attention by its mask's plan,
linear attention by `cu_seq_lens_q` and `cu_seq_lens_k`. Attention that is called by itself reads these arguments and
its positions. Attention that gets neither a mask nor these arguments in a call with documents raises an error.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from foundry_kernels.integrations.attention.documents import (
    LENGTHS,
    ONE_A_ROW,
    Documents,
    from_lengths,
    once,
)
from foundry_kernels.integrations.attention.plan import AttentionPlan
from foundry_kernels.integrations.attention.positions import (
    assert_one_document,
    can_be_read,
    check_mask,
    restarts,
    segments,
    text_positions,
)

#: The arguments of a model that describe packed documents.
TELLING = (*LENGTHS, "seq_idx", "position_ids", "attention_mask")


@dataclass
class Call:
    """A call of a patched model that is running.

    told: the values of the arguments in `TELLING`, as the model's layers get them. documents: the documents of the
    rows; None if each row is one document. masked: whether a mask was made that separates them.
    """

    batch: int
    queries: int
    told: tuple[Any, ...]
    documents: Documents | None
    masked: bool = False

    def repeats(self, batch: int, queries: int, told: tuple[Any, ...]) -> bool:
        """Returns whether a model in this call gets the same rows and the same documents."""
        own = () if self.documents is None else (self.documents.totals_q, self.documents.totals_k)
        same = all(a is b or any(b is x for x in own) for a, b in zip(self.told, told, strict=True))
        return (self.batch, self.queries) == (batch, queries) and same


running = threading.local()  # its `call`; torch.compile can trace it, unlike a ContextVar


def current() -> Call | None:
    """Returns the innermost call of a patched model that runs in this thread, or None."""
    return getattr(running, "call", None)


# Documents of a model ---------------------------------------------------------------------------------------------


def tokens_of(given: Mapping[str, Any]) -> Tensor | None:
    """Returns the tokens of a call, or their embeddings; None where it has none, or its masks are made already.
    Continuous batching makes its own: a call of it has places in the cache to write."""
    if isinstance(given.get("attention_mask"), dict) or given.get("write_index") is not None:
        return None
    for name in ("input_ids", "inputs_embeds"):
        tokens = given.get(name)
        if isinstance(tokens, Tensor) and tokens.dim() >= 2:
            return tokens
    return None


def read(
    given: Mapping[str, Any], batch: int, queries: int, device: torch.device
) -> tuple[Documents | None, Tensor | None]:
    """Returns the documents that a call gives, and the mask to take in place of one of segment ids.

    Their beginnings come from, in this order: data collators' lengths for flash attention (`cu_seq_lens_q`, ...) or
    `seq_idx`; position ids that restart; an attention mask of segment ids. Values are read at once: on a GPU, the host
    waits for them.

    Raises:
        ValueError: arguments contradict each other, or do not fit the batch; documents are given on a cache that is
            not empty, without the lengths of its keys.
    """
    cache: Any = given.get("cache") if given.get("cache") is not None else given.get("past_key_values")
    packed = bool(getattr(cache, "_foundry_packed", False))
    lengths = any(given.get(name) is not None for name in (*LENGTHS, "seq_idx"))
    if queries == 1 and not lengths and not packed:
        return None, None
    mask, positions = given.get("attention_mask"), text_positions(given.get("position_ids"), queries)
    mask = mask if isinstance(mask, Tensor) else None
    whole = mask.to(device) if mask is not None and mask.dim() == 2 else None
    complete = mask if mask is not None and mask.dim() == 4 else None
    positions = None if positions is None else positions.to(device)
    readable = all(can_be_read(x) for x in (whole, complete, positions) if x is not None) and not is_compiling()
    past = _past(cache) if lengths or readable else 0
    if packed:
        if past or not readable:
            raise ValueError(
                "past_key_values holds several documents per row, so it is unknown which one continues; generate from "
                "one document per row"
            )
        cache._foundry_packed = False  # it was emptied
    documents = from_lengths(given, batch, queries, past + queries) if lengths else None
    documents = None if documents is None else documents.to(device)
    if not readable:
        if documents is None:
            assert_one_document(whole, positions)
        return documents, None
    own = None if whole is None else whole[:, past : past + queries]
    real = None if own is None or own.shape[1] != queries else own != 0
    restart = None if positions is None or queries == 1 else restarts(positions, real).expand(batch, -1)
    restarting, has_ids = _any(restart, None if whole is None else (whole != 0) & (whole != 1))
    if restarting and documents is None and complete is not None and positions is not None:
        check_mask(complete, positions.expand(batch, -1), past)
        return None, None
    if has_ids and real is None and whole is not None:
        raise ValueError(f"attention_mask of segment ids must be {[batch, queries]}; got {list(whole.shape)}")
    ids = segments(own) if has_ids and own is not None else None
    for name, begins in (("position_ids", restart if restarting else None), ("attention_mask", ids)):
        if begins is None:
            continue
        if documents is not None:
            documents.check_finer(begins, name)
        elif past:
            raise ValueError(f"{name} begins a document on a cache that is not empty; {ONE_A_ROW}")
        else:
            documents = Documents.of_begins(begins, name)
    return documents, None if ids is None or whole is None else (whole != 0).to(whole.dtype)


def _any(*flags: Tensor | None) -> list[bool]:
    """Returns whether any value of each is True, waiting for the device once; False for None."""
    found = [x.any() for x in flags if x is not None]
    values = iter(torch.stack(found).tolist() if found else [])
    return [x is not None and next(values) for x in flags]


def _past(cache: Any) -> int:
    """Returns how many tokens are in a cache."""
    length = getattr(cache, "get_seq_length", None)
    try:
        past = 0 if length is None else length()
    except ValueError:  # it has states alone, of layers that mix documents, and so of one a row
        return 0
    if isinstance(past, Tensor) and is_compiling():
        raise ValueError("cu_seq_lens_q must be None with a static cache under torch.compile")
    return int(past)


# Documents of a layer ---------------------------------------------------------------------------------------------


def documents_of_layer(
    module: nn.Module, plan: AttentionPlan, kwargs: dict[str, Any], batch: int, queries: int, keys: int
) -> Documents | None:
    """Returns the documents that attention must separate if its `plan` does not; None if each row is one document.

    This is needed for a model that names "foundry" without a patch, and for a layer that is called by itself.

    Raises:
        ValueError: arguments contradict each other or the batch; or the model around `module` got documents, and
            `module` got neither a mask nor arguments that describe them.
    """
    sizes = (batch, queries, keys)
    if any(kwargs.get(name) is not None for name in (*LENGTHS, "seq_idx")):
        owner = kwargs.get("cu_seq_lens_q") if kwargs.get("cu_seq_lens_q") is not None else kwargs.get("seq_idx")
        return once(owner, sizes, lambda: from_lengths(kwargs, *sizes))
    call = current()
    if call is None or (call.batch, call.queries) != (batch, queries):
        positions = text_positions(kwargs.get("position_ids"), queries)
        if positions is None or queries == 1 or keys < queries:
            return None
        return _of_positions(plan, positions, sizes)
    if call.documents is None or (call.masked and not plan.hides_nothing):
        return None
    if getattr(module, "is_cross_attention", False):
        return None
    raise ValueError(
        f"{call.documents.given_by} gives several documents per row, but the model passes none of their boundaries to "
        f"{type(module).__name__}: they would see each other; pass one document per row"
    )


def _of_positions(plan: AttentionPlan, positions: Tensor, sizes: tuple[int, int, int]) -> Documents | None:
    batch, queries, keys = sizes
    if not can_be_read(positions):
        if plan.hides_nothing:  # else its maker sees to it, or it is one of a static cache
            assert_one_document(None, positions)
        return None
    if plan.is_callers:  # which says all
        mask = plan.dense
        assert mask is not None
        if can_be_read(mask):
            once(mask, sizes, lambda: check_mask(mask, positions.expand(batch, -1), keys - queries))
        return None
    if keys != queries:
        return None  # a cache whose documents begin at unknown positions
    real = plan.real(batch)
    owner = positions if real is None else plan.dense if plan.keys is None else plan.keys
    begins = lambda: restarts(positions, real).expand(batch, -1)  # noqa: E731
    return once(owner, sizes, lambda: Documents.of_begins(begins(), "position_ids"))
