"""The functions of torch that a score function may use, by name, each as instructions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from foundry_kernels.ops.flash_attention.score_program.trace import (
    FUNCTIONS,
    Recorder,
    Row,
    Scalar,
    _Arguments,
    kind_of,
)

Function = Callable[..., Any]


def _float_unary(op: str) -> Function:
    def function(r: Recorder, input: Any) -> Scalar:
        return r.new(r.builder.emit(op, "float", r.cast(r.lift(input), "float")))

    return function


def _signed_unary(op: str) -> Function:
    def function(r: Recorder, input: Any) -> Scalar:
        kind, (x,) = r.promoted(r.lift(input), least="int")
        return r.new(r.builder.emit(op, kind, x))

    return function


def _rounding(of_float: Callable[[Recorder, int], int]) -> Function:
    """A function that leaves integers as they are."""

    def function(r: Recorder, input: Any) -> Scalar:
        x = r.lift(input)
        return r.new(of_float(r, x) if r.builder.kind(x) == "float" else x)

    return function


def _floor(r: Recorder, x: int) -> int:
    return r.builder.emit("floor", "float", x)


def _ceil(r: Recorder, x: int) -> int:
    return _neg(r, _floor(r, _neg(r, x)))


def _trunc(r: Recorder, x: int) -> int:
    negative = r.builder.emit("lt", "bool", x, r.builder.const(0.0, "float"))
    return r.builder.emit("where", "float", negative, _ceil(r, x), _floor(r, x))


def _neg(r: Recorder, x: int) -> int:
    return r.builder.emit("neg", r.builder.kind(x), x)


def _binary(op: str, least: str = "int") -> Function:
    def function(r: Recorder, input: Any, other: Any, *, alpha: float = 1) -> Scalar:
        a, b = r.lift(input), r.lift(other)
        if alpha != 1:
            b = r.lift(_mul(r, other, alpha))
        kind, operands = r.promoted(a, b, least=least)
        return r.new(r.builder.emit(op, kind, *operands))

    return function


_add, _sub, _mul = _binary("add"), _binary("sub"), _binary("mul")
_min, _max = _binary("min"), _binary("max")


def _flipped(function: Function) -> Function:
    return lambda r, input, other: function(r, other, input)


def _div(r: Recorder, input: Any, other: Any, *, rounding_mode: str | None = None) -> Scalar:
    if rounding_mode == "floor":
        return _floordiv(r, input, other)
    kind, (a, b) = r.promoted(r.lift(input), r.lift(other), least="int")
    if rounding_mode == "trunc" and kind == "int":  # towards 0
        e = r.builder.emit
        zero = r.builder.const(0, "int")
        down = e("floordiv", "int", e("abs", "int", a), e("abs", "int", b))
        apart = e("xor", "bool", e("lt", "bool", a, zero), e("lt", "bool", b, zero))
        return r.new(e("where", "int", apart, _neg(r, down), down))
    ratio = r.builder.emit("div", "float", r.cast(a, "float"), r.cast(b, "float"))
    if rounding_mode == "trunc":
        ratio = _trunc(r, ratio)
    elif rounding_mode is not None:
        raise _Arguments(f"rounding_mode={rounding_mode!r}")
    return r.new(ratio)


def _floordiv(r: Recorder, input: Any, other: Any) -> Scalar:
    kind, (a, b) = r.promoted(r.lift(input), r.lift(other), least="int")
    if kind == "int":
        return r.new(r.builder.emit("floordiv", "int", a, b))
    return r.new(_floor(r, r.builder.emit("div", "float", a, b)))


def _mod(r: Recorder, input: Any, other: Any) -> Scalar:
    kind, (a, b) = r.promoted(r.lift(input), r.lift(other), least="int")
    if kind == "int":
        return r.new(r.builder.emit("mod", "int", a, b))
    e = r.builder.emit
    return r.new(e("sub", "float", a, e("mul", "float", _floor(r, e("div", "float", a, b)), b)))


def _pow(r: Recorder, input: Any, exponent: Any) -> Scalar:
    a, n = r.lift(input), r.lift(exponent)
    power, base = r.builder.value(n), r.builder.value(a)
    if isinstance(power, (int, float)) and power == int(power) and 1 <= power <= 8:
        kind, (x, _) = r.promoted(a, n, least="int")
        result = None
        for bit in range(int(power).bit_length()):
            if int(power) >> bit & 1:
                result = x if result is None else r.builder.emit("mul", kind, result, x)
            x = r.builder.emit("mul", kind, x, x)
        assert result is not None
        return r.new(result)
    if power == 0.5:
        return _float_unary("sqrt")(r, input)
    if power == -0.5:
        return _float_unary("rsqrt")(r, input)
    if power == -1:
        return _reciprocal(r, input)
    if base == 2 and r.builder.kind(n) == "float":
        return _float_unary("exp2")(r, exponent)
    if r.builder.kind(a) != "float" and r.builder.kind(n) != "float":
        raise _Arguments("an integer to an integer power that is not a constant from 1 to 8 (use a float)")
    return r.new(r.builder.emit("pow", "float", r.cast(a, "float"), r.cast(n, "float")))


def _reciprocal(r: Recorder, input: Any) -> Scalar:
    return _div(r, 1.0, input)


def _compare(op: str) -> Function:
    return lambda r, input, other: r.new(_comparison(r, op, input, other))


def _comparison(r: Recorder, op: str, a: Any, b: Any) -> int:
    _, operands = r.promoted(r.lift(a), r.lift(b), least="int")
    return r.builder.emit(op, "bool", *operands)


def _ne(r: Recorder, input: Any, other: Any) -> Scalar:
    return r.new(r.builder.emit("not", "bool", _comparison(r, "eq", input, other)))


def _bits(op: str) -> Function:
    def function(r: Recorder, input: Any, other: Any) -> Scalar:
        kind, operands = r.promoted(r.lift(input), r.lift(other))
        if kind == "float":
            raise _Arguments("a float, where a bool or an integer is needed")
        return r.new(r.builder.emit(op, kind, *operands))

    return function


def _logical(op: str) -> Function:
    def function(r: Recorder, input: Any, other: Any) -> Scalar:
        return r.new(r.builder.emit(op, "bool", r.cast(r.lift(input), "bool"), r.cast(r.lift(other), "bool")))

    return function


def _not(r: Recorder, input: Any) -> Scalar:
    x = r.lift(input)
    if r.builder.kind(x) == "float":
        raise _Arguments("a float, where a bool or an integer is needed")
    return r.new(r.builder.emit("not", r.builder.kind(x), x))


def _logical_not(r: Recorder, input: Any) -> Scalar:
    return r.new(r.builder.emit("not", "bool", r.cast(r.lift(input), "bool")))


def _where(r: Recorder, condition: Any, input: Any = None, other: Any = None) -> Scalar:
    if input is None or other is None:
        raise _Arguments("one argument")
    chosen = r.cast(r.lift(condition), "bool")
    kind, operands = r.promoted(r.lift(input), r.lift(other))
    return r.new(r.builder.emit("where", kind, chosen, *operands))


def _masked_fill(r: Recorder, input: Any, mask: Any, value: Any) -> Scalar:
    kind = r.builder.kind(r.lift(input))
    return _where(r, mask, r.new(r.cast(r.lift(value), kind)), input)


def _clamp(r: Recorder, input: Any, min: Any = None, max: Any = None) -> Scalar:
    """By `where`, whose derivative at a bound is that of the number, as in PyTorch, and which keeps NaN."""
    found = input
    for bound, op in ((min, "lt"), (max, "gt")):
        if bound is not None:
            ordered = (found, bound) if op == "lt" else (bound, found)
            found = _where(r, r.new(_comparison(r, "lt", *ordered)), bound, found)
    if found is input and not isinstance(input, Scalar):
        return r.new(r.lift(input))
    return found


def _cast(kind: str) -> Function:
    return lambda r, input: r.new(r.cast(r.lift(input), kind))


def _to(r: Recorder, input: Any, *args: Any, **kwargs: Any) -> Scalar:
    """The kind of a dtype; a device must be the own one. Other arguments have no meaning here."""
    at = r.lift(input)
    for x in (*args, *kwargs.values()):
        if isinstance(x, torch.dtype):
            at = r.cast(at, kind_of(x))
        elif isinstance(x, (Tensor, Scalar)):
            at = r.cast(at, kind_of(x.dtype))
        elif isinstance(x, (str, torch.device)) and torch.device(x).type != r.device.type:
            raise _Arguments(f"another device than q's: {x}")
    return r.new(at)


def _filled(r: Recorder, input: Any, value: Any, dtype: torch.dtype | None) -> Scalar:
    return r.new(r.cast(r.lift(value), kind_of(input.dtype if dtype is None else dtype)))


def _full_like(r: Recorder, input: Any, fill_value: Any, *, dtype: Any = None, **_: Any) -> Scalar:
    return _filled(r, input, fill_value, dtype)


def _like(value: int) -> Function:
    return lambda r, input, *, dtype=None, **_: _filled(r, input, value, dtype)


def _new_tensor(r: Recorder, input: Any, data: Any, *, dtype: Any = None, **_: Any) -> Scalar:
    return _filled(r, input, data, dtype)


def _new_full(r: Recorder, input: Any, size: Any, fill_value: Any, *, dtype: Any = None, **_: Any) -> Scalar:
    if len(size) > 0:
        raise _Arguments(f"size {tuple(size)}")
    return _filled(r, input, fill_value, dtype)


def _tensor(r: Recorder, data: Any, *, dtype: torch.dtype | None = None, **_: Any) -> Scalar:
    at = r.lift(data)
    return r.new(at if dtype is None else r.cast(at, kind_of(dtype)))


def _softplus(r: Recorder, input: Any, beta: float = 1, threshold: float = 20) -> Scalar:
    """``max(x, 0) + log(1 + exp(-|x|))``, which does not overflow."""
    if beta != 1:
        raise _Arguments(f"beta={beta}")
    e, x, zero = r.builder.emit, r.cast(r.lift(input), "float"), r.builder.const(0.0, "float")
    small = e("exp", "float", _neg(r, e("abs", "float", x)))
    positive = e("where", "float", e("lt", "bool", zero, x), x, zero)
    log = e("log", "float", e("add", "float", r.builder.const(1.0, "float"), small))
    return r.new(e("add", "float", positive, log))


def _logsigmoid(r: Recorder, input: Any) -> Scalar:
    return r.new(_neg(r, _softplus(r, r.new(_neg(r, r.cast(r.lift(input), "float")))).at))


def _relu(r: Recorder, input: Any, inplace: bool = False) -> Scalar:
    zero = r.new(r.builder.const(0, "int"))
    return _where(r, r.new(_comparison(r, "lt", zero, input)), input, zero)


def _silu(r: Recorder, input: Any, inplace: bool = False) -> Scalar:
    return _mul(r, input, _float_unary("sigmoid")(r, input))


def _shift(op: str) -> Function:
    def function(r: Recorder, input: Any, other: Any) -> Scalar:
        n = r.builder.value(r.lift(other))
        if not isinstance(n, int) or not 0 <= n < 31:
            raise _Arguments("a number of bits that is not a constant from 0 to 30")
        kind, (x,) = r.promoted(r.lift(input), least="int")
        if kind != "int":
            raise _Arguments("a float, where an integer is needed")
        return r.new(r.builder.emit(op, "int", x, r.builder.const(1 << n, "int")))

    return function


def _embedding(r: Recorder, input: Any, weight: Tensor, *_: Any, **__: Any) -> Scalar | Row:
    """A row of a table, which is indexed further."""
    return r.index(weight, (r.lift(input),))


def _same(r: Recorder, input: Any, *_: Any, **__: Any) -> Scalar:
    return r.new(r.lift(input))


def _isinf(r: Recorder, input: Any) -> Scalar:
    x = r.cast(r.lift(input), "float")
    infinite = r.builder.const(float("inf"), "float")
    return r.new(r.builder.emit("eq", "bool", r.builder.emit("abs", "float", x), infinite))


def _isnan(r: Recorder, input: Any) -> Scalar:
    x = r.cast(r.lift(input), "float")
    return r.new(r.builder.emit("not", "bool", r.builder.emit("eq", "bool", x, x)))


FUNCTIONS |= {
    **{op: _float_unary(op) for op in ("exp", "exp2", "log", "log2", "sqrt", "rsqrt", "tanh", "sigmoid", "sin", "cos")},
    **{op: _signed_unary(op) for op in ("neg", "abs")},
    "special_expit": _float_unary("sigmoid"), "negative": _signed_unary("neg"), "absolute": _signed_unary("abs"),
    "floor": _rounding(_floor), "ceil": _rounding(_ceil), "trunc": _rounding(_trunc), "fix": _rounding(_trunc),
    "add": _add, "sub": _sub, "subtract": _sub, "rsub": _flipped(_sub), "mul": _mul, "multiply": _mul,
    "square": lambda r, input: _mul(r, input, input), "reciprocal": _reciprocal,
    "div": _div, "divide": _div, "truediv": _div, "true_divide": _div, "rdiv": _flipped(_div),
    "rtruediv": _flipped(_div), "floordiv": _floordiv, "floor_divide": _floordiv, "rfloordiv": _flipped(_floordiv),
    "mod": _mod, "remainder": _mod, "rmod": _flipped(_mod), "pow": _pow, "rpow": _flipped(_pow), "float_power": _pow,
    "min": _min, "minimum": _min, "max": _max, "maximum": _max, "clamp": _clamp, "clip": _clamp,
    "clamp_min": lambda r, input, min: _clamp(r, input, min),
    "clamp_max": lambda r, input, max: _clamp(r, input, None, max),
    "lt": _compare("lt"), "less": _compare("lt"), "le": _compare("le"), "less_equal": _compare("le"),
    "gt": _flipped(_compare("lt")), "greater": _flipped(_compare("lt")), "ge": _flipped(_compare("le")),
    "greater_equal": _flipped(_compare("le")), "eq": _compare("eq"), "ne": _ne, "not_equal": _ne,
    "and": _bits("and"), "bitwise_and": _bits("and"), "logical_and": _logical("and"),
    "or": _bits("or"), "bitwise_or": _bits("or"), "logical_or": _logical("or"),
    "xor": _bits("xor"), "bitwise_xor": _bits("xor"), "logical_xor": _logical("xor"),
    "bitwise_not": _not, "invert": _not, "logical_not": _logical_not,
    "lshift": _shift("mul"), "bitwise_left_shift": _shift("mul"), "rshift": _shift("floordiv"),
    "bitwise_right_shift": _shift("floordiv"),
    "where": _where, "masked_fill": _masked_fill,
    "to": _to, "type": _to, "type_as": _to, "float": _cast("float"), "double": _cast("float"), "half": _cast("float"),
    "bfloat16": _cast("float"), "int": _cast("int"), "long": _cast("int"), "short": _cast("int"),
    "bool": _cast("bool"),
    "full_like": _full_like, "zeros_like": _like(0), "ones_like": _like(1), "new_tensor": _new_tensor,
    "new_full": _new_full, "tensor": _tensor, "scalar_tensor": _tensor, "as_tensor": _tensor,
    "softplus": _softplus, "logsigmoid": _logsigmoid, "log_sigmoid": _logsigmoid, "relu": _relu, "silu": _silu,
    "embedding": _embedding,
    "positive": _same, "clone": _same, "contiguous": _same, "squeeze": _same, "isinf": _isinf, "isnan": _isnan,
    "detach": lambda r, input: r.new(r.builder.emit("detach", r.builder.kind(r.lift(input)), r.lift(input))),
}  # fmt: skip
