"""Norms by what they compute."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from foundry_kernels.integrations.adapters.base import Norm, at
from foundry_kernels.integrations.adapters.linear_attention import GatedNorm
from foundry_kernels.integrations.recognise import proof
from foundry_kernels.integrations.recognise.reach import LeftError, Reached
from foundry_kernels.ops.rms_norm import reference

#: Of results in 16 bits, the share that may differ by a last bit, where float32 was rounded otherwise.
LAST_BITS = 0.003
#: Shapes in front of a row's dimension.
SHAPES = ((3, 7), (2, 3, 2, 2), (11,))


def inputs(width: int, dtype: torch.dtype, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Rows from 1e-6 to 1e3, whose squares are far below and far above any eps."""
    rows = torch.Size(shape).numel()
    low, high = (-4, 2) if dtype == torch.float16 else (-6, 3)
    scale = torch.logspace(low, high, rows, dtype=torch.float64, device="cpu")[:, None]
    x = torch.randn(rows, width, generator=generator, dtype=torch.float64, device="cpu") + 0.2
    return (x * scale).view(*shape, width).to(dtype)


def norm_of(small: nn.Module, reached: Reached, takes: tuple[str, ...]) -> Norm | GatedNorm:
    """Returns the adapter of a class of norms, of which `small` is a small copy.

    Raises:
        LeftError: it is none of the forms.
    """
    generator = torch.Generator().manual_seed(0)
    held = {path[0]: value for path, value in reached.read.items() if len(path) == 1 and isinstance(value, Tensor)}
    own = {name for name, parameter in small._parameters.items() if parameter is not None}
    if own - held.keys():
        raise LeftError(f"it has the parameter {min(own - held.keys())}, which its forward does not use")
    widths = {tuple(at(small, name).shape) for name in held}
    if len(held) > 2 or any(len(width) != 1 for width in widths) or len(widths) > 1:
        raise LeftError("its parameters are no weight and bias of a norm")
    width = next(iter(widths), (20,))[0]
    if len(takes) == 2:
        return _gated(small, width, reached, generator)
    x = inputs(width, torch.float64, SHAPES[0], generator)
    y = proof.steady(small, x)
    every = _candidates(small, reached, sorted(held))
    found = [each for each in every if proof.close(_formula(each, small, x), y, 3e-6)]
    if not found:
        raise LeftError("it computes none of the norms that this package has")
    low = x.bfloat16()
    theirs = proof.call(proof.clone(small).bfloat16(), low)
    best = min(found, key=lambda each: _differing(_formula(each, proof.clone(small).bfloat16(), low), theirs))
    adapter = dataclasses.replace(best, takes=takes[0])
    if reason := _prove(small, adapter, width, generator, one_dtype=False):
        adapter = dataclasses.replace(adapter, one_dtype=True)
        if not adapter.weight or _prove(small, adapter, width, generator, one_dtype=True):
            raise LeftError(reason)
    return adapter


def eps_candidates(reached: Reached) -> list[str | float | None]:
    """Where eps may be: in an attribute that the forward reads, or in the code."""
    named = [".".join(path) for path, value in reached.read.items() if isinstance(value, float) or value is None]
    named.sort(key=lambda name: "eps" not in name)
    literal = [c for c in reached.constants() if 0.0 <= c < 0.1]
    return [*named, *literal, *dict.fromkeys((1e-5, None))]


def _candidates(small: nn.Module, reached: Reached, held: list[str]) -> Iterator[Norm]:
    for eps in eps_candidates(reached):
        if isinstance(eps, str) and not isinstance(at(small, eps), float) and at(small, eps) is not None:
            continue
        number = at(small, eps) if isinstance(eps, str) else eps
        if len(held) < 2:
            weight = held[0] if held else ""
            for offset, before in itertools.product((0.0, 1.0), (True, False)) if held else ((0.0, False),):
                yield Norm(eps, offset, before, weight=weight)
        if number is None:
            continue
        for weight, bias in itertools.permutations((*held, ""), 2) if held else (("", ""),):
            if {weight, bias} >= set(held):
                for offset in (0.0, 1.0) if weight else (0.0,):
                    yield Norm(eps, offset, op="layer_norm", weight=weight, bias=bias)


def _formula(norm: Norm, module: Any, x: Tensor) -> Tensor:
    weight = getattr(module, norm.weight) if norm.weight else None
    eps = norm.eps_of(module)
    if eps is None:
        eps = torch.finfo(torch.float64 if x.dtype == torch.float64 else torch.float32).eps
    if norm.op == "layer_norm":
        weight = weight + norm.weight_offset if weight is not None and norm.weight_offset else weight
        return reference.layer_norm(x, weight, getattr(module, norm.bias) if norm.bias else None, eps)
    return reference.rms_norm(x, weight, eps, norm.weight_offset, norm.round_before_weight)


def _differing(ours: Tensor, theirs: Tensor) -> float:
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return 1.0
    return float((ours != theirs).float().mean())


def _prove(small: nn.Module, adapter: Norm, width: int, generator: torch.Generator, one_dtype: bool) -> str | None:
    """Returns what differs between a module and its adapter, or None."""
    for dtype in (torch.float64, torch.float32, *proof.LOW):
        theirs = proof.clone(small).to(dtype)
        ours = proof.adapted(theirs, adapter)
        for shape in SHAPES:
            x = inputs(width, dtype, shape, generator)
            if not _same(proof.call(ours, x), proof.call(theirs, x)):
                return f"in {dtype} it differs from {_name(adapter)}"
    for weight, dtype in () if one_dtype else MIXED:
        theirs = proof.clone(small).to(weight)
        x = inputs(width, dtype, SHAPES[0], generator)
        if not _same_or_both_fail(proof.adapted(theirs, adapter), theirs, x):
            return f"with weights in {weight} and an input in {dtype} it differs from {_name(adapter)}"
    theirs = proof.clone(small).float()
    ours = proof.adapted(theirs, adapter)
    for dtype in (torch.float32, torch.bfloat16):
        x = inputs(width, dtype, SHAPES[0], generator)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            if not _same_or_both_fail(ours, theirs, x):
                return f"under autocast it differs from {_name(adapter)}"
    for dtype, tolerance in ((torch.float64, 2e-4), (torch.float32, 2e-4), (torch.bfloat16, 0.03)):
        theirs = proof.clone(small).to(dtype)
        x = inputs(width, dtype, (5, 4), generator)
        direction = torch.randn(x.shape, generator=generator, dtype=torch.float64, device="cpu")
        _, found = proof.gradients(proof.adapted(theirs, adapter), [x], direction)
        _, expected = proof.gradients(theirs, [x], direction)
        if not all(proof.close(a, b, tolerance) for a, b in zip(found, expected, strict=True)):
            return f"its gradient differs from that of {_name(adapter)}"
    return None


#: Dtypes of the weights and of the input, where they are not the same.
MIXED = (
    (torch.float32, torch.bfloat16), (torch.float32, torch.float16), (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
)  # fmt: skip


def _name(adapter: Norm) -> str:
    return f"{adapter.op}, which it is in exact arithmetic"


def _same(ours: Tensor, theirs: Tensor) -> bool:
    """Bit for bit in 16 bits, except for a rare last bit."""
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return False
    if ours.dtype not in proof.LOW:
        return proof.close(ours, theirs, 3e-6)
    last = torch.finfo(ours.dtype).eps
    differs = ours != theirs
    allowed = max(1, int(LAST_BITS * ours.numel()))
    return int(differs.sum()) <= allowed and bool(
        ((ours.double() - theirs.double()).abs() <= last * theirs.double().abs() + torch.finfo(ours.dtype).tiny).all()
    )


def _same_or_both_fail(ours: nn.Module, theirs: nn.Module, x: Tensor) -> bool:
    try:
        expected = proof.call(theirs, x)
    except LeftError:
        return True  # and before the patch too
    try:
        return _same(proof.call(ours, x), expected)
    except LeftError:
        return False


def _gated(small: nn.Module, width: int, reached: Reached, generator: torch.Generator) -> GatedNorm:
    """A norm whose result is multiplied by the activation of a gate."""
    weights = [name for name, parameter in small._parameters.items() if parameter is not None]
    if len(weights) != 1 or any(True for _ in small.children()):
        raise LeftError("it takes a gate, and is none of the norms with one that this package has")
    ways = itertools.product(eps_candidates(reached), ("swiglu", "glu"), (False, True))
    for eps, act, once in ways:
        if not isinstance(at(small, eps) if isinstance(eps, str) else eps, float):
            continue
        adapter = GatedNorm(eps, weights[0], once, act)
        if _equals_gated(small, adapter, width, generator, torch.float64, torch.float64):
            same = [(dtype, dtype) for dtype in (torch.float32, *proof.LOW)]
            if all(_equals_gated(small, adapter, width, generator, *dtypes) for dtypes in (*same, *MIXED)):
                return adapter
    raise LeftError("it takes a gate, and is none of the norms with one that this package has")


def _equals_gated(
    small: nn.Module,
    adapter: GatedNorm,
    width: int,
    generator: torch.Generator,
    weight: torch.dtype,
    dtype: torch.dtype,
) -> bool:
    theirs = proof.clone(small).to(weight)
    ours = proof.adapted(theirs, adapter)
    for shape in (SHAPES[0], SHAPES[-1]):
        x = inputs(width, dtype, shape, generator)
        gate = torch.randn(x.shape, generator=generator, dtype=torch.float64, device="cpu").to(dtype) * 3
        try:
            expected = proof.steady(theirs, x, gate)
        except LeftError:
            if weight == dtype:
                raise
            return True  # it fails before the patch too
        if not _same(proof.call(ours, x, gate), expected):
            return False
        if weight == dtype:
            direction = torch.randn(x.shape, generator=generator, dtype=torch.float64, device="cpu")
            found, wanted = (proof.gradients(module, [x, gate], direction)[1] for module in (ours, theirs))
            tolerance = 0.05 if dtype in proof.LOW else 2e-4
            if not all(proof.close(a, b, tolerance) for a, b in zip(found, wanted, strict=True)):
                return False
    return True
