"""A program, evaluated by PyTorch: what every backend must equal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from foundry_kernels.ops.flash_attention.score_program.program import Instruction, Program

#: Floats become integers of at most this size; NaN becomes 0.
LARGEST_INT = 1 << 30


def evaluate(program: Program, score: Tensor, places: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    """The results of the program, each of a shape that broadcasts to the score's.

    Args:
        score: float32 or float64, in which the arithmetic is.
        places: b, h, q and k, int64, which broadcast to the score's shape.
        tensors: one for each slot.
    """
    inputs = dict(zip(("score", "b", "h", "q", "k"), (score, *places), strict=True))
    values: list[Tensor] = []
    for x in program.instructions:
        operands = [values[i] for i in x.operands]
        if x.op in inputs:
            values.append(inputs[x.op])
        elif x.value is not None:
            dtype = {"float": score.dtype, "int": torch.int64, "bool": torch.bool}[x.kind]
            values.append(torch.full((), x.value, dtype=dtype, device=score.device))
        elif x.op == "load":
            # torch.compile would read an index from a tensor without dimensions.
            known = [program.instructions[i].value for i in x.operands]
            indices = at_indices(x, tensors[x.slot], operands)
            at = [i if value is None else int(value) for i, value in zip(indices, known, strict=True)]
            loaded = tensors[x.slot][tuple(at)]
            values.append(_as(loaded, x.kind, score.dtype))
        elif x.op == "float":
            values.append(operands[0].to(score.dtype))
        else:
            values.append(_FUNCTIONS[x.op](*operands))
    return [values[i] for i in program.outputs]


def at_indices(load: Instruction, tensor: Tensor, indices: list[Tensor]) -> tuple[Tensor, ...]:
    """The indices of a load: a negative one counts from the end, and what is outside is moved to the nearest inside."""
    found = []
    for i, at in enumerate(indices):
        size = tensor.shape[i]
        if load.negative >> i & 1:
            at = torch.where(at < 0, at + size, at)
        found.append(at.clamp(0, size - 1))
    return tuple(found)


def _as(x: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    return x.to({"float": dtype, "int": torch.int64, "bool": torch.bool}[kind])


def _to_int(x: Tensor) -> Tensor:
    if x.dtype == torch.bool:
        return x.to(torch.int64)
    largest = float(LARGEST_INT)
    return x.nan_to_num(0.0, largest, -largest).clamp(-largest, largest).to(torch.int64)


def _floordiv(a: Tensor, b: Tensor) -> Tensor:
    none = b == 0
    return torch.where(none, 0, torch.div(a, torch.where(none, 1, b), rounding_mode="floor"))


def _mod(a: Tensor, b: Tensor) -> Tensor:
    none = b == 0
    return torch.where(none, 0, torch.remainder(a, torch.where(none, 1, b)))


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "int": _to_int, "detach": torch.detach, "neg": torch.neg, "abs": torch.abs, "exp": torch.exp, "exp2": torch.exp2,
    "log": torch.log, "log2": torch.log2, "sqrt": torch.sqrt, "rsqrt": torch.rsqrt, "tanh": torch.tanh,
    "sigmoid": torch.sigmoid, "sin": torch.sin, "cos": torch.cos, "floor": torch.floor, "add": torch.add,
    "sub": torch.sub, "mul": torch.mul, "div": torch.div, "floordiv": _floordiv, "mod": _mod, "pow": torch.pow,
    "min": torch.minimum, "max": torch.maximum, "lt": torch.lt, "le": torch.le, "eq": torch.eq,
    "and": torch.bitwise_and, "or": torch.bitwise_or, "xor": torch.bitwise_xor, "not": torch.bitwise_not,
    "where": torch.where,
}  # fmt: skip
