"""The instructions of a score function, and the list of them; the package's docstring defines both."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

#: The opcodes: an operation's number is its place here.
OPS = (
    "score", "b", "h", "q", "k", "const", "load", "float", "int", "detach",
    "neg", "abs", "exp", "exp2", "log", "log2", "sqrt", "rsqrt", "tanh", "sigmoid", "sin", "cos", "floor",
    "add", "sub", "mul", "div", "floordiv", "mod", "pow", "min", "max",
    "lt", "le", "eq", "and", "or", "xor", "not", "where",
)  # fmt: skip
#: The kinds of values, in the order of promotion: a kind's number is its place here.
KINDS = ("bool", "int", "float")
INPUTS = OPS[:5]
#: What a value depends on, as bits: the score, b, h, q, k.
ON_SCORE, ON_B, ON_H, ON_Q, ON_K = (1 << i for i in range(5))

_NUMBER = {name: i for i, name in enumerate(OPS)}


class Instruction(NamedTuple):
    """One value. `operands` are the numbers of earlier instructions, of a load those of its indices."""

    op: str
    kind: str
    depends: int  # ON_SCORE | ...
    operands: tuple[int, ...]
    value: float | int | None = None  # of "const"
    slot: int = 0  # of "load": which captured tensor
    negative: int = 0  # of "load": bit i is set if index i may be negative


class Slot(NamedTuple):
    """A captured tensor: the kind of its elements and its number of dimensions."""

    kind: str
    rank: int


class Program(NamedTuple):
    """A list of instructions. Hashable, and a plain tuple to pickle and torch.compile."""

    slots: tuple[Slot, ...]
    instructions: tuple[Instruction, ...]
    outputs: tuple[int, ...]  # the numbers of the instructions whose values are the results

    def constant(self, at: int) -> float | int | None:
        """The value of an instruction that is a constant, else None."""
        return self.instructions[at].value

    def loads(self) -> tuple[int, ...]:
        """The numbers of the loads of floating-point tensors, which may take a gradient."""
        return tuple([i for i, x in enumerate(self.instructions) if x.op == "load" and x.kind == "float"])

    def with_used_slots(self) -> tuple[Program, tuple[int, ...]]:
        """The program without slots that nothing loads from, and the numbers that those that remain had."""
        used = sorted({x.slot for x in self.instructions if x.op == "load"})
        if len(used) == len(self.slots):
            return self, tuple(used)
        moved = [x._replace(slot=used.index(x.slot)) if x.op == "load" else x for x in self.instructions]
        return Program(tuple([self.slots[i] for i in used]), tuple(moved), self.outputs), tuple(used)

    def encode(self) -> list[int]:
        """The program as integers, see the package's docstring."""
        code = [len(self.slots), len(self.instructions), len(self.outputs)]
        for slot in self.slots:
            code += [KINDS.index(slot.kind), slot.rank]
        for x in self.instructions:
            operands = list(x.operands)
            if x.op == "const":
                assert x.value is not None
                operands = [_bits(x.value) if x.kind == "float" else int(x.value)]
            elif x.op == "load":
                operands = [x.slot, x.negative, *operands]
            code += [_NUMBER[x.op], KINDS.index(x.kind), x.depends, len(operands), *operands]
        return code + list(self.outputs)

    @classmethod
    def decode(cls, code: Sequence[int]) -> Program:
        """The program that `encode` wrote."""
        n_slots, n_instructions, n_outputs = code[:3]
        at = 3 + 2 * n_slots
        slots = tuple([Slot(KINDS[code[i]], code[i + 1]) for i in range(3, at, 2)])
        found = []
        for _ in range(n_instructions):
            op, kind, depends, n = OPS[code[at]], KINDS[code[at + 1]], code[at + 2], code[at + 3]
            operands = tuple(code[at + 4 : at + 4 + n])
            at += 4 + n
            if op == "const":
                value = _from_bits(operands[0]) if kind == "float" else operands[0]
                found.append(Instruction(op, kind, depends, (), value))
            elif op == "load":
                found.append(Instruction(op, kind, depends, operands[2:], None, operands[0], operands[1]))
            else:
                found.append(Instruction(op, kind, depends, operands))
        return cls(slots, tuple(found), tuple(code[at : at + n_outputs]))

    def __str__(self) -> str:
        lines = [f"tensor {i}: {slot.kind}, {slot.rank} dimensions" for i, slot in enumerate(self.slots)]
        for i, x in enumerate(self.instructions):
            operands = ", ".join(f"%{at}" for at in x.operands)
            if x.op == "const":
                operands = repr(x.value)
            elif x.op == "load":
                operands = f"tensor {x.slot}[{operands}]"
            letters = "".join(letter for bit, letter in enumerate("sbhqk") if x.depends >> bit & 1)
            lines.append(f"%{i} = {x.op} {operands}: {x.kind}" + (f" of {letters}" if letters else ""))
        return "\n".join([*lines, "return " + ", ".join(f"%{i}" for i in self.outputs)])


def _bits(value: float) -> int:
    bits: int = struct.unpack("<q", struct.pack("<d", value))[0]
    return bits


def _from_bits(bits: int) -> float:
    value: float = struct.unpack("<d", struct.pack("<q", bits))[0]
    return value


def _folded(op: str, kind: str, values: list[float | int | None]) -> float | int | None:
    """What arithmetic on constants gives, else None."""
    a, b = values[0], values[-1]
    if a is None or b is None:
        return None
    if op == "neg":
        return -a
    if op == "add":
        return a + b
    if op == "sub":
        return a - b
    if op == "mul":
        return a * b
    if op == "div" and b != 0:
        return a / b
    return None


class Builder:
    """Appends instructions, each value once. Plain Python on integers and tuples, which torch.compile can trace."""

    def __init__(self, program: Program | None = None) -> None:
        self.slots: list[Slot] = []
        self.instructions: list[Instruction] = []
        self._known: dict[tuple[str, str, tuple[int, ...], str, int], int] = {}
        if program is not None:
            self.slots = list(program.slots)
            for x in program.instructions:
                self._append(x)

    def _append(self, x: Instruction) -> int:
        key = (x.op, x.kind, x.operands, repr(x.value), x.slot)  # repr: 0.0 is not -0.0
        at = self._known.get(key)
        if at is None:
            at = len(self.instructions)
            self.instructions.append(x)
            self._known[key] = at
        return at

    def kind(self, at: int) -> str:
        return self.instructions[at].kind

    def value(self, at: int) -> float | int | None:
        return self.instructions[at].value

    def input(self, name: str) -> int:
        return self._append(Instruction(name, "float" if name == "score" else "int", 1 << INPUTS.index(name), ()))

    def const(self, value: float | int, kind: str) -> int:
        value = float(value) if kind == "float" else int(value)
        return self._append(Instruction("const", kind, 0, (), value))

    def load(self, slot: int, indices: tuple[int, ...]) -> int:
        depends, negative = 0, 0
        for i, at in enumerate(indices):
            depends |= self.instructions[at].depends
            negative |= 0 if self.is_not_negative(at) else 1 << i
        return self._append(Instruction("load", self.slots[slot].kind, depends, indices, None, slot, negative))

    def emit(self, op: str, kind: str, *operands: int) -> int:
        """The number of an operation's value: of a constant, where arithmetic on constants gives one."""
        depends = 0
        folded = _folded(op, kind, [self.instructions[at].value for at in operands])
        if folded is not None:
            return self.const(folded, kind)
        for at in operands:
            depends |= self.instructions[at].depends
        return self._append(Instruction(op, kind, depends, operands))

    def is_not_negative(self, at: int) -> bool:
        """Whether an integer is known not to be negative, from its instructions alone."""
        x = self.instructions[at]
        if x.op in ("b", "h", "q", "k", "abs") or x.kind == "bool":
            return True
        if x.op == "const":
            return x.value is not None and x.value >= 0
        if x.op == "int":
            return self.kind(x.operands[0]) == "bool"
        if x.op in ("add", "mul", "floordiv", "min", "and"):
            return all(self.is_not_negative(i) for i in x.operands)
        if x.op == "max":
            return any(self.is_not_negative(i) for i in x.operands)
        if x.op == "where":
            return all(self.is_not_negative(i) for i in x.operands[1:])
        if x.op == "mod":  # of the divisor's sign
            return self.is_not_negative(x.operands[1])
        return False

    def program(self, *outputs: int) -> Program:
        """The program with these results, without instructions that none of them needs."""
        needed = set(outputs)
        for at in range(len(self.instructions) - 1, -1, -1):
            if at in needed:
                needed.update(self.instructions[at].operands)
        places: dict[int, int] = {}
        kept: list[Instruction] = []
        for at, x in enumerate(self.instructions):
            if at in needed:
                places[at] = len(kept)
                kept.append(x._replace(operands=tuple([places[i] for i in x.operands])))
        return Program(tuple(self.slots), tuple(kept), tuple([places[at] for at in outputs]))
