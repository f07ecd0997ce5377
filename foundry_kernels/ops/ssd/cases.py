"""Sample inputs, which the parity suite enumerates."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from foundry_kernels.core.contract import Options, Saved, Scales, Tensors
from foundry_kernels.ops.flash_attention.bench import CuSeqlens
from foundry_kernels.ops.gated_delta_rule.cases import Between
from foundry_kernels.ops.gated_delta_rule.reference import gated_delta_rule
from foundry_kernels.ops.ssd import reference
from foundry_kernels.ops.ssd.options import SsdOptions
from foundry_kernels.testing import Arg, Case, Values, normal

#: Rates of decay, and step sizes before softplus, as in trained models.
RATES, STEPS = Between(-16.0, -0.5), normal(1.0, -3.0)


def sequence_case(
    batch: int,
    heads: tuple[int, int],
    tokens: int | tuple[int, ...],
    dims: tuple[int, int] = (16, 16),
    note: str = "",
    *,
    A: Values = RATES,
    dt: Values = STEPS,
    D: str | None = "H",
    z: bool = False,
    bias: bool = True,
    layout: str = "contiguous",
    rows_layout: str = "contiguous",
    wide_rows: bool = True,
    state: bool = False,
    state_layout: str = "contiguous",
    index: torch.dtype = torch.int32,
    frozen: tuple[str, ...] = (),
    cotangent: str = "contiguous",
    interpreted: bool = True,
    **options: Any,
) -> Case:
    """heads: (G, H); tokens: T, or the lengths of packed documents; dims: (P, N); D: "H", "HP" or None; wide_rows: dt,
    A, D and the bias in float32; frozen: inputs without gradient."""
    (g, h), (p, n) = heads, dims
    packed = isinstance(tokens, tuple)
    t = sum(tokens) if isinstance(tokens, tuple) else tokens
    args: dict[str, Arg | None] = {
        "x": Arg((batch, t, h, p), layout),
        "dt": Arg((batch, t, h), rows_layout, dt, wide=wide_rows),
        "A": Arg((h,), values=A, wide=wide_rows),
        "B": Arg((batch, t, g, n), layout, normal(n**-0.5)),
        "C": Arg((batch, t, g, n), layout),
        "D": None if D is None else Arg((h, p) if D == "HP" else (h,), wide=wide_rows),
        "z": Arg((batch, t, h, p), layout) if z else None,
        "dt_bias": Arg((h,), wide=wide_rows) if bias else None,
    }
    if state:
        count = len(tokens) if isinstance(tokens, tuple) else batch
        args["initial_states"] = Arg((count, h, p, n), state_layout, wide=True)
    args = {name: a and replace(a, grad=name not in frozen) for name, a in args.items()}
    if isinstance(tokens, tuple):
        args["cu_seqlens"] = Arg((len(tokens) + 1,), values=CuSeqlens(tokens), dtype=index, grad=False)
    lengths = "+".join(map(str, tokens)) if isinstance(tokens, tuple) else str(tokens)
    id = f"{batch}x{lengths}x{g}.{h}x{p}.{n}" + "-packed" * packed + ("-" + note if note else "")
    return Case(id, args, {"dt_softplus": True, **options}, cotangent, interpreted)


_FINAL: dict[str, Any] = {"return_final_states": True}
_ALL: dict[str, Any] = {"z": True, "state": True, **_FINAL}
_INPUTS = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_states")

_SEQUENCES = (
    sequence_case(1, (1, 1), 3, (2, 2), "tiny", **_ALL),  # for finite differences
    *(sequence_case(1, (1, 2), t, note="lengths", **_FINAL) for t in (1, 16, 63, 130)),
    *(sequence_case(1, (1, 1), 21, d) for d in ((1, 1), (7, 20), (64, 128), (256, 16))),
    sequence_case(1, (1, 1), 9, (300, 16), "two-parts", D="HP", **_ALL),
    replace(sequence_case(1, (1, 4), 150, (64, 128), "long", state=True, **_FINAL), interpreted=False),
    sequence_case(2, (2, 4), 37, note="groups", state=True, **_FINAL),
    sequence_case(2, (1, 3), 20, (16, 8), "one-group", z=True),
    sequence_case(1, (2, 16), 16, note="16-heads", D=None),
    sequence_case(1, (2, 2), 37, note="plain", D=None, bias=False),
    sequence_case(1, (2, 2), 37, note="no-D", D=None, **_ALL),
    sequence_case(1, (2, 2), 37, note="D-row", D="HP", z=True),
    sequence_case(1, (2, 2), 37, note="no-softplus", dt=Between(0.0, 0.3), bias=False, dt_softplus=False, **_FINAL),
    sequence_case(1, (2, 2), 37, note="limits", dt_limit=(0.01, 0.1), **_ALL),
    sequence_case(1, (2, 2), 37, note="least", dt_limit=(0.02, math.inf), **_FINAL),
    sequence_case(1, (2, 2), 70, note="strong", dt=normal(2.0, 1.0), **_ALL),
    sequence_case(1, (2, 2), 70, note="mild", A=Between(-1e-3, 0.0), **_ALL),
    sequence_case(1, (2, 2), 37, note="large-steps", dt=Between(-10.0, 60.0), A=Between(-0.1, 0.0), **_FINAL),
    sequence_case(1, (2, 2), 37, note="rows-of-its-dtype", wide_rows=False, **_ALL),
    sequence_case(1, (1, 2), 140, note="chunk-32", chunk_size=32, state=True, **_FINAL),
    sequence_case(1, (1, 2), 140, note="chunk-128", chunk_size=128, **_ALL),
    *(
        sequence_case(2, (2, 4), 18, note=x, layout=x, rows_layout=x, cotangent=x, state_layout=x, **_ALL)
        for x in ("swapped", "sliced", "offset", "expanded", "strided")
    ),
    *(sequence_case(1, (1, 2), 33, note=f"frozen-{x}", frozen=(x,), **_ALL) for x in _INPUTS),
    *(
        sequence_case(1, (1, 2), 33, note=f"only-{x}", frozen=tuple(n for n in _INPUTS if n != x), **_ALL)
        for x in ("dt", "A", "D", "dt_bias")
    ),
    sequence_case(1, (1, 2), (5, 0, 40, 1, 17)),
    sequence_case(1, (2, 2), (5, 0, 40, 1, 17, 0), note="all", **_ALL),
    sequence_case(1, (1, 2), (64, 3), note="int64", index=torch.int64, **_FINAL),
    sequence_case(1, (1, 1), (0, 0), note="empty-documents", **_ALL),
    sequence_case(2, (1, 2), 0, note="no-tokens", **_ALL),
    sequence_case(0, (1, 2), 9, note="no-batch", **_ALL),
)


def step_case(
    batch: int,
    heads: tuple[int, int],
    dims: tuple[int, int],
    note: str = "",
    *,
    dt: Values = STEPS,
    D: str | None = "H",
    z: bool = False,
    bias: bool = True,
    layout: str = "contiguous",
    state_layout: str = "contiguous",
    wide_rows: bool = True,
    **options: Any,
) -> Case:
    (g, h), (p, n) = heads, dims
    args: dict[str, Arg | None] = {
        "state": Arg((batch, h, p, n), state_layout, wide=True),
        "x": Arg((batch, h, p), layout),
        "dt": Arg((batch, h), values=dt, wide=wide_rows),
        "A": Arg((h,), values=RATES, wide=wide_rows),
        "B": Arg((batch, g, n), layout, normal(n**-0.5)),
        "C": Arg((batch, g, n), layout),
        "D": None if D is None else Arg((h, p) if D == "HP" else (h,), wide=wide_rows),
        "z": Arg((batch, h, p), layout) if z else None,
        "dt_bias": Arg((h,), wide=wide_rows) if bias else None,
    }
    args = {name: a and replace(a, grad=False) for name, a in args.items()}
    return Case(f"{batch}x{g}.{h}x{p}.{n}" + ("-" + note if note else ""), args, {"dt_softplus": True, **options})


_STEPS = (
    *(step_case(2, (1, 2), d) for d in ((1, 1), (7, 7), (16, 16), (40, 20), (20, 40), (64, 128))),
    step_case(1, (1, 1), (512, 16), "wide", D="HP", z=True),
    step_case(1, (1, 1), (16, 256)),
    step_case(1, (8, 64), (64, 128), "nemotron-h"),
    step_case(2, (2, 6), (16, 33), "all", z=True, dt_limit=(0.01, 0.1)),
    step_case(2, (2, 2), (16, 16), "plain", D=None, bias=False),
    step_case(2, (2, 2), (16, 16), "no-softplus", dt=Between(0.0, 0.3), bias=False, dt_softplus=False),
    step_case(2, (2, 2), (16, 16), "large-steps", dt=Between(-10.0, 60.0), z=True),
    step_case(2, (2, 2), (16, 16), "rows-of-its-dtype", wide_rows=False, z=True),
    *(step_case(2, (2, 4), (16, 24), x, layout=x, z=True) for x in ("swapped", "sliced", "offset", "strided")),
    step_case(2, (2, 4), (16, 24), "state-offset", state_layout="offset"),
    step_case(0, (2, 4), (16, 24), "no-batch"),
)

CASES: dict[str, tuple[Case, ...]] = {"ssd": _SEQUENCES, "ssd_step": _STEPS}

MUTATED = {"ssd_step": ("state",)}


def _states(args: Tensors, options: Options) -> int:
    """What linear attention saves, what was read from the states where z needs it, and step sizes."""
    x, B, ends = args["x"], args["B"], args.get("cu_seqlens")
    chunks = x.shape[1] // 16 + (1 if ends is None else ends.shape[0])
    read = 0 if args.get("z") is None else x.numel()
    return read + x.shape[0] * x.shape[2] * chunks * max(x.shape[3] * B.shape[3], 32 * 32)


def _rows(args: Tensors, options: Options) -> int:
    """The gradients of decays and of values' factors lead to those of dt, its bias and A."""
    dt = args["dt"]
    return 2 * dt.numel()


SAVED = {"ssd": Saved(more=_states, made=_rows)}


def scales(args: Tensors, options: Options, cotangents: tuple[Tensor, ...]) -> Scales:
    """Size of the terms that a gradient sums (float64 inputs). That of a decay is a sum over the state: its size is the
    root of the sum of squares. In the sums over tokens for A and the bias sizes add up, as errors do: what a token
    reads is a term of all decays before it. A decay's own gradient is as exact as the largest one.
    """
    x, dt, A, B, C = (args[n] for n in ("x", "dt", "A", "B", "C"))
    D, z, bias = (args.get(n) for n in ("D", "z", "dt_bias"))
    if "state" in args or x.numel() == 0:
        return {}
    least, most = options.get("dt_limit", (0.0, math.inf))
    softplus = bool(options.get("dt_softplus"))
    raw = dt if bias is None else dt + bias
    slope = torch.sigmoid(raw) if softplus else torch.ones_like(raw)
    sizes = reference.step_sizes(dt, bias, dt.dtype, softplus, least, most)
    initial = args.get("initial_states")
    spread = (sizes * A)[..., None, None].repeat(1, 1, 1, B.shape[-1], x.shape[-1]).transpose(1, 2).requires_grad_()
    values = sizes[..., None].repeat(1, 1, 1, x.shape[-1]).requires_grad_()
    final = bool(options.get("return_final_states"))
    call = SsdOptions(args.get("cu_seqlens"), softplus, least, most, None, final).of_attention()
    read, last = gated_delta_rule(
        C.transpose(1, 2),
        B.transpose(1, 2),
        (x * values).transpose(1, 2),
        spread,
        None,
        None if initial is None else initial.mT,
        None,
        None,
        call,
    )
    y = reference.finished(read.transpose(1, 2), x, D, z)
    outputs = [y] if last is None else [y, last.mT]
    of_decay, of_value = torch.autograd.grad(outputs, (spread, values), cotangents)
    per_decay = of_decay.square().sum((-1, -2)).sqrt().transpose(1, 2)
    per_size = torch.hypot(per_decay * A, of_value.square().sum(-1).sqrt()) * slope
    dy = cotangents[0] if z is None else cotangents[0] * torch.nn.functional.silu(z)
    return {
        "dt": float(per_size.max()),
        "dt_bias": float(per_size.sum((0, 1)).max()),
        "A": float(per_decay.max() * sizes.sum((0, 1)).max()),
        "D": float((dy * x).square().sum((0, 1, 3) if D is None or D.dim() == 1 else (0, 1)).sqrt().max()),
    }


def compiled_cases(op: str) -> tuple[tuple[Case, torch.dtype], ...]:
    """What `inspect` compiles without --all: heads of Nemotron-H and Mamba-2."""
    kinds = (torch.bfloat16, torch.float32)
    if op == "ssd_step":
        steps = (step_case(2, (2, 4), (64, 128)), step_case(2, (1, 4), (64, 256), z=True))
        return tuple((case, dtype) for case in steps for dtype in kinds)
    cases = (sequence_case(1, (2, 4), (100, 28), (64, 128), **_ALL), sequence_case(1, (1, 4), 128, (64, 256)))
    return tuple((case, dtype) for case in cases for dtype in kinds)
