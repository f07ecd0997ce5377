"""Prints a score program as functions of Triton, which the attention kernels get as constants.

`prepare(m)` loads what does not change in a kernel's loop: what depends on neither the score nor the moving index,
which is the key in kernels that own queries, and the query where keys are owned. `modify(score, moving, m)` computes
the program's results for a tile. `m` is a `Modifier`. The text is a module of its own in `linecache`, where Triton and
debuggers find it; its name has a hash of the text, so that Triton's own cache on disk serves later processes.
"""

from __future__ import annotations

import hashlib
import linecache
import math
import threading
from functools import lru_cache
from typing import Any, NamedTuple

from foundry_kernels.ops.flash_attention.score_program.derive import derive
from foundry_kernels.ops.flash_attention.score_program.program import ON_K, ON_Q, ON_SCORE, Builder, Program

_HEAD = """import triton
import triton.language as tl
from foundry_kernels.ops.flash_attention.triton.score_math import (
    ONE, clamped, floordiv, mod, number, power, tanh, to_int,
)
"""

_UNARY = {
    "neg": "-{}", "abs": "tl.abs({})", "exp": "tl.exp({})", "exp2": "tl.exp2({})", "log": "tl.log({})",
    "log2": "tl.log2({})", "sqrt": "tl.sqrt({})", "rsqrt": "tl.rsqrt({})", "tanh": "tanh({})",
    "sigmoid": "tl.sigmoid({})", "sin": "tl.sin({})", "cos": "tl.cos({})", "floor": "tl.floor({})", "detach": "{}",
}  # fmt: skip
_BINARY = {
    "add": "{} + {}", "sub": "{} - {}", "mul": "{} * {}", "div": "{} / {}", "pow": "power({}, {})",
    "lt": "{} < {}", "le": "{} <= {}", "eq": "{} == {}", "and": "{} & {}", "or": "{} | {}", "xor": "{} ^ {}",
}  # fmt: skip


class Functions(NamedTuple):
    """A program's functions of Triton."""

    prepare: Any
    modify: Any
    results: int


class Request(NamedTuple):
    """Which functions are needed, of an encoded program."""

    code: tuple[int, ...]
    by_keys: bool  # whether the kernel owns keys
    slope: int | None  # which derivative `modify` returns besides: 0 by the score, 1 + i by load i; None for none
    empty: tuple[bool, ...]  # which captured tensors have no elements


def wanted(request: Request) -> Program:
    """The program of a request: the result, and a derivative if it is asked for."""
    program = Program.decode(request.code)
    if request.slope is None:
        return program
    derived = derive(program)
    return Builder(derived).program(derived.outputs[0], derived.outputs[1 + request.slope])


_LOCK = threading.Lock()


@lru_cache(maxsize=256)
def functions(request: Request) -> Functions:
    """The functions of a request."""
    program = wanted(request)
    text = _HEAD + _printed(program, request.by_keys, request.empty)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    text = text.replace("NAME", digest)
    path = f"<score_mod {digest}>"
    namespace: dict[str, Any] = {"__name__": f"foundry_kernels.score_mod_{digest}", "__file__": path}
    with _LOCK:
        linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
        exec(compile(text, path, "exec"), namespace)  # text of our own, of numbers and names from the lists above
    return Functions(namespace[f"prepare_{digest}"], namespace[f"modify_{digest}"], len(program.outputs))


def _printed(program: Program, by_keys: bool, empty: tuple[bool, ...]) -> str:
    moving = ON_SCORE | (ON_Q if by_keys else ON_K)
    ready = [i for i, x in enumerate(program.instructions) if x.op == "load" and not x.depends & moving]
    lines = ["", "@triton.jit", "def prepare_NAME(m, F: tl.constexpr):"]
    lines += _body(program, ready, by_keys, empty, {})
    lines += [f"    return ({', '.join([*(f'v{i}' for i in ready), 'tl.full([], 0, tl.int32)'])},)"]
    lines += ["", "@triton.jit", "def modify_NAME(score, moving, m):", "    F: tl.constexpr = score.dtype"]
    at = {i: f"m.ready[{place}]" for place, i in enumerate(ready)}
    lines += _body(program, list(program.outputs), by_keys, empty, at)
    results = [
        f"v{i}" if place and program.instructions[i].value is not None else f"tl.broadcast_to(v{i}, score.shape)"
        for place, i in enumerate(program.outputs)
    ]
    return "\n".join([*lines, f"    return {', '.join(results)}", ""])


def _body(
    program: Program, outputs: list[int], by_keys: bool, empty: tuple[bool, ...], known: dict[int, str]
) -> list[str]:
    """The lines that compute `outputs`. known: what some instructions are already."""
    needed = set(outputs)
    for i in range(len(program.instructions) - 1, -1, -1):
        if i in needed and i not in known:
            needed.update(program.instructions[i].operands)
    owned = "moving" if by_keys else "m.at"
    inputs = {
        "score": "score",
        "b": "number(m.b)",
        "h": "number(m.h)",
        "q": owned,
        "k": "m.at" if by_keys else "moving",
    }
    signs = Builder(program)
    places = _layout_places(program)
    lines = []
    for i, x in enumerate(program.instructions):
        if i not in needed:
            continue
        given = [f"v{at}" for at in x.operands]
        if i in known:
            text = known[i]
        elif x.op in inputs:
            text = inputs[x.op]
        elif x.value is not None:
            text = _constant(x.kind, x.value)
        elif x.op == "load":
            if empty[x.slot]:
                text = _constant(x.kind, 0)
            else:
                p = f"m.pointers[{x.slot}]"
                for dim, at in enumerate(given):
                    size, stride = (f"m.layout[{places[x.slot] + 2 * dim + j}]" for j in range(2))
                    p += f" + clamped({at}, {size}, {bool(x.negative >> dim & 1)}).to(tl.int64) * {stride}"
                text = f"tl.load({p})" if given else f"number(tl.load({p}))"
                text += {"float": ".to(F)", "int": ".to(tl.int32)", "bool": " != 0"}[x.kind]
        elif x.op == "float":
            text = f"{given[0]}.to(F)"
        elif x.op == "int":
            text = (
                f"to_int({given[0]})"
                if program.instructions[x.operands[0]].kind == "float"
                else f"{given[0]}.to(tl.int32)"
            )
        elif x.op in ("floordiv", "mod"):
            divisor = program.instructions[x.operands[1]].value
            simple = divisor is not None and divisor > 0 and signs.is_not_negative(x.operands[0])
            text = f"{x.op}({given[0]}, {given[1]}, {simple})"
        elif x.op in ("min", "max"):
            nan = ", propagate_nan=tl.PropagateNan.ALL" if x.kind == "float" else ""
            text = f"tl.{x.op}imum({given[0]}, {given[1]}{nan})"
        elif x.op == "not":
            text = f"{given[0]} == 0" if x.kind == "bool" else f"~{given[0]}"
        elif x.op == "where":
            text = f"tl.where({', '.join(given)})"
        else:
            text = (_UNARY.get(x.op) or _BINARY[x.op]).format(*given)
        lines.append(f"    v{i} = {text}")
    return lines


def _layout_places(program: Program) -> list[int]:
    """Where each slot's sizes and strides begin in `Modifier.layout`."""
    found, at = [], 0
    for slot in program.slots:
        found.append(at)
        at += 2 * slot.rank
    return found


def _constant(kind: str, value: float | int) -> str:
    """A bare number would be a float32 in the interpreter, and in a product with a float64."""
    if kind == "float":
        number = repr(float(value)) if math.isfinite(value) else f'float("{float(value)}")'
        return f"tl.full(ONE, {number}, F)"
    return f"tl.full(ONE, {int(value)}, tl.int32)" if kind == "int" else f"tl.full(ONE, {bool(value)}, tl.int1)"
