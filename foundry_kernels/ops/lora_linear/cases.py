"""Sample inputs, and the size of the terms that a matmul sums; the parity suite enumerates this."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from foundry_kernels.core.contract import Options, Saved, Scales, Tensors
from foundry_kernels.testing import Arg, Case, normal


def make_case(
    rows: tuple[int, ...], k: int, m: int, r: int, note: str = "", layout: str = "contiguous", based: bool = False,
    biased: bool = False, adapters: torch.dtype | None = torch.float32, frozen: str = "weight bias", **options: Any,
) -> Case:  # fmt: skip
    """`based`: with `base` in place of the weight. `adapters`: their dtype. `frozen` arguments get no gradient."""
    name = "x".join(map(str, (*rows, k))) + f"-{m} r={r}" + ("-" + note if note else "")
    args: dict[str, Arg | None] = {
        "x": Arg((*rows, k), layout),
        "weight": None if based else Arg((m, k), "contiguous", normal(max(k, 1) ** -0.5)),
        "lora_a": Arg((r, k), "contiguous", normal(max(k, 1) ** -0.5), adapters),
        "lora_b": Arg((m, r), "contiguous", normal(r**-0.5), adapters),
        "bias": Arg((m,)) if biased else None,
        "base": Arg((*rows, m), layout) if based else None,
    }
    for each in frozen.split():
        if (arg := args[each]) is not None:
            args[each] = Arg(arg.shape, arg.layout, arg.values, arg.dtype, grad=False)
    interpreted = math.prod(rows) * r < 500
    return Case(name, args, options, "contiguous" if layout == "expanded" else layout, interpreted)


_DROPOUT: dict[str, Any] = {"dropout_p": 0.25, "dropout_seed": 0x123456789ABCDEF}

CASES: dict[str, tuple[Case, ...]] = {
    "lora_linear": (
        make_case((2, 9), 33, 17, 5, "bias", biased=True, scale=-0.5),
        make_case((1,), 1, 1, 1),
        make_case((6,), 40, 48, 4, scale=2.0),
        make_case((19,), 64, 32, 16, "base", based=True),
        make_case((), 24, 7, 3, "vector"),
        make_case((0,), 16, 8, 4, "no-rows"),
        make_case((3,), 0, 8, 4, "no-k"),
        make_case((3,), 8, 0, 4, "no-m"),
        make_case((7,), 48, 40, 8, "adapters-like-x", adapters=None, scale=2.0),
        make_case((7,), 48, 40, 8, "dropout", **_DROPOUT),
        make_case((5,), 19, 21, 3, "base-dropout", based=True, **_DROPOUT),
        make_case((3, 4), 20, 24, 8, "strided", "strided", based=True),
        make_case((7,), 20, 24, 8, "sliced", "sliced", biased=True),
        make_case((7,), 20, 24, 8, "expanded", "expanded"),
        make_case((2, 3, 5), 20, 24, 8, "swapped", "swapped"),
        make_case((9,), 24, 16, 4, "full", biased=True, frozen=""),
        make_case((9,), 24, 16, 4, "frozen-x", frozen="x weight"),
        make_case((9,), 24, 16, 4, "frozen-a", frozen="x weight lora_a"),
        make_case((9,), 24, 16, 4, "frozen-b", frozen="weight lora_b"),
        make_case((9,), 24, 16, 4, "no-adapter", scale=0.0),
        make_case((37,), 300, 150, 20, "tiles"),
        make_case((137,), 520, 264, 256, "high-rank"),
        make_case((600,), 96, 200, 48, "many-rows", **_DROPOUT),
    )
}


def _saved(args: Tensors, options: Options) -> int:
    """x A^T."""
    x, a = args["x"], args["lora_a"]
    return math.prod(x.shape[:-1]) * a.shape[0]


SAVED = {"lora_linear": Saved(never=("bias", "base"), more=_saved, made=_saved)}


def scales(args: Tensors, options: Options, cotangents: tuple[Tensor, ...]) -> Scales:
    """Size of the products that are summed (float64 inputs): the root of the sum of their squares."""
    given = {n: x.square().requires_grad_() for n, x in args.items() if x is not None}
    kept = given["x"] / (1.0 - options.get("dropout_p", 0.0)) ** 2
    y = options.get("scale", 1.0) ** 2 * (kept @ given["lora_a"].mT) @ given["lora_b"].mT
    for name in ("bias", "base"):
        y = y + given.get(name, 0.0)
    if "weight" in given:
        y = y + given["x"] @ given["weight"].mT
    if y.numel() == 0:
        return {}
    found = torch.autograd.grad(y, list(given.values()), cotangents[0].square())
    sizes = {"output 0": y, **dict(zip(given, found, strict=True))}
    return {n: float(each.detach().max().sqrt()) for n, each in sizes.items() if each.numel()}


def compiled_cases(op: str) -> tuple[tuple[Case, torch.dtype], ...]:
    """Each class of tiles: low, middle and high ranks, in each dtype, with and without dropout. The tiles depend on
    nothing else, so the shapes are small: PyTorch's matmuls with the weight are really computed. Of float16 with
    float32 adapters, which have most parts, also those in x's dtype."""
    low, half, float32 = torch.bfloat16, torch.float16, torch.float32
    adapters = ((low, float32), (low, None), (half, float32), (float32, float32))
    return tuple(
        (make_case((1024,), 512, 512, r, "compiled-" + note, adapters=adapter, **more), dtype)
        for dtype, adapter in adapters
        for r in (16, 64, 256)
        for note, more in (("plain", {}), ("dropout", _DROPOUT))
    )
