"""Sample inputs, and the size of what a gradient sums; the parity suite enumerates this."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from foundry_kernels.core.contract import Options, Scales, Tensors
from foundry_kernels.testing import Arg, Case, normal

#: No activation's derivative passes this.
_STEEPEST = 1.13


def saturated(g: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    """Normal values, every second one far out on either side, where the activation is 0 or the identity."""
    x = torch.randn(shape, generator=g, dtype=torch.float64)
    x.reshape(-1)[::2] *= 40.0
    return x


def _grid(g: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    """-12 .. 12 in equal steps: through the minimum of the activation and to both its ends."""
    return torch.linspace(-12.0, 12.0, torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)


def _case(
    shape: tuple[int, ...],
    note: str = "",
    gate: Arg | None = None,
    up: Arg | None = None,
    cotangent: str = "contiguous",
) -> Case:
    name = "x".join(map(str, shape)) + ("-" + note if note else "")
    return Case(name, {"gate": gate or Arg(shape), "up": up or Arg(shape)}, cotangent=cotangent)


def _packed(shape: tuple[int, ...], note: str = "", gate: Arg | None = None, cotangent: str = "contiguous") -> Case:
    name = "x".join(map(str, shape)) + "-packed" + ("-" + note if note else "")
    return Case(name, {"gate": gate or Arg(shape), "up": None}, cotangent=cotangent)


def _laid_out(shape: tuple[int, ...], layout: str) -> Case:
    return _case(shape, layout, Arg(shape, layout), Arg(shape, layout), layout)


_BOTH = (
    *(_case((rows, width)) for rows, width in [(1, 1), (3, 2), (5, 17), (33, 64), (7, 127), (9, 128), (7, 129)]),
    *(_case((rows, width)) for rows, width in [(3, 1000), (5, 1023), (4, 1025), (2, 4099), (1, 14336)]),
    *(_packed((rows, 2 * width)) for rows, width in [(1, 1), (5, 17), (9, 128), (7, 129), (3, 1023), (2, 4099)]),
    replace(_case((1031, 256), "many-rows"), interpreted=False),
    replace(_packed((300, 4096), "threads"), interpreted=False),
    _case((96,), "vector"),
    _packed((96,), "vector"),
    _case((0, 64), "empty"),
    _case((3, 0), "no-width"),
    _packed((3, 0), "no-width"),
    _packed((2, 0, 64), "empty-3d"),
    _case((2, 3, 5, 40), "4d"),
    *(_laid_out((2, 3, 5, 40), layout) for layout in ("swapped", "sliced", "offset", "expanded", "strided")),
    _case((2, 3, 5, 40), "mixed-layouts", Arg((2, 3, 5, 40), "swapped"), Arg((2, 3, 5, 40), "sliced")),
    *(
        _packed((2, 3, 5, 40), layout, Arg((2, 3, 5, 40), layout), layout)
        for layout in ("swapped", "sliced", "offset", "expanded", "strided")
    ),
    _case((6, 100), "frozen-gate", gate=Arg((6, 100), grad=False)),
    _case((6, 100), "frozen-up", up=Arg((6, 100), grad=False)),
    _case((8, 256), "saturated", gate=Arg((8, 256), values=saturated)),
    _packed((8, 256), "saturated", gate=Arg((8, 256), values=saturated)),
    _case((8, 256), "grid", gate=Arg((8, 256), values=_grid)),
    _case((8, 256), "large", Arg((8, 256), values=normal(2e3)), Arg((8, 256), values=normal(1e-2))),
    _case((8, 256), "small", Arg((8, 256), values=normal(1e-4)), Arg((8, 256), values=normal(1e-1))),
    _case((8, 256), "zero-gate", gate=Arg((8, 256), values=normal(0.0))),
)


def _tanh(case: Case) -> Case:
    return replace(case, id=case.id + "-tanh", options={**case.options, "approximate": "tanh"})


def _with(case: Case, **options: Any) -> Case:
    return replace(case, id=f"{case.id}-{'-'.join(options)}", options=options)


def _oss(case: Case, **options: Any) -> Case:
    """Returns the case with GPT-OSS's options."""
    options = {"alpha": 1.702, "limit": 7.0, "up_offset": 1.0} | options
    return replace(case, id=case.id + "-oss" + ("-interleaved" if "interleaved" in options else ""), options=options)


def _bounds(g: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    """Values at a limit of 7, beside it on both sides and far beyond it, in random order; exact in every dtype."""
    values = torch.tensor([-40.0, -7.0625, -7.0, -6.9375, -1.0, -0.0, 0.5, 6.9375, 7.0, 7.0625, 30.0]).double()
    return values[torch.randint(len(values), shape, generator=g)]


_OPTIONS = (
    *(_oss(_packed((rows, 2 * width)), interleaved=True) for rows, width in [(3, 1), (5, 17), (2, 4099)]),
    *(
        _oss(_packed((2, 3, 5, 40), layout, Arg((2, 3, 5, 40), layout), layout), interleaved=True)
        for layout in ("swapped", "offset", "strided")
    ),
    replace(_oss(_packed((300, 4096), "threads"), interleaved=True), interpreted=False),
    _oss(_packed((8, 256), "bounds", gate=Arg((8, 256), values=_bounds)), interleaved=True),
    _oss(_case((8, 256), "bounds", Arg((8, 256), values=_bounds), Arg((8, 256), values=_bounds))),
    _oss(_case((6, 100), "frozen-gate", Arg((6, 100), values=_bounds, grad=False), Arg((6, 100), values=_bounds))),
    _oss(_packed((8, 256), "bounds", gate=Arg((8, 256), values=_bounds))),
    _with(_packed((9, 130)), interleaved=True),
    _with(_packed((0, 64)), interleaved=True),
    _with(_case((8, 256), "grid", gate=Arg((8, 256), values=_grid)), alpha=-1.702),
    _with(_case((5, 33), "large", Arg((5, 33), values=normal(2e3))), limit=0.5),
    _with(_case((5, 33)), up_offset=-0.25),
)


#: Of the cases above those of the activations that came later: they share all but the activation.
_SOME = (
    "1x1", "5x17", "9x128", "7x129", "2x4099", "5x34-packed", "2x8198-packed", "300x4096-packed-threads", "0x64-empty",
    "3x0-no-width", "2x3x5x40-swapped", "2x3x5x40-packed-sliced", "6x100-frozen-gate", "6x100-frozen-up",
    "8x256-saturated", "8x256-grid", "8x256-large", "8x256-zero-gate",
)  # fmt: skip
_FEW = tuple(case for case in _BOTH if case.id in _SOME)


def dropped(case: Case, p: float) -> Case:
    options = {**case.options, "dropout_p": p, "dropout_seed": 0x123456789ABCDEF}
    return replace(case, id=f"{case.id}-dropout", options=options)


#: A width below four, of more than a block and of more than a tile; rows that are found by strides, packed or not.
_DROPOUT = (
    dropped(_case((3, 2)), 0.5),
    dropped(_case((5, 1041)), 0.1),
    dropped(_packed((3, 2 * 9001)), 0.9),
    dropped(_packed((2, 3, 5, 40), "swapped", Arg((2, 3, 5, 40), "swapped"), "swapped"), 0.25),
    replace(dropped(_case((300, 2048), "threads"), 0.1), interpreted=False),
)
_OPTIONS_DROPOUT = (
    dropped(_oss(_packed((5, 2 * 1041)), interleaved=True), 0.5),
    dropped(_with(_packed((9, 6)), interleaved=True), 0.25),
    dropped(_oss(_case((6, 100), "frozen-gate", Arg((6, 100), values=_bounds, grad=False))), 0.5),
    dropped(_case((0, 64), "empty"), 0.5),
)

CASES: dict[str, tuple[Case, ...]] = {
    "swiglu": (*_BOTH, *_OPTIONS, *_DROPOUT, *_OPTIONS_DROPOUT),
    "geglu": (*_BOTH, *map(_tanh, _BOTH), _tanh(_DROPOUT[1]), _DROPOUT[3]),
    "glu": (*_FEW, *_DROPOUT[1:3]),
    "reglu": (*_FEW, *_DROPOUT[1:3]),
}


def scales(args: Tensors, options: Options, cotangents: tuple[Tensor, ...]) -> Scales:
    """Size of the terms that a gradient sums (float64 inputs), by argument; what is left out has its own size.

    The derivative of the activation is a sum that passes through 0, so the gate's gradient may be far smaller than its
    terms.
    """
    gate, up = args["gate"], args["up"]
    if gate.numel() == 0:
        return {}
    packed = up is None
    if up is None:
        half = gate.shape[-1] // 2
        gate, up = (gate[..., ::2], gate[..., 1::2]) if options.get("interleaved") else gate.split([half, half], -1)
    if (limit := options.get("limit")) is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    dy = cotangents[0] / (1.0 - options.get("dropout_p", 0.0))
    into_gate = _STEEPEST * float((dy * (up + options.get("up_offset", 0.0))).abs().max())
    return {"gate": max(into_gate, float((dy * gate).abs().max())) if packed else into_gate}
