"""Sample inputs, and the size of the terms that a matmul sums; the parity suite enumerates this."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from foundry_kernels.core.contract import Options, Scales, Tensors
from foundry_kernels.ops.grouped_mm.reference import grouped_mm
from foundry_kernels.testing import Arg, Case, normal


@dataclass(frozen=True)
class _Ends:
    """The ends of groups of so many rows each."""

    sizes: tuple[int, ...]

    def __call__(self, g: torch.Generator, shape: tuple[int, ...]) -> Tensor:
        return torch.tensor(list(accumulate(self.sizes)), dtype=torch.float64)


def ends(*sizes: int) -> Arg:
    return Arg((len(sizes),), values=_Ends(sizes), dtype=torch.int32, grad=False)


def _case(
    sizes: tuple[int, ...],
    k: int,
    n: int,
    note: str = "",
    x: Arg | None = None,
    weight: Arg | None = None,
    past: int = 0,
    **kw: Any,
) -> Case:
    """`past`: rows that belong to no group."""
    m = sum(sizes) + past
    name = f"M={m} E={len(sizes)} K={k} N={n}" + ("-" + note if note else "")
    args = {"x": x or Arg((m, k)), "weight": weight or Arg((len(sizes), k, n)), "offs": ends(*sizes)}
    return Case(name, args, **kw)


CASES: dict[str, tuple[Case, ...]] = {
    "grouped_mm": (
        _case((1,), 1, 1),
        _case((2, 1), 3, 2),
        _case((3, 20), 32, 48),
        _case((20, 0, 0), 24, 20, "all-in-one"),
        _case((1, 0, 17, 0, 0, 2), 33, 17, "many-empty"),
        _case((0, 1) * 20, 8, 16, "many-groups"),
        _case((19,), 40, 48, "one-group"),
        _case((0, 0), 16, 8, "no-rows"),
        _case((0, 0, 0), 16, 8, "none-in-a-group", past=5),
        _case((5, 7), 16, 32, "rows-past-the-end", past=20),
        _case((3, 2), 0, 8, "no-k"),
        _case((3, 2), 8, 0, "no-n"),
        _case((18, 0, 7), 20, 40, "transposed-weight", weight=Arg((3, 20, 40), "swapped"), cotangent="sliced"),
        _case((3, 4), 20, 24, "strided", Arg((7, 20), "strided"), Arg((2, 20, 24), "strided"), cotangent="strided"),
        _case((3, 4), 20, 24, "sliced", Arg((7, 20), "sliced"), Arg((2, 20, 24), "sliced"), cotangent="expanded"),
        _case((4, 6), 16, 16, "offset", Arg((10, 16), "offset"), Arg((2, 16, 16), "offset"), cotangent="offset"),
        _case((4, 6), 16, 16, "one-matrix", weight=Arg((2, 16, 16), "expanded")),
        _case((4, 6), 16, 32, "frozen-input", Arg((10, 16), grad=False)),
        _case((4, 6), 16, 32, "frozen-weight", weight=Arg((2, 16, 32), grad=False)),
        _case((6, 3), 16, 16, "large", Arg((9, 16), values=normal(100.0)), Arg((2, 16, 16), values=normal(3.0))),
        _case((33, 40), 72, 136, "middle-tiles", interpreted=False),
        _case((200, 0, 130, 1, 300), 520, 264, "several-tiles", interpreted=False),
        _case((260, 0, 131), 128, 144, "gradients-by-pytorch", past=9, interpreted=False),  # on an H100, in bfloat16
    )
}


def scales(args: Tensors, options: Options, cotangents: tuple[Tensor, ...]) -> Scales:
    """Size of the products that are summed (float64 inputs): the root of the sum of their squares."""
    x, weight, offs = (args[name] for name in ("x", "weight", "offs"))
    if x.numel() == 0 or weight.numel() == 0:
        return {}
    x2, weight2 = x.square().requires_grad_(), weight.square().requires_grad_()
    y2 = grouped_mm(x2, weight2, offs)
    dx2, dweight2 = torch.autograd.grad(y2, (x2, weight2), cotangents[0].square())
    squares = {"output 0": y2.detach(), "x": dx2, "weight": dweight2}
    return {name: float(each.max().sqrt()) for name, each in squares.items()}
