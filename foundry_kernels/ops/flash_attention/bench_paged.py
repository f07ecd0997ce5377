"""Decoding from a cache in pages: one new token of each of several sequences, beside the same from packed keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foundry_kernels.core.contract import Peers
from foundry_kernels.testing import Arg, Case

#: Sequences, keys of each, and sizes of pages; the heads are those of Llama-3-8B.
_SEQUENCES, _KEYS, _SIZES = {"cpu": 4, "cuda": 16}, 4096, (16, 256)
QUICK = ("-contiguous", "-pages-of-16", "-pages-of-256")


@dataclass(frozen=True)
class _Steps:
    """0, step, 2 step, .."""

    step: int

    def __call__(self, g: torch.Generator, shape: tuple[int, ...]) -> Tensor:
        return torch.arange(shape[0], dtype=torch.float64) * self.step


@dataclass(frozen=True)
class _Permuted:
    """Each page once, in a random order."""

    def __call__(self, g: torch.Generator, shape: tuple[int, ...]) -> Tensor:
        return torch.randperm(shape[0] * shape[1], generator=g).to(torch.float64).view(shape)


@dataclass(frozen=True)
class _Full:
    value: int

    def __call__(self, g: torch.Generator, shape: tuple[int, ...]) -> Tensor:
        return torch.full(shape, self.value, dtype=torch.float64)


def cases(device: str) -> tuple[Case, ...]:
    b, index = _SEQUENCES[device], torch.int32
    name = f"B={b} H=32 Hk=8 T=1 S={_KEYS} D=128-decode"
    longest = {"causal": True, "max_seqlen_q": 1, "max_seqlen_k": _KEYS}

    def ends(step: int) -> Arg:
        return Arg((b + 1,), values=_Steps(step), dtype=index, grad=False)

    q, packed = Arg((b, 32, 128), grad=False), Arg((b * _KEYS, 8, 128), grad=False)
    args = {"q": q, "k": packed, "v": packed, "cu_seqlens_q": ends(1), "cu_seqlens_k": ends(_KEYS)}
    found = [Case(f"{name}-contiguous", args, longest)]
    for size in _SIZES:
        pages = Arg((b * _KEYS // size, size, 8, 128), grad=False)
        paged: dict[str, Arg | None] = {
            "q": q, "k": pages, "v": pages, "cu_seqlens_q": ends(1), "cu_seqlens_k": None,
            "block_table": Arg((b, _KEYS // size), values=_Permuted(), dtype=index, grad=False),
            "seqused_k": Arg((b,), values=_Full(_KEYS), dtype=index, grad=False),
        }  # fmt: skip
        found.append(Case(f"{name}-pages-of-{size}", paged, longest))
    return tuple(found)


def is_decoding(case: Case) -> bool:
    """Whether it is one of these: each sequence has one query."""
    return case.options.get("max_seqlen_q") == 1


def _gathered(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None = None,
    block_table: Tensor | None = None, seqused_k: Tensor | None = None, *, attend: Callable[..., Any],
) -> Tensor:  # fmt: skip
    """The keys of all sequences, copied out of their pages where they are in some, and attention to them."""
    if block_table is not None:
        k, v = (x[block_table].flatten(1, 2) for x in (k, v))
    else:
        k, v = (x.unflatten(0, (q.shape[0], -1)) for x in (k, v))
    out: Tensor = attend(q[:, :, None], k.transpose(1, 2), v.transpose(1, 2))
    return out[:, :, 0]


def _eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return torch.softmax(q @ k.transpose(2, 3) * q.shape[-1] ** -0.5, -1, dtype=torch.float32).to(q.dtype) @ v


def peers() -> Peers:
    sdpa = partial(F.scaled_dot_product_attention, enable_gqa=True)
    return {"eager": partial(_gathered, attend=_eager), "gather and SDPA": partial(_gathered, attend=sdpa)}


def pairs(q: Tensor) -> int:
    """Returns the number of pairs of a query and a key that it sees."""
    return q.shape[0] * q.shape[1] * _KEYS
