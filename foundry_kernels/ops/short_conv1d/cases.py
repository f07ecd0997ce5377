"""Sample inputs, and the size of what a result sums; the parity suite enumerates this."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from foundry_kernels.core.contract import Options, Scales, Tensors
from foundry_kernels.testing import Arg, Case, normal

#: SiLU's derivative does not pass this.
_STEEPEST = 1.1


@dataclass(frozen=True)
class _Bounds:
    """The first token of each document, and the end of the last, from their lengths."""

    lengths: tuple[int, ...]

    def __call__(self, g: torch.Generator, shape: tuple[int, ...]) -> Tensor:
        return torch.tensor([0, *accumulate(self.lengths)], dtype=torch.float64, device=g.device)


def documents(lengths: Sequence[int], layout: str = "contiguous", dtype: torch.dtype = torch.int32) -> Arg:
    return Arg((len(lengths) + 1,), layout, _Bounds(tuple(lengths)), dtype, grad=False)


def make_case(
    batch: int,
    length: int,
    channels: int,
    note: str = "",
    taps: int = 4,
    x: Arg | None = None,
    weight: Arg | None = None,
    bias: Arg | str | None = "",
    state: Arg | bool = False,
    lengths: Sequence[int] | None = None,
    residual: bool = False,
    cotangent: str = "contiguous",
    **options: Any,
) -> Case:
    """With `lengths`, these documents are packed in one row."""
    rows = batch if lengths is None else len(lengths)
    args: dict[str, Arg | None] = {
        "x": x or Arg((batch, length, channels)),
        "weight": weight or Arg((channels, taps)),
        "bias": Arg((channels,)) if isinstance(bias, str) else bias,
        "cu_seqlens": None if lengths is None else documents(lengths),
        "initial_state": (Arg((rows, channels, taps - 1)) if state else None) if isinstance(state, bool) else state,
    }
    if residual:
        args["residual"] = Arg((batch, length, channels), "contiguous" if x is None else x.layout)
    name = f"{batch}x{length}x{channels}-W={taps}" + ("-" + note if note else "")
    return Case(name, args, {"activation": "silu", **options}, cotangent)


def _laid_out(layout: str) -> Case:
    x, state = Arg((2, 7, 20), layout), Arg((2, 20, 3), layout)
    return make_case(
        2, 7, 20, layout, residual=True, x=x, weight=Arg((20, 4), layout if layout != "swapped" else "strided"),
        bias=Arg((20,), "strided"), state=state, cotangent=layout, return_final_state=True,
    )  # fmt: skip


_SHORT = (3, 0, 1, 9, 0, 2)  # fewer tokens than taps, and none

CASES: dict[str, tuple[Case, ...]] = {
    "short_conv1d": (
        make_case(1, 1, 1, taps=2),
        make_case(1, 3, 2, "plain", taps=3, activation=None),
        make_case(2, 2, 2, "state", taps=3, state=True, return_final_state=True),
        make_case(1, 5, 2, "packed", taps=2, lengths=(2, 0, 3), return_final_state=True),
        make_case(2, 5, 17),
        make_case(1, 33, 64, "swish", activation="swish"),
        make_case(3, 65, 129, taps=3),
        make_case(2, 40, 33, "no-bias", bias=None),
        make_case(2, 3, 32, "no-bias", bias=None),
        make_case(2, 9, 40, "plain", activation=None),
        make_case(2, 1, 24, "one-token", state=True, return_final_state=True),
        make_case(2, 2, 24, "few-tokens", state=True, return_final_state=True),
        make_case(2, 2, 24, "few-tokens-no-state", return_final_state=True),
        make_case(2, 11, 24, "plain-state", activation=None, bias=None, state=True),
        make_case(2, 0, 24, "no-tokens", state=True, return_final_state=True),
        make_case(0, 5, 24, "no-rows", state=True, return_final_state=True),
        make_case(2, 5, 0, "no-channels", state=True, return_final_state=True),
        make_case(2, 9, 24, "one-tap", taps=1, return_final_state=True),
        make_case(2, 9, 24, "two-taps", taps=2, state=True, return_final_state=True),
        make_case(2, 19, 24, "most-taps", taps=8, state=True, return_final_state=True),
        *map(_laid_out, ("swapped", "sliced", "offset", "expanded", "strided")),
        make_case(1, 15, 24, "packed", lengths=_SHORT),
        make_case(1, 15, 24, "packed-states", lengths=_SHORT, state=True, return_final_state=True),
        make_case(1, 100, 40, "packed-long", lengths=(70, 1, 29), return_final_state=True),
        make_case(1, 0, 24, "packed-nothing", lengths=(), state=True, return_final_state=True),
        make_case(1, 12, 24, "packed-frozen-state", lengths=(2, 10), state=Arg((2, 24, 3), grad=False)),
        make_case(2, 9, 24, "frozen-input", x=Arg((2, 9, 24), grad=False), return_final_state=True),
        make_case(2, 9, 24, "frozen-filter", weight=Arg((24, 4), grad=False), bias=Arg((24,), grad=False)),
        make_case(2, 9, 24, "frozen-bias", bias=Arg((24,), grad=False)),
        make_case(
            2, 9, 24, "only-state", x=Arg((2, 9, 24), grad=False), weight=Arg((24, 4), grad=False), bias=None,
            state=True, return_final_state=True,
        ),
        make_case(
            2, 9, 32, "filter-fp32", weight=Arg((32, 4), dtype=torch.float32), bias=Arg((32,), dtype=torch.float32)
        ),
        make_case(2, 3, 2, "residual", taps=2, residual=True),
        make_case(2, 40, 33, "residual-plain", residual=True, bias=None, activation=None),
        make_case(1, 15, 24, "residual-packed", lengths=_SHORT, residual=True, state=True, return_final_state=True),
        make_case(2, 9, 24, "residual-frozen-input", x=Arg((2, 9, 24), grad=False), residual=True),
        make_case(
            2, 9, 24, "only-residual", x=Arg((2, 9, 24), grad=False), weight=Arg((24, 4), grad=False), bias=None,
            residual=True,
        ),
        make_case(2, 30, 40, "large", x=Arg((2, 30, 40), values=normal(40.0))),
        make_case(2, 30, 40, "cancels", x=Arg((2, 30, 40), values=normal(1e-3, 30.0))),
        replace(make_case(2, 300, 1100, "wide", state=True, return_final_state=True), interpreted=False),
        replace(make_case(1, 9000, 48, "long", lengths=(5000, 3, 3997)), interpreted=False),
    )
}  # fmt: skip


def scales(args: Tensors, options: Options, cotangents: tuple[Tensor, ...]) -> Scales:
    """Size of the terms that a result sums (float64 inputs): the root of the sum of their squares, or a bound of it.
    The activation's slope may be far smaller than 1, so these are the sizes before it."""
    x, weight, bias = args["x"], args["weight"], args["bias"]
    if x.numel() == 0:
        return {}
    x, filters, taps = x, weight.square().sum(1).sqrt(), weight.shape[1]
    dy = _STEEPEST * cotangents[0]
    into_weight = [
        (dy[:, k:] * x[:, : x.shape[1] - k]).square().sum((0, 1)).max() for k in range(min(taps, x.shape[1]))
    ]
    into_x = float((dy.abs().amax((0, 1)) * filters).max())
    shift = 0.0 if bias is None else float(bias.abs().max())
    residual = args.get("residual")
    added = 0.0 if residual is None else float(residual.abs().max())
    return {
        "output 0": float((x.abs().amax((0, 1)) * filters).max()) + shift + added,
        "x": into_x,
        "initial_state": into_x,
        "weight": float(torch.stack(into_weight).max().sqrt()),
        "bias": float(dy.square().sum((0, 1)).max().sqrt()),
    }


def compiled_cases(op: str) -> tuple[tuple[Case, torch.dtype], ...]:
    """What `inspect` compiles without --all: filters of all lengths, dense and packed, with all options and none."""
    shape, lengths = (2, 2048, 2048), (500, 3, 3593)
    given: dict[str, Any] = {"state": True, "return_final_state": True}
    kinds = (
        make_case(*shape),
        make_case(*shape, "all", **given),
        make_case(*shape, "plain", bias=None, activation=None),
        make_case(1, 4096, 2048, "packed", bias=None, lengths=lengths),
        make_case(1, 4096, 2048, "packed-all", lengths=lengths, **given),
        make_case(*shape, "all", taps=2, **given),
        make_case(*shape, "all", taps=8, **given),
        make_case(1, 4096, 2048, "packed-all", taps=8, lengths=lengths, **given),
        make_case(2, 300, 1100, "wide", **given),
    )
    return tuple((case, dtype) for case in kinds for dtype in (torch.bfloat16, torch.float32))
