"""Where documents begin by positions and by masks of tokens, and whether a mask of pairs keeps them apart."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn.functional import pad

#: What a floating mask adds to a score at most where it hides a key: the weight, e to this, is 0.
HIDDEN = -1e3
UNREAD = "torch.compile must be given cu_seq_lens_q"


def can_be_read(x: Tensor) -> bool:
    """Returns whether Python may look at the values of `x`: nothing traces or captures what is computed."""
    if is_compiling() or isinstance(x, torch._subclasses.FakeTensor) or x.device.type == "meta":
        return False
    if torch._C._functorch.is_functorch_wrapped_tensor(x):
        return False
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def text_positions(position_ids: Any, queries: int) -> Tensor | None:
    """Returns positions ``[1 or B, T]`` that restart with each document, or None.

    Models of images have several axes. Of four or more the first counts tokens. Of three none does: they are of time,
    height and width, and repeat within an image.
    """
    if not isinstance(position_ids, Tensor) or position_ids.is_floating_point() or queries != position_ids.shape[-1]:
        return None
    if position_ids.dim() == 3 and position_ids.shape[0] >= 3:
        return position_ids[0] if position_ids.shape[0] > 3 else _since_zero(position_ids)
    return position_ids if position_ids.dim() == 2 else None


def _since_zero(axes: Tensor) -> Tensor:
    """Returns the number of tokens since the last one at 0, ``[B, T]``, of positions ``[3, B, T]``.

    A document begins with its only token at 0 on all axes: what follows an image is beyond all its positions. Just
    HunYuan-VL has images that begin at 0, and then go along the first axis, which is no axis of time there.
    """
    begins = (axes == 0).all(0)
    along = (axes[0, :, 1:] == 1) & (axes[1:, :, 1:] == 0).all(0)
    begins = begins & ~pad(along, (0, 1))
    at = torch.arange(axes.shape[-1], device=axes.device)
    return at - torch.where(begins, at, 0).cummax(1).values


def restarts(positions: Tensor, real: Tensor | None = None) -> Tensor:
    """Returns ``[B, T - 1]`` bool: the position of token t + 1 does not follow the previous token's, and neither is
    padding.

    real: ``[B, T]`` bool, False for padding, whose positions have no meaning.
    """
    if real is None:
        return positions[:, 1:] <= positions[:, :-1]
    positions = positions.expand(real.shape[0], -1)
    before = _token_before(real)
    return (positions[:, 1:] <= positions.gather(1, before.clamp_min(0))) & real[:, 1:] & (before >= 0)


def _token_before(real: Tensor) -> Tensor:
    """Returns, for each token except the first, the last earlier token that is not padding, ``[B, T - 1]``; -1 for
    none."""
    at = torch.arange(real.shape[1], device=real.device)
    return torch.where(real, at, -1).cummax(1).values[:, :-1]


def segments(mask: Tensor) -> Tensor:
    """Returns ``[B, T - 1]`` bool of a mask of segment ids ``[B, T]``, 0 for padding: whether token t + 1 begins one.

    Raises:
        ValueError: the tokens of a segment are not side by side.
    """
    real = mask != 0
    before = _token_before(real)
    begins = (mask[:, 1:] != mask.gather(1, before.clamp_min(0))) & real[:, 1:] & (before >= 0)
    _check_runs("attention_mask", mask, begins, padding=0)
    return begins


def _check_runs(name: str, ids: Tensor, begins: Tensor, padding: int | None = None) -> None:
    """Raises ValueError if a document of `ids` ``[B, T]`` is in two pieces. begins: ``[B, T - 1]``, whether token t + 1
    begins a document. padding: the id of tokens without a document."""
    for row, begin in zip(ids, begins, strict=True):
        documents = row if padding is None else row[row != padding]
        if max(len(documents.unique()), 1) != int(begin.sum()) + 1:
            raise ValueError(f"{name} must have the tokens of a document side by side; got {row.tolist()[:20]}")


def described(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else repr(value)


def begins_of_ids(seq_idx: Any, batch: int, queries: int) -> Tensor:
    """Returns ``[B, T - 1]`` bool of `seq_idx`: whether token t + 1 begins a document."""
    if not isinstance(seq_idx, Tensor) or seq_idx.shape != (batch, queries) or seq_idx.is_floating_point():
        raise ValueError(f"seq_idx must be a tensor {[batch, queries]} of integers; got {described(seq_idx)}")
    begins = seq_idx.diff(dim=1) != 0
    _check_runs("seq_idx", seq_idx, begins)
    return begins


def assert_one_document(mask: Tensor | None, positions: Tensor | None) -> None:
    """Fails when the graph runs, as no value can be read before."""
    if not is_compiling() and any(x is not None and _is_unchecked(x) for x in (mask, positions)):
        return
    real = None
    if mask is not None and mask.dtype != torch.bool:
        real = mask != 0
        torch._assert_async(((mask == 1) | ~real).all(), f"attention_mask has segment ids: {UNREAD}")
    if positions is not None:
        if real is not None and real.shape[1] != positions.shape[1]:
            return  # on a cache of unknown length
        torch._assert_async(~restarts(positions, real).any(), f"position_ids restart: {UNREAD}")


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
