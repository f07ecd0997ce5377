"""MLPs by what they compute."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foundry_kernels.integrations.adapters.base import MLP
from foundry_kernels.integrations.adapters.gpt_like import PlainMLP
from foundry_kernels.integrations.recognise import proof
from foundry_kernels.integrations.recognise.reach import LeftError, Reached
from foundry_kernels.integrations.recognise.shrink import Marked

Function = Callable[[Tensor], Tensor]
#: Activations of gates that have a kernel.
GATES: dict[tuple[str, str], Function] = {
    ("swiglu", ""): F.silu,
    ("geglu", "none"): F.gelu,
    ("geglu", "tanh"): lambda x: F.gelu(x, approximate="tanh"),
    ("glu", ""): torch.sigmoid,
    ("reglu", ""): F.relu,
}
#: And without a gate.
PLAIN: dict[tuple[str, str], Function] = {
    ("bias_gelu", "none"): F.gelu,
    ("bias_gelu", "tanh"): lambda x: F.gelu(x, approximate="tanh"),
    ("bias_silu", ""): F.silu,
    ("bias_relu", ""): F.relu,
}
SHAPES = ((3, 5), (7,), (2, 2, 3))


def inputs(
    width: int, dtype: torch.dtype, shape: tuple[int, ...], generator: torch.Generator, low: float = -3, high: float = 1
) -> Tensor:
    """Rows whose activations are between almost 0 and saturated."""
    rows = torch.Size(shape).numel()
    scale = torch.logspace(low, high, rows, dtype=torch.float64, device="cpu")[:, None]
    x = torch.randn(rows, width, generator=generator, dtype=torch.float64, device="cpu")
    return (x * scale).view(*shape, width).to(dtype)


def mlp_of(small: Any, reached: Reached, takes: tuple[str, ...]) -> MLP | PlainMLP:
    """Returns the adapter of a class of MLPs, of which `small` is a small copy.

    Raises:
        LeftError: it is none of the forms, or its activation has no kernel.
    """
    generator = torch.Generator().manual_seed(0)
    read = {path[0]: getattr(small, path[0]) for path in reached.read if isinstance(path[0], str)}
    layers = [name for name, part in read.items() if type(part) is nn.Linear]
    drops = [name for name, part in read.items() if isinstance(part, Marked)]
    unused = [n for n, m in small.named_children() if n not in read and any(True for _ in m.parameters())]
    if unused or any(parameter is not None for parameter in small._parameters.values()):
        raise LeftError("it has parameters besides those of its matmuls")
    if not 1 <= len(layers) <= 3:
        raise LeftError(f"it has {len(layers)} matmuls")
    first = [getattr(small, name) for name in layers]
    others: list[Function] = [f for f in read.values() if callable(f) and not isinstance(f, (nn.Linear, Marked))]
    scales = [path[0] for path, value in reached.read.items() if len(path) == 1 and type(value) is float and value != 1]
    for width in dict.fromkeys(layer.in_features for layer in first):
        x = inputs(width, torch.float64, SHAPES[0], generator)
        try:
            y = proof.steady(small, x)
        except LeftError:
            if width == first[-1].in_features:
                raise
            continue
        for adapter in _candidates(layers, drops, others, scales):
            if _fits(adapter, small, width) and _equal(adapter, small, x, y, others):
                if adapter.kernel is not None and adapter.kernel[0] == "":
                    raise LeftError(f"its activation is {_named(others[int(adapter.kernel[1])])}, which no kernel has")
                return _prove(small, dataclasses.replace(adapter, takes=takes[0]), width, generator)
    raise LeftError("it computes none of the MLPs that this package has")


def _named(act: Any) -> str:
    return getattr(act, "__name__", type(act).__name__)


def _candidates(
    layers: list[str], drops: list[str], others: list[Function], scales: list[str]
) -> Iterator[MLP | PlainMLP]:
    positions = list(itertools.product(("", *drops), ("", *drops)))
    positions = [each for each in positions if set(drops) <= set(each)]
    unknown = [("", str(i)) for i in range(len(others))]
    scaled = [each for each in itertools.product(("", *scales), ("", *scales)) if set(scales) <= set(each)]
    for (inner, outer), (gate_scale, scale) in itertools.product(positions, scaled):
        drop: Any = {"inner": inner, "outer": outer}
        if len(layers) > 1 and scales:
            drop |= {"gate_scale": gate_scale, "scale": scale}
        if len(layers) == 3:
            for (gate, up, down), kernel in itertools.product(itertools.permutations(layers), (*GATES, *unknown)):
                yield MLP(gate, up, down, kernel=kernel, **drop)
        elif len(layers) == 2:
            for first, last in itertools.permutations(layers):
                for kernel in () if scales else (*PLAIN, *unknown):
                    yield PlainMLP(first, last, kernel, **drop)
                for kernel, up_first in itertools.product((*GATES, *unknown), (False, True)):
                    yield MLP(first, "", last, up_first, kernel, **drop)
        elif not inner and not outer and not scales:
            for kernel in (*PLAIN, *unknown):
                yield PlainMLP(layers[0], "", kernel)


def _fits(adapter: MLP | PlainMLP, small: Any, width: int) -> bool:
    """Returns whether the sizes are those of the form."""
    if isinstance(adapter, PlainMLP):
        up = getattr(small, adapter.up)
        return up.in_features == width and (
            not adapter.down or getattr(small, adapter.down).in_features == up.out_features
        )
    gate, down = getattr(small, adapter.gate), getattr(small, adapter.down)
    if not adapter.up:
        return gate.in_features == width and gate.out_features == 2 * down.in_features
    up = getattr(small, adapter.up)
    return gate.in_features == up.in_features == width and gate.out_features == up.out_features == down.in_features


def _equal(adapter: MLP | PlainMLP, small: Any, x: Tensor, y: Tensor, others: list[Function]) -> bool:
    assert adapter.kernel is not None
    known = PLAIN if isinstance(adapter, PlainMLP) else GATES
    act = known[adapter.kernel] if adapter.kernel[0] else others[int(adapter.kernel[1])]
    try:
        with torch.no_grad():
            z = _formula(adapter, small, x, act)
    except Exception:  # of something that is no activation
        return False
    return isinstance(z, Tensor) and proof.close(z, y, 1e-6)


def _formula(adapter: MLP | PlainMLP, small: Any, x: Tensor, act: Function) -> Tensor:
    if isinstance(adapter, PlainMLP):
        h = act(getattr(small, adapter.up)(x))
    else:
        gate = getattr(small, adapter.gate)(x)
        if adapter.up:
            up = getattr(small, adapter.up)(x)
        else:
            gate, up = gate.chunk(2, -1)[:: -1 if adapter.up_first else 1]
        h = act(gate * getattr(small, adapter.gate_scale) if adapter.gate_scale else gate) * up
    h = getattr(small, adapter.inner)(h) if adapter.inner else h
    h = getattr(small, adapter.down)(h) if adapter.down else h
    h = getattr(small, adapter.outer)(h) if adapter.outer else h
    return h * getattr(small, adapter.scale) if isinstance(adapter, MLP) and adapter.scale else h


def _prove(small: Any, adapter: MLP | PlainMLP, width: int, generator: torch.Generator) -> MLP | PlainMLP:
    """Returns the adapter, once it is as exact as the module.

    Raises:
        LeftError: it is not.
    """
    if adapter.down and _casts(small, adapter, width, generator):
        adapter = dataclasses.replace(adapter, casts=True)
    for dtype in (torch.float64, torch.float32, *proof.LOW):
        theirs = proof.clone(small).to(dtype)
        ours, wide = proof.adapted(theirs, adapter), proof.clone(theirs).double()
        for shape in SHAPES:
            x = inputs(width, dtype, shape, generator)
            try:
                expected = proof.call(theirs, x)
            except LeftError:  # of a shape that the class does not take
                continue
            exact = proof.call(wide, x.double())
            if not _as_exact(proof.call(ours, x), expected, exact):
                raise LeftError(f"in {dtype} it differs from the MLP that it is in exact arithmetic")
        x = inputs(width, dtype, (4, 16), generator, -0.5, 0.5)  # of one size, so that no row's rounding is all of it
        direction = torch.randn(exact_shape(wide, x), generator=generator, dtype=torch.float64, device="cpu")
        _, found = proof.gradients(ours, [x], direction)
        _, expected_all = proof.gradients(theirs, [x], direction)
        _, exact_all = proof.gradients(wide, [x.double()], direction)
        for a, b, c in zip(found, expected_all, exact_all, strict=True):
            # In 16 bits a sign at the kink of ReLU may be another, which is much to one value and little to all.
            fits = proof.as_exact_in_all(a, b, c) if dtype in proof.LOW else _as_exact(a, b, c)
            if not fits:
                raise LeftError("its gradient differs from that of the MLP that it is in exact arithmetic")
    theirs = proof.clone(small).float()
    ours, wide = proof.adapted(theirs, adapter), proof.clone(small).float().double()
    for dtype in (torch.float32, torch.bfloat16):
        x = inputs(width, dtype, SHAPES[0], generator)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            expected, result = proof.call(theirs, x), proof.call(ours, x)
        if not _as_exact(result, expected, proof.call(wide, x.double()), torch.bfloat16):
            raise LeftError("under autocast it differs from the MLP that it is in exact arithmetic")
    return adapter


def exact_shape(module: nn.Module, x: Tensor) -> torch.Size:
    with torch.no_grad():
        return proof.call(module, x.double()).shape


def _as_exact(ours: Tensor, theirs: Tensor, exact: Tensor, dtype: torch.dtype | None = None) -> bool:
    epsilon = {torch.float64: 1e-7}.get(ours.dtype) or torch.finfo(dtype or ours.dtype).eps
    return proof.no_worse(ours, theirs, exact, epsilon)


def _casts(small: Any, adapter: MLP | PlainMLP, width: int, generator: torch.Generator) -> bool:
    """Returns whether a second matmul in float32 gets its input in float32 where the rest is in bfloat16."""
    theirs = proof.clone(small).bfloat16()
    getattr(theirs, adapter.down).float()
    x = inputs(width, torch.bfloat16, SHAPES[0], generator)
    try:
        y = proof.call(theirs, x)
    except LeftError:
        return False
    ours = proof.adapted(theirs, dataclasses.replace(adapter, casts=True))
    return _as_exact(proof.call(ours, x), y, proof.call(proof.clone(theirs).double(), x.double()), torch.bfloat16)
