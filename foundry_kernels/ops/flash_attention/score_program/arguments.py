"""A call's `score_mod` as the operators' arguments, checked."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from foundry_kernels.core.registry import is_dtensor, wide_dtype
from foundry_kernels.ops.flash_attention.score_program.derive import derive
from foundry_kernels.ops.flash_attention.score_program.program import Instruction, Program
from foundry_kernels.ops.flash_attention.score_program.trace import ScoreFunction, trace


def program_of(
    score_mod: ScoreFunction, q: Tensor, sizes: tuple[int, int, int, int], mesh: Any
) -> tuple[tuple[int, ...] | None, tuple[Tensor, ...] | None]:
    """The encoded program and its tensors (None for none), for scores of these sizes [B, H, T, S]. A function that
    returns its score, as transformers passes one to FlexAttention, has no program.

    mesh: q's, if it is a DTensor. Captured tensors are then the same on all devices, since a shard of heads reads them
    by the heads' numbers in the whole.

    Raises:
        TypeError, ValueError: as `trace`; an index is out of range wherever its tensor is read; a captured DTensor is
            sharded.
    """
    program, tensors = trace(score_mod, wide_dtype(q.dtype), q.device)
    if program.instructions[program.outputs[0]].op == "score":
        return None, None
    if not is_compiling():
        check_indices(program, tuple([x.shape for x in tensors]), sizes)
    if mesh is not None or any(is_dtensor(x) for x in tensors):
        tensors = tuple([_replicated(x, mesh) for x in tensors])
    return _with_derivatives(tuple(program.encode())), tensors or None


@lru_cache(maxsize=256)
def _derived(code: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(derive(Program.decode(code)).encode())


def _with_derivatives(code: tuple[int, ...]) -> tuple[int, ...]:
    """The program, then its derivatives, which the C++ kernels interpret; `Program.decode` reads the first."""
    return code + _derived(code)


# What torch.compiler.assume_constant_result sets, see `core.registry`.
_with_derivatives._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _replicated(x: Tensor, mesh: Any) -> Tensor:
    from torch.distributed.tensor import DTensor, Replicate

    if mesh is None:
        raise ValueError("score_mod uses a DTensor; its tensors must be plain where q is")
    if not is_dtensor(x):
        return DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)
    if any(not placement.is_replicate() for placement in x.placements):  # type: ignore[attr-defined]
        raise ValueError(
            f"score_mod uses a DTensor of placements {x.placements}; its tensors must be replicated"  # type: ignore[attr-defined]
        )
    return x


class _Range(NamedTuple):
    """The least and the greatest value of an integer. `exact`: it takes both, at some place; `dense`: and all between
    them. letters: what it varies with, bits for b, h, q and k."""

    least: int
    greatest: int
    exact: bool
    dense: bool
    letters: int


@lru_cache(maxsize=256)
def check_indices(program: Program, shapes: tuple[torch.Size, ...], sizes: tuple[int, int, int, int]) -> None:
    """Refuses a program that certainly reads a tensor out of range. Where that depends on values or on a condition, it
    is not known, and indices are moved into the range.

    Raises:
        ValueError: the message says which dimension of which tensor.
    """
    if 0 in sizes:
        return
    ranges: list[_Range | None] = []
    for x in program.instructions:
        ranges.append(_range_of(x, ranges, sizes))
        if x.op == "load":
            for dim, at in enumerate(x.operands):
                size, found = shapes[x.slot][dim], ranges[at]
                if found is not None and found.exact and not (-size <= found.least and found.greatest < size):
                    letters = [n for i, n in enumerate(("b", "h", "q_idx", "kv_idx")) if found.letters >> i & 1]
                    raise ValueError(
                        f"score_mod: an index of {', '.join(letters) or 'constants'} is from {found.least} to "
                        f"{found.greatest}, which is out of range for dimension {dim} of a tensor of shape "
                        f"{tuple(shapes[x.slot])}"
                    )


def _range_of(x: Instruction, ranges: list[_Range | None], sizes: tuple[int, int, int, int]) -> _Range | None:
    """The range of an integer instruction, None where nothing is known."""
    if x.kind != "int":
        return None
    if x.op in ("b", "h", "q", "k"):
        which = "bhqk".index(x.op)
        return _Range(0, sizes[which] - 1, True, True, 1 << which)
    if x.op == "const":
        assert x.value is not None
        return _Range(int(x.value), int(x.value), True, True, 0)
    operands = [ranges[i] for i in x.operands]
    if x.op == "load" or len(operands) > 2 or any(each is None for each in operands):
        return None
    a, b = operands[0], operands[-1]
    assert a is not None
    assert b is not None
    # Of two values that vary with different indices, each pair of values occurs.
    apart = len(operands) == 1 or a.letters & b.letters == 0
    exact, dense = a.exact and b.exact and apart, a.dense and b.dense and apart
    ends: list[int]
    if x.op == "neg":
        ends = [-a.least, -a.greatest]
    elif x.op == "abs":
        ends = [abs(a.least), abs(a.greatest)]
        if a.least < 0 < a.greatest:
            ends, exact = [0, *ends], dense
    elif x.op == "add":
        ends = [a.least + b.least, a.greatest + b.greatest]
    elif x.op == "sub":
        ends = [a.least - b.greatest, a.greatest - b.least]
    elif x.op == "mul":
        ends, dense = [i * j for i in (a.least, a.greatest) for j in (b.least, b.greatest)], False
    elif x.op in ("min", "max"):
        choose = min if x.op == "min" else max
        ends = [choose(a.least, b.least), choose(a.greatest, b.greatest)]
    elif x.op == "floordiv" and b.least == b.greatest != 0:
        ends = [a.least // b.least, a.greatest // b.least]
    elif x.op == "mod" and b.least == b.greatest > 0:
        inside = a.least >= 0 and a.greatest < b.least
        ends = [a.least, a.greatest] if inside else [0, b.least - 1]
        exact = exact if inside else dense and a.greatest - a.least >= b.least - 1
        dense = exact and dense
    else:
        return None
    return _Range(min(ends), max(ends), exact, dense, a.letters | b.letters)
