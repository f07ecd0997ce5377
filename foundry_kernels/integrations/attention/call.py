"""A call of a patched model of transformers: its packed documents are read once and stored while it runs.

Transformers does not pass these arguments to all masks and layers. So a patched model reads them itself, and every mask
that is made while it runs separates documents (`mask_functions.py`). Masks are arguments of the layers, so a layer that
is recomputed for its gradient gets the same mask. Attention that gets neither a mask nor the arguments raises an error.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from foundry_kernels.integrations.attention.documents import (
    LENGTHS,
    ONE_A_ROW,
    Documents,
    can_be_read,
    check_finer,
    from_begins,
    from_lengths,
    restarts,
    segments,
    text_positions,
)

#: What a floating mask adds to a score at most where it hides a key: the weight, e to this, is 0.
HIDDEN = -1e3
#: The arguments of a model that describe packed documents.
TELLING = (*LENGTHS, "seq_idx", "position_ids", "attention_mask")
#: The argument by which layers of linear attention get the documents. A layer that is computed again for its gradient,
#: outside of the call, gets it again.
DOCUMENTS = "_foundry_documents"


@dataclass
class Call:
    """A call of a patched model that is running.

    told: the arguments that tell of documents, by `TELLING`, as its layers get them. documents: those of its rows; None
    for one a row. masked: whether a mask was made that keeps them apart.
    """

    batch: int
    queries: int
    told: tuple[Any, ...]
    documents: Documents | None
    masked: bool = False


_running = threading.local()  # torch.compile can trace it, unlike a ContextVar


def current() -> Call | None:
    """Returns the innermost call of a patched model that runs in this thread, or None."""
    return getattr(_running, "call", None)


def documents_of_mask(batch: int, queries: int) -> Documents | None:
    """Returns the documents of the running call for a mask of `queries` tokens of `batch` rows that is being made."""
    call = current()
    if call is None or call.documents is None or not call.documents.fits(batch, queries):
        return None
    call.masked = True
    return call.documents


def run_in(
    call: Call | None, theirs: Callable[..., Any], model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Returns the result of a model that runs in `call`."""
    outer = current()
    _running.call = call
    try:
        return theirs(model, *args, **kwargs)
    finally:
        _running.call = outer


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

    Raises:
        ValueError: arguments contradict each other, or do not fit the batch; documents are given on a cache that is
            not empty, without the lengths of its keys.
    """
    cache = given.get("cache") if given.get("cache") is not None else given.get("past_key_values")
    lengths = any(given.get(name) is not None for name in (*LENGTHS, "seq_idx"))
    if queries == 1 and not lengths and not getattr(cache, "_foundry_packed", False):
        return None, None
    mask, positions = given.get("attention_mask"), text_positions(given.get("position_ids"), queries)
    if not isinstance(mask, Tensor):
        mask = None
    elif mask.dim() == 2:
        mask = mask.to(device)
    positions = None if positions is None else positions.to(device)
    readable = all(can_be_read(x) for x in (mask, positions) if x is not None) and not is_compiling()
    past = _past(cache) if lengths or readable else 0
    if cache is not None and getattr(cache, "_foundry_packed", False):
        if past or not readable:
            raise ValueError(
                "past_key_values holds several documents per row, so it is unknown which one continues; generate from "
                "one document per row"
            )
        cache._foundry_packed = False  # it was emptied
    documents = from_lengths(given, batch, queries, past + queries) if lengths else None
    documents = None if documents is None else documents.to(device)
    whole = mask if mask is not None and mask.dim() == 2 else None
    if not readable:
        if documents is None:
            assert_one_document(whole, positions)
        return documents, None
    restart, ids = _begins(positions, whole, batch, queries, past)
    if restart is not None and documents is None and mask is not None and mask.dim() == 4:
        assert positions is not None  # which restart
        check_mask(mask, positions.expand(batch, -1), past)
        return None, None
    for begins, name in ((restart, "position_ids"), (ids, "attention_mask")):
        if begins is None:
            continue
        if documents is not None:
            check_finer(documents, begins, name)
        elif past:
            raise ValueError(f"{name} begins a document on a cache that is not empty; {ONE_A_ROW}")
        else:
            documents = from_begins(begins, name)
    return documents, None if ids is None or whole is None else (whole != 0).to(whole.dtype)


def _begins(
    positions: Tensor | None, mask: Tensor | None, batch: int, queries: int, past: int
) -> tuple[Tensor | None, Tensor | None]:
    """Returns where positions begin documents, and where segment ids do, ``[B, T - 1]`` each; None where they are no
    such positions or ids. The values are read at once: on a GPU, the host waits for them."""
    own = None if mask is None else mask[:, past : past + queries]
    real = None if own is None or own.shape[1] != queries else own != 0
    restart = None if positions is None or queries == 1 else restarts(positions, real).expand(batch, -1)
    flags = [x.any() for x in (restart, _unlike_a_mask(mask)) if x is not None]
    found = torch.stack(flags).tolist() if flags else []
    has_ids = mask is not None and found.pop()
    restart = restart if found and found[0] else None
    if mask is None or own is None or not has_ids:
        return restart, None
    if real is None:
        raise ValueError(f"attention_mask of segment ids must be {[batch, queries]}; got {list(mask.shape)}")
    return restart, segments(own)


def _unlike_a_mask(mask: Tensor | None) -> Tensor | None:
    """Returns where a mask is neither 0 nor 1."""
    return None if mask is None else (mask != 0) & (mask != 1)


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


def assert_one_document(mask: Tensor | None, positions: Tensor | None) -> None:
    """Fails when the graph runs, as no value can be read before."""
    if not is_compiling() and any(x is not None and _is_unchecked(x) for x in (mask, positions)):
        return
    real = None
    if mask is not None and mask.dtype != torch.bool:
        real = mask != 0
        torch._assert_async(
            ((mask == 1) | ~real).all(), "attention_mask has segment ids: torch.compile must be given cu_seq_lens_q"
        )
    if positions is not None:
        if real is not None and real.shape[1] != positions.shape[1]:
            return  # on a cache of unknown length
        torch._assert_async(
            ~restarts(positions, real).any(), "position_ids restart: torch.compile must be given cu_seq_lens_q"
        )


def _is_unchecked(x: Tensor) -> bool:
    """Returns whether `x` has no values, or those of many calls: no check of it can run."""
    return x.device.type == "meta" or bool(torch._C._functorch.is_functorch_wrapped_tensor(x))


def check_mask(mask: Tensor, positions: Tensor, past: int) -> None:
    """Raises ValueError where a mask of four dimensions lets a token see one of another document.

    Such a mask defines everything that a token sees, and branches with a common prefix repeat positions. So a document
    only begins where the first position of its row is repeated.
    """
    if past or mask.shape[-1] != positions.shape[1] or mask.shape[-2] != positions.shape[1]:
        return
    place = (positions == positions[:, :1]).cumsum(1)
    apart = (place[:, :, None] != place[:, None])[:, None]
    if mask.is_floating_point():
        mask = mask > HIDDEN
    if mask.dtype == torch.bool and bool((mask & apart).any()):
        raise ValueError(
            "attention_mask lets a token see another document, which position_ids begins: they contradict each other"
        )
