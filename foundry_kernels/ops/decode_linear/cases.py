"""Sample inputs, which the parity suite enumerates."""

from __future__ import annotations

from torch import Tensor

from foundry_kernels.core.contract import Options, Scales, Tensors
from foundry_kernels.testing import Arg, Case, normal

WEIGHTS = ("weight", "weight2", "weight3", "weight4")


def make_case(
    rows: tuple[int, ...],
    width: int,
    sizes: tuple[int, ...],
    note: str = "",
    x: str = "contiguous",
    weights: str = "contiguous",
) -> Case:
    """`sizes` are the rows of each weight; `x` and `weights` the layouts."""
    name = "x".join(map(str, (*rows, width))) + "-" + "+".join(map(str, sizes)) + ("-" + note if note else "")
    args: dict[str, Arg | None] = {"x": Arg((*rows, width), x, grad=False)}
    for i, weight in enumerate(WEIGHTS):
        values = normal(max(width, 1) ** -0.5)
        args[weight] = Arg((sizes[i], width), weights, values, grad=False) if i < len(sizes) else None
    return Case(name, args)


CASES: dict[str, tuple[Case, ...]] = {
    "decode_linear": (
        *(make_case((rows,), 40, (64,)) for rows in (1, 2, 3, 4, 5, 8)),
        make_case((1,), 1, (3,)),
        make_case((1, 1), 128, (64, 1, 100), "three"),
        make_case((3,), 33, (1, 2, 3, 130), "four"),
        make_case((2, 1), 256, (65, 65), "two"),
        make_case((2, 2, 2), 17, (9,), "4d"),
        make_case((), 24, (7, 5), "one-row"),
        make_case((2,), 96, (0, 17), "no-columns-first"),
        make_case((2,), 0, (5,), "no-width"),
        make_case((0,), 16, (5,), "no-rows"),
        *(make_case((4,), 40, (33, 20), layout, layout, layout) for layout in ("sliced", "offset", "strided")),
        make_case((2, 3, 1), 24, (10,), "swapped", "swapped"),
        make_case((5,), 24, (10,), "expanded", "expanded", "expanded"),
        make_case((1,), 1031, (2053,), "threads"),
    ),
}


def scales(args: Tensors, options: Options, cotangents: tuple[Tensor, ...]) -> Scales:
    """The root of the sum of the squares of the products that an output sums (float64 inputs)."""
    x = args["x"]
    squares = [x.square() @ w.square().mT for n in WEIGHTS if (w := args[n]) is not None]
    return {"output 0": max((float(s.max().sqrt()) for s in squares if s.numel()), default=0.0)}
