"""Sample inputs whose keys and values are in pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foundry_kernels.ops.flash_attention.bench import CuSeqlens
from foundry_kernels.ops.flash_attention.case_makers import ALL_OPTIONS, alibi_slopes_of
from foundry_kernels.testing import Arg, Case, Values, normal


@dataclass(frozen=True)
class Integers:
    values: tuple[int, ...]

    def __call__(self, g: torch.Generator, shape: tuple[int, ...]) -> Tensor:
        return torch.tensor(self.values, dtype=torch.float64)


@dataclass(frozen=True)
class BlockTable:
    """Pages for sequences of these lengths, in a random order; -1 where a sequence has none. Sequences have their first
    pages in common, as many as `shared`."""

    lengths: tuple[int, ...]
    page_size: int
    shared: int = 0

    @property
    def counts(self) -> list[int]:
        return [-(-length // self.page_size) for length in self.lengths]

    @property
    def n_pages(self) -> int:
        """The number of pages in use, and two more."""
        return self.shared + sum(max(count - self.shared, 0) for count in self.counts) + 2

    def __call__(self, g: torch.Generator, shape: tuple[int, ...]) -> Tensor:
        free = torch.randperm(self.n_pages, generator=g).tolist()
        common = [free.pop() for _ in range(self.shared)]
        table = torch.full(shape, -1.0, dtype=torch.float64)
        for row, count in zip(table, self.counts, strict=True):
            own = [free.pop() for _ in range(count - self.shared)]
            row[:count] = torch.tensor((common + own)[:count], dtype=torch.float64)
        return table


def paged_case(
    lengths_q: tuple[int, ...],
    lengths_k: tuple[int, ...],
    heads: tuple[int, int],
    head_dim: int,
    page_size: int,
    note: str = "",
    *,
    head_dim_v: int | None = None,
    layout: str = "contiguous",
    index: torch.dtype = torch.int32,
    shared: int = 0,
    leftpad: tuple[int, ...] | None = None,
    cumulative: bool = False,
    alibi_slopes: tuple[int, ...] | None = None,
    sinks: Values | None = None,
    spare: int = 1,
    **options: Any,
) -> Case:
    """`layout`: of the pages. `cumulative`: the lengths are given by cu_seqlens_k. `spare`: columns of the table that
    no sequence uses."""
    (h, hk), batch = heads, len(lengths_q)
    table = BlockTable(lengths_k, page_size, shared)
    pages = (table.n_pages, page_size, hk)
    args: dict[str, Arg | None] = {
        "q": Arg((sum(lengths_q), h, head_dim), grad=False),
        "k": Arg((*pages, head_dim), layout, grad=False),
        "v": Arg((*pages, head_dim_v or head_dim), layout, grad=False),
        "cu_seqlens_q": Arg((batch + 1,), values=CuSeqlens(lengths_q), dtype=index, grad=False),
        "cu_seqlens_k": None,
        "block_table": Arg((batch, max(table.counts, default=0) + spare), values=table, dtype=index, grad=False),
    }
    if cumulative:
        args["cu_seqlens_k"] = Arg((batch + 1,), values=CuSeqlens(lengths_k), dtype=index, grad=False)
    else:
        args["seqused_k"] = Arg((batch,), values=Integers(lengths_k), dtype=index, grad=False)
    if leftpad is not None:
        args["leftpad_k"] = Arg((batch,), values=Integers(leftpad), dtype=index, grad=False)
    if alibi_slopes is not None:
        args["alibi_slopes"] = Arg(alibi_slopes, values=alibi_slopes_of, dtype=torch.float32, grad=False)
    if sinks is not None:
        args["sinks"] = Arg((h,), values=sinks, grad=False)
    options["max_seqlen_q"] = max(lengths_q, default=0)
    options["max_seqlen_k"] = max(lengths_k, default=0)
    sizes = f"{'+'.join(map(str, lengths_q))}.{'+'.join(map(str, lengths_k))}x{h}.{hk}x{head_dim}"
    return Case(f"{sizes}-pages-of-{page_size}" + ("-" + note if note else ""), args, options)


_ALL: dict[str, Any] = {**ALL_OPTIONS, "sinks": normal(), "return_stats": True}

PAGED = (
    *(
        paged_case((1, 1, 1, 1), (90, 0, 1, 130), (2, 1), 32, size, "decode", causal=True, return_lse=True)
        for size in (1, 3, 16, 17, 64, 256)
    ),
    *(
        paged_case((20, 0, 50), (90, 5, 70), (2, 1), 32, size, "causal", causal=True, return_lse=True)
        for size in (1, 3, 16, 17, 64, 256)
    ),
    paged_case((33, 5), (64, 128), (4, 2), 64, 64, "full", spare=0),
    paged_case((17, 1, 3), (40, 33, 65), (2, 1), 40, 16, "mixed", causal=True),
    paged_case((1, 1, 1), (100, 40, 90), (2, 1), 32, 16, "shared-decode", shared=2),
    paged_case((12, 20), (100, 70), (2, 1), 32, 16, "shared", shared=3, causal=True),
    paged_case((1, 1, 1), (100, 40, 90), (2, 1), 32, 16, "leftpad-decode", leftpad=(17, 0, 90), return_lse=True),
    paged_case((20, 33), (60, 70), (2, 1), 32, 7, "leftpad", leftpad=(10, 3), causal=True),
    paged_case((10, 40), (20, 44), (2, 1), 32, 8, "cumulative", cumulative=True, causal=True),
    paged_case((17, 9), (33, 40), (2, 1), 32, 8, "int64", index=torch.int64),
    paged_case((16, 30), (40, 40), (2, 1), 59, 8, "window", window=(9, 4)),
    paged_case((1, 2), (70, 47), (2, 1), 59, 16, "window-decode", window=(40, None), causal=True),
    paged_case((17, 40), (33, 40), (4, 1), 32, 16, "top-left", causal=True, align="top_left"),
    paged_case((5, 33), (2, 40), (4, 1), 32, 16, "rows-without-keys", causal=True, return_lse=True),
    paged_case((20, 10), (33, 70), (2, 1), 64, 16, "head-dim-v-32", head_dim_v=32, causal=True),
    paged_case((17, 30), (33, 30), (2, 1), 300, 16, "head-dim-v-512", head_dim_v=512, causal=True),
    *(
        paged_case((9, 1), (33, 40), (2, 1), 40, 16, layout, layout=layout, causal=True)
        for layout in ("swapped", "sliced", "offset")
    ),
    paged_case((1, 1), (33, 90), (2, 1), 40, 16, "swapped-decode", layout="swapped"),
    paged_case((1, 3, 2), (90, 5, 44), (2, 1), 40, 16, "few-all", alibi_slopes=(3, 2), leftpad=(3, 1, 20), **_ALL),
    paged_case((30, 0, 40), (20, 5, 90), (2, 1), 40, 16, "all", alibi_slopes=(2,), shared=1, **_ALL),
    paged_case((0, 0), (3, 0), (2, 1), 32, 4, "no-queries", return_lse=True),
    paged_case((3, 1), (0, 0), (2, 1), 32, 4, "no-keys", return_lse=True, spare=0),
    paged_case((), (), (2, 1), 32, 4, "no-sequences"),
)


def paged_cases_to_compile() -> tuple[tuple[Case, torch.dtype], ...]:
    """With every width of heads, and pages smaller than a tile and larger."""
    many, few, half = ((256, 256), (512, 512), (8, 2)), ((1, 1), (2048, 2048), (8, 2)), torch.bfloat16
    everything = {**_ALL, "alibi_slopes": (8,)}
    return (
        *((paged_case(*many, d, 16, "causal", causal=True), half) for d in (64, 128, 256, 512)),
        (paged_case(*many, 128, 256, "causal", causal=True), half),
        (paged_case(*many, 128, 16, "causal", causal=True), torch.float32),
        *((paged_case(*many, d, 16, "all-options", **everything), half) for d in (64, 128, 256)),
        *((paged_case(*few, d, 16, "few-queries", causal=True), half) for d in (64, 128, 256, 512)),
        (paged_case(*few, 128, 256, "few-queries", causal=True), half),
        (paged_case(*few, 128, 16, "few-queries-all-options", **everything), half),
    )
