"""Hypothesis strategies shared by the operations' `fuzz` modules. Needs hypothesis, which only tests use."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st

from foundry_kernels.testing import Arg, Case, Values, normal

#: Sizes at which kernels take other paths: 0, 1, primes, and powers of two with their neighbours.
_EDGES = (0, 1, 2, 3, 5, 7, 8, 13, *(2**k + d for k in range(4, 13) for d in (-1, 0, 1)))

#: Dtypes of a tensor that may be combined with the case's own (None); float64 is only combined with float64.
LOW_OR_FP32 = (None, torch.float32, torch.bfloat16, torch.float16)


#: Elements of a tensor: mostly few, so that many cases fit in a second; sometimes enough for several threads.
ELEMENTS = st.sampled_from([3_000, 3_000, 3_000, 100_000])


def sizes(most: int, least: int = 0) -> st.SearchStrategy[int]:
    """least .. most, the edges more often than the rest."""
    return st.sampled_from([n for n in _EDGES if least <= n <= most]) | st.integers(least, most)


@st.composite
def leading(draw: st.DrawFn, most: int, dimensions: int = 3) -> tuple[int, ...]:
    """Up to `dimensions` sizes whose product, a 0 counted as 1, is at most `most`."""
    shape: list[int] = []
    for _ in range(draw(st.integers(0, dimensions))):
        shape.append(draw(sizes(max(most // math.prod(max(n, 1) for n in shape), 1))))
    return tuple(shape)


def layouts(rank: int) -> st.SearchStrategy[str]:
    """Layouts that a tensor of `rank` dimensions can have (see `testing.Arg`)."""
    if rank == 0:
        return st.just("contiguous")
    names = ("contiguous", "sliced", "offset", "expanded", "strided", *(("swapped",) if rank > 2 else ()))
    return st.sampled_from(names) | st.integers(0, 9999).map("random-{}".format)


def spreads(*stds: float) -> st.SearchStrategy[Values]:
    """Normal values around 0, most often of standard deviation 1."""
    return st.just(normal()) | st.sampled_from([normal(std) for std in stds])


@st.composite
def tensors(
    draw: st.DrawFn,
    shape: tuple[int, ...],
    values: st.SearchStrategy[Values] | None = None,
    dtypes: tuple[torch.dtype | None, ...] = (None,),
) -> Arg:
    """A tensor of `shape` in any layout; about one in six is frozen."""
    return Arg(
        shape,
        draw(layouts(len(shape))),
        draw(st.just(normal()) if values is None else values),
        draw(st.sampled_from(dtypes)),
        grad=draw(st.integers(0, 5)) != 5,
    )


def laid_out(draw: st.DrawFn, case: Case, *, kept: str) -> Case:
    """The case with other layouts, but that of the argument `kept`, and with inputs without gradient."""

    def other(name: str, a: Arg | None) -> Arg | None:
        if a is None or name == kept:
            return a
        return replace(a, layout=draw(layouts(len(a.shape))), grad=a.grad and draw(st.integers(0, 5)) != 5)

    args = {name: other(name, a) for name, a in case.args.items()}
    return replace(case, args=args, id="random", cotangent=draw(layouts(3)))


@st.composite
def dropouts(draw: st.DrawFn) -> dict[str, Any]:
    """Options of dropout; every second time none."""
    if draw(st.booleans()):
        return {}
    return {"dropout_p": draw(st.sampled_from([0.1, 0.5, 0.99])), "dropout_seed": draw(st.integers(0, 2**63 - 1))}
