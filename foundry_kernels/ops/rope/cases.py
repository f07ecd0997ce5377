"""Sample inputs, and the size of what a gradient sums; the parity suite enumerates this."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from foundry_kernels.core.contract import Options, Saved, Scales, Tensors
from foundry_kernels.ops.rope import rope
from foundry_kernels.testing import Arg, Case, Values, normal


def _angles(shape: tuple[int, ...]) -> Tensor:
    """[P, R/2] of positions 0 .. P - 1, or [B, T, R/2] where sequence b starts at position 1000 b."""
    half = shape[-1]
    position = torch.arange(shape[-2], dtype=torch.float64)[:, None]
    if len(shape) == 3:
        position = position + 1000.0 * torch.arange(shape[0], dtype=torch.float64)[:, None, None]
    return position * 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)


def _cos(g: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    return _angles(shape).cos()


def _sin(g: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    return _angles(shape).sin()


def _rows_below(rows: int) -> Values:
    """Positions in any order, with repetitions."""
    return lambda g, shape: torch.randint(0, rows, shape, generator=g).double()


def _case(
    q: tuple[int, int, int, int],
    kv_heads: int | None = None,
    note: str = "",
    *,
    rotary: int | None = None,
    table: tuple[int, ...] | None = None,
    table_dtype: torch.dtype = torch.float32,
    table_layout: str = "contiguous",
    positions: tuple[int, ...] | None = None,
    index: torch.dtype = torch.int64,
    layout: str = "contiguous",
    k_layout: str | None = None,
    cotangent: str = "contiguous",
    values: Values | None = None,
    frozen: str = "",
    interleaved: bool = False,
) -> Case:
    """`table` is the leading shape of cos and sin, [T] if None; `frozen` names the inputs that take no gradient."""
    b, h, t, d = q
    k = (b, h if kv_heads is None else kv_heads, t, d)
    values = normal() if values is None else values
    shape = (*((t,) if table is None else table), (d if rotary is None else rotary) // 2)
    args: dict[str, Arg | None] = {
        "q": Arg(q, layout, values, grad="q" not in frozen),
        "k": Arg(k, k_layout or layout, values, grad="k" not in frozen),
        "cos": Arg(shape, table_layout, _cos, table_dtype, grad=False),
        "sin": Arg(shape, table_layout, _sin, table_dtype, grad=False),
    }
    if positions is not None:
        args["positions"] = Arg(positions, values=_rows_below(shape[0]), dtype=index, grad=False)
    name = f"{b}x{h}x{t}x{d}" + (f"-k{k[1]}" if k[1] != h else "") + ("-" + note if note else "")
    options = {"interleaved": True} if interleaved else {}
    return Case(name + ("-interleaved" if interleaved else ""), args, options, cotangent)


def _both_pairings(interleaved: bool) -> tuple[Case, ...]:
    def case(*args: Any, **kw: Any) -> Case:
        return _case(*args, interleaved=interleaved, **kw)

    return (
        *(case((2, 3, 5, d), 1) for d in (2, 40, 60, 64, 72, 96, 112, 128, 192, 256)),
        *(case((1, 2, t, 32), 2) for t in (1, 2, 17, 31, 33, 127, 129)),
        case((1, 1, 1, 2), 1),
        case((2, 32, 9, 64), 8, "llama"),
        case((2, 5, 7, 64), 3, "odd-heads"),
        case((1, 1, 6, 64), 4, "more-kv-heads"),
        case((2, 3, 7, 59), 2, "partial-58", rotary=58),
        case((2, 3, 7, 64), 2, "partial-32", rotary=32),
        case((2, 3, 7, 80), 1, "partial-20", rotary=20),
        case((2, 3, 7, 111), 1, "partial-2", rotary=2),
        case((2, 2, 7, 64), 2, "longer-table", table=(50,)),
        case((2, 2, 7, 64), 2, "positions-T", table=(50,), positions=(7,)),
        case((3, 2, 7, 64), 2, "positions-BT", table=(5000,), positions=(3, 7)),
        case((3, 2, 7, 64), 2, "positions-int32", table=(5000,), positions=(3, 7), index=torch.int32),
        case((3, 2, 1, 64), 1, "decode", table=(300,), positions=(3, 1)),
        case((3, 2, 7, 64), 2, "table-BT", table=(3, 7)),
        case((3, 2, 7, 64), 2, "table-1T", table=(1, 7)),
        case((3, 2, 7, 64), 2, "table-bf16", table_dtype=torch.bfloat16),
        case((2, 2, 7, 64), 2, "table-sliced", table_layout="sliced"),
        case((2, 2, 7, 64), 2, "table-strided", table=(2, 7), table_layout="strided"),
        case((3, 2, 7, 64), 2, "table-expanded", table=(3, 7), table_layout="expanded"),
        *(
            case((2, 4, 7, 48), 2, layout, rotary=32, layout=layout, cotangent=layout)
            for layout in ("swapped", "sliced", "offset", "expanded", "strided")
        ),
        case((2, 4, 7, 64), 2, "swapped-cotangent-BHTD", layout="swapped"),
        case((2, 4, 7, 64), 2, "cotangent-swapped", cotangent="swapped"),
        case((2, 4, 7, 64), 2, "mixed-layouts", layout="swapped", k_layout="contiguous"),
        case((2, 4, 7, 64), 2, "mixed-layouts-2", layout="sliced", k_layout="swapped"),
        case((2, 4, 7, 64), 2, "large", values=normal(1e4)),
        case((2, 4, 7, 64), 2, "small", values=normal(1e-4)),
        case((2, 4, 7, 64), 2, "frozen-q", frozen="q"),
        case((2, 4, 7, 64), 2, "frozen-k", frozen="k"),
        case((0, 4, 7, 64), 2, "no-batch"),
        case((2, 4, 0, 64), 2, "no-tokens"),
        case((2, 0, 3, 64), 2, "no-heads"),
        case((2, 4, 0, 64), 2, "no-tokens-positions", table=(9,), positions=(2, 0)),
    )


_NO_DIMENSIONS = tuple(_case((2, 4, 3, 0), 2, "no-dimensions", interleaved=i) for i in (False, True))
_ROPE = (*_both_pairings(False), *_both_pairings(True), *_NO_DIMENSIONS)


def _normed(
    case: Case, note: str = "", q_weight: Arg | str | None = "", k_weight: Arg | str | None = "", **options: Any
) -> Case:
    """Returns the case with norms before the rotation; weights of "" are [D] around 1."""
    (q,) = case.given("q")
    default = Arg((q.shape[-1],), values=normal(0.3, 1.0))
    weights = {
        "q_weight": default if isinstance(q_weight, str) else q_weight,
        "k_weight": default if isinstance(k_weight, str) else k_weight,
    }
    return replace(
        case,
        id=case.id + ("-" + note if note else ""),
        args={**case.args, **weights},
        options={"eps": 1e-6, **case.options, **options},
    )


_HEADS = _case((2, 4, 7, 64), 2)
_GEMMA = Arg((64,), values=normal(0.3))

_QK_NORM_ROPE = (
    *map(_normed, (*_both_pairings(False), *_both_pairings(True)[::3])),  # the rotation is that of rope
    _normed(_case((1, 3, 300, 64), 2), "many-tokens"),
    _normed(_HEADS, "llama-order", round_before_weight=True),
    _normed(_case((2, 4, 7, 64), 2, interleaved=True, rotary=32), "llama-order", round_before_weight=True),
    _normed(_HEADS, "gemma", _GEMMA, _GEMMA, weight_offset=1.0),
    _normed(_HEADS, "no-weights", None, None),
    _normed(_HEADS, "no-weights-llama-order", None, None, round_before_weight=True),
    _normed(_HEADS, "no-q-weight", None),
    _normed(_HEADS, "frozen-weights", Arg((64,), grad=False), Arg((64,), grad=False)),
    _normed(_HEADS, "frozen-k-weight", k_weight=Arg((64,), grad=False)),
    _normed(_HEADS, "weights-fp32", Arg((64,), dtype=torch.float32), Arg((64,), dtype=torch.float32)),
    _normed(
        _HEADS,
        "weights-fp32-llama-order",
        Arg((64,), dtype=torch.float32),
        Arg((64,), "strided", dtype=torch.float32),
        round_before_weight=True,
    ),
    _normed(_case((2, 4, 7, 64), 2, "frozen-qk", frozen="qk"), "weights-only"),
    _normed(_HEADS, "eps", eps=0.1),
    _normed(_case((2, 4, 7, 64), 2, "zero", values=normal(0.0))),
)

CASES: dict[str, tuple[Case, ...]] = {"rope": _ROPE, "qk_norm_rope": _QK_NORM_ROPE}

SAVED = {"rope": Saved(never=("q", "k")), "qk_norm_rope": Saved(per_row={"q": 1, "k": 1})}


def scales(args: Tensors, options: Options, cotangents: tuple[Tensor, ...]) -> Scales:
    """Size of the terms that a gradient sums (float64 inputs), by argument.

    Of q and k: the largest cotangent, with norms rotated back and times weight and 1 / rms. Of a weight: the root of
    the sum of squares over heads and tokens.
    """
    if "q_weight" not in args:
        return {name: float(dy.abs().max()) for name, dy in zip("qk", cotangents, strict=True) if dy.numel() > 0}
    cos, sin = args["cos"], args["sin"]
    dq, dk = cotangents
    pairing, positions = options.get("interleaved", False), args.get("positions")
    rotated_back = rope(dq, dk, cos, -sin, interleaved=pairing, positions=positions, backend="reference")
    found: dict[str, float] = {}
    for name, dy in zip("qk", rotated_back, strict=True):
        x, weight = args[name], args[name + "_weight"]
        if x.numel() == 0:
            continue
        rstd = (x.square().mean(-1, keepdim=True) + (options.get("eps") or 0.0)).rsqrt()
        w = 1.0 if weight is None else weight + options.get("weight_offset", 0.0)
        found[name] = float((dy * w * rstd).abs().max())
        found[name + "_weight"] = float((dy * x * rstd).square().sum((0, 1, 2)).sqrt().max())
    return found
