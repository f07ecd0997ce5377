"""The derivatives of a program, as a program: forward mode, so that the branch of a `where` that is not taken, and what
is infinite in it, does not reach the result."""

from __future__ import annotations

from functools import lru_cache

from foundry_kernels.ops.flash_attention.score_program.program import Builder, Program

_LN2 = 0.6931471805599453


@lru_cache(maxsize=256)
def derive(program: Program) -> Program:
    """A program with the results of `program` (one), its derivative by the score and, for each load in
    ``program.loads()``, its derivative by the loaded number.

    The derivative of `abs` at 0 is 0, of `min` and `max` of equal numbers half by each, as in PyTorch.
    """
    (result,) = program.outputs
    made = Builder(program)
    derivatives = [_along(made, program, result, at) for at in (_score(program), *program.loads())]
    return made.program(result, *derivatives)


def _score(program: Program) -> int:
    return next((i for i, x in enumerate(program.instructions) if x.op == "score"), -1)


def _along(made: Builder, program: Program, result: int, variable: int) -> int:
    """The derivative of the result by instruction `variable`."""
    tangents: dict[int, int] = {}  # of the instructions whose derivative is not 0 everywhere
    zero, one = made.const(0.0, "float"), made.const(1.0, "float")
    if variable >= 0:
        tangents[variable] = one
    for at, x in enumerate(program.instructions):
        if x.kind == "float" and at != variable and any(i in tangents for i in x.operands):
            tangent = _Rules(made, tangents, zero).of(x.op, at, x.operands)
            if tangent is not None and tangent != zero:
                tangents[at] = tangent
    return tangents.get(result, zero)


class _Rules:
    """The derivative of one instruction from those of its operands. None is 0."""

    def __init__(self, made: Builder, tangents: dict[int, int], zero: int) -> None:
        self.made, self.tangents, self.zero = made, tangents, zero

    def _f(self, op: str, *operands: int) -> int:
        return self.made.emit(op, "float", *operands)

    def _c(self, value: float) -> int:
        return self.made.const(value, "float")

    def times(self, a: int | None, b: int) -> int | None:
        if a is None or self.made.value(a) == 0.0 or self.made.value(b) == 0.0:
            return None
        if self.made.value(a) == 1.0:
            return b
        if self.made.value(b) == 1.0:
            return a
        if self.made.value(a) == -1.0:
            return self._f("neg", b)
        return self._f("mul", a, b)

    def plus(self, a: int | None, b: int | None) -> int | None:
        if a is None or b is None:
            return b if a is None else a
        return self._f("add", a, b)

    def minus(self, a: int | None, b: int | None) -> int | None:
        if b is None:
            return a
        return self._f("neg", b) if a is None else self._f("sub", a, b)

    def where(self, condition: int, a: int | None, b: int | None) -> int | None:
        if a == b:
            return a
        return self._f("where", condition, self.zero if a is None else a, self.zero if b is None else b)

    def of(self, op: str, y: int, operands: tuple[int, ...]) -> int | None:
        """y: the instruction's own number."""
        if op in ("detach", "floor", "float", "int"):
            return None
        if op == "where":
            condition, a, b = operands
            return self.where(condition, self.tangents.get(a), self.tangents.get(b))
        if len(operands) == 1:
            return self._unary(op, y, operands[0])
        return self._binary(op, y, *operands)

    def _unary(self, op: str, y: int, x: int) -> int | None:
        f, c, d = self._f, self._c, self.tangents[x]
        if op == "neg":
            return self.minus(None, d)
        if op == "exp":
            slope = y
        elif op == "exp2":
            slope = f("mul", y, c(_LN2))
        elif op == "log":
            return f("div", d, x)
        elif op == "log2":
            return f("div", d, f("mul", x, c(_LN2)))
        elif op == "sqrt":
            return f("div", d, f("mul", c(2.0), y))
        elif op == "rsqrt":
            slope = f("mul", c(-0.5), f("div", y, x))
        elif op == "tanh":
            slope = f("sub", c(1.0), f("mul", y, y))
        elif op == "sigmoid":
            slope = f("mul", y, f("sub", c(1.0), y))
        elif op == "sin":
            slope = f("cos", x)
        elif op == "cos":
            slope = f("neg", f("sin", x))
        else:
            assert op == "abs", op
            e, zero = self.made.emit, self.zero
            slope = f("where", e("lt", "bool", x, zero), c(-1.0), f("where", e("lt", "bool", zero, x), c(1.0), zero))
        return self.times(d, slope)

    def _binary(self, op: str, y: int, a: int, b: int) -> int | None:
        f, c, da, db = self._f, self._c, self.tangents.get(a), self.tangents.get(b)
        if op == "add":
            return self.plus(da, db)
        if op == "sub":
            return self.minus(da, db)
        if op == "mul":
            return self.plus(self.times(da, b), self.times(db, a))
        if op == "div":  # (da - y db) / b
            top = self.minus(da, self.times(db, y))
            return None if top is None else f("div", top, b)
        if op == "pow":
            lowered = f("mul", b, f("pow", a, f("sub", b, c(1.0))))
            by_base = self.where(self.made.emit("eq", "bool", b, self.zero), None, lowered)
            assert by_base is not None
            found = self.times(da, by_base)
            if db is not None:  # 0 to a power of at least 0 has no slope, as in PyTorch
                e = self.made.emit
                flat = e("and", "bool", e("eq", "bool", a, self.zero), e("le", "bool", self.zero, b))
                found = self.plus(found, self.where(flat, None, self.times(db, f("mul", y, f("log", a)))))
            return found
        assert op in ("min", "max"), op
        if da == db:
            return da
        e = self.made.emit
        first = e("lt", "bool", a, b) if op == "min" else e("lt", "bool", b, a)
        half = self.times(self.plus(da, db), c(0.5))
        return self.where(e("eq", "bool", a, b), half, self.where(first, da, db))
