"""Analyses the machine code of compiled kernels: the inner loops of matmuls, what overlaps with them, and how much is
loaded before the first use."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

#: Classes of instructions by the beginning of their names. The first match counts.
CLASSES = {
    "matmul": r"[HQIB]G?MMA|UTC[HQIO]?MMA",
    "exponential": r"MUFU\.EX2",
    "special": r"MUFU",
    "float": r"FFMA|FMUL|FADD|FMNMX|F2F|HADD|HMUL|HFMA|I2F|F2I",
    "select": r"FSEL|FSETP|ISETP|SEL|PLOP3|LOP3|P2R|R2P",
    "shared": r"LDS|STS|LDT|STT",
    "global": r"LDG|STG|UTMA|UBLK|RED|ATOM",
    "local": r"LDL|STL",
    "shuffle": r"SHFL",
    "barrier": r"BAR|SYNCS|WARPGROUP|DEPBAR",
}
_WAIT = re.compile(r"WARPGROUP\.DEPBAR\S* \w+, 0x0")


@dataclass(frozen=True)
class Loop:
    """A loop of machine code.

    counts: instructions by class, "other" for the rest.
    overlapped: the asynchronous matmuls (HGMMA) with exponentials between them and the wait for them.
    hidden: the exponentials that are issued while a matmul runs.
    """

    instructions: int
    counts: dict[str, int]
    overlapped: int
    hidden: int

    def __str__(self) -> str:
        several = ", ".join(f"{n} {name}" for name, n in self.counts.items())
        return (
            f"loop of {self.instructions} instructions: {several}; {self.overlapped} matmuls overlap exponentials, "
            f"{self.hidden} exponentials are hidden"
        )


def _parse(disassembly: str) -> tuple[list[str], dict[str, int]]:
    """The instructions, and the indices of labels among them."""
    code: list[str] = []
    labels: dict[str, int] = {}
    for line in disassembly.splitlines():
        if label := re.match(r"\s*(\.L_\w+):", line):
            labels[label[1]] = len(code)
        elif instruction := re.match(r"\s*/\*[0-9a-f]+\*/\s+(.*?)\s*;", line):
            code.append(instruction[1])
    return code, labels


_BYTES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}


def loaded_ahead(disassembly: str) -> int:
    """Returns the maximum number of bytes that a thread has requested from global memory and not yet used, in the order
    of the code and including every branch. The input is the output of `nvdisasm -c`. A loop's prefetches for its next
    iteration and copies to shared memory do not count."""
    most, waiting = 0, list[tuple[set[int], int]]()
    for text in _parse(disassembly)[0]:
        operation, _, operands = re.sub(r"^@!?U?P\w+\s+", "", text).partition(" ")
        kinds = operation.split(".")
        size = next((_BYTES[kind] for kind in kinds if kind in _BYTES), 4)
        addresses = "".join(re.findall(r"\[.*?\]", operands))
        values = _registers(re.sub(r"\[.*?\]", "", operands), -(-size // 4))
        used = values | _registers(addresses, 2)
        waiting = [load for load in waiting if not load[0] & used]
        if kinds[0] == "LDG":
            waiting.append((values, size))
            most = max(most, sum(each for _, each in waiting))
        elif text.startswith(("BRA", "EXIT", "RET")):  # the next instruction is not reached from here
            waiting = []
    return most


def _registers(operands: str, each: int) -> set[int]:
    """The registers in operands of `each` registers."""
    return {int(n) + i for n in re.findall(r"\bR(\d+)", operands) for i in range(each)}


def inner_loops(disassembly: str) -> list[Loop]:
    """Returns the innermost loops with matmuls from the output of `nvdisasm -c`, in the order of the code."""
    code, labels = _parse(disassembly)
    spans = []
    for at, text in enumerate(code):
        target = re.search(r"BRA.*`\((\.L_\w+)\)", text)
        if target and labels.get(target[1], at + 1) <= at:
            spans.append((labels[target[1]], at + 1))
    innermost = [s for s in spans if not any(o != s and s[0] <= o[0] and o[1] <= s[1] for o in spans)]
    found = [_loop([re.sub(r"^@!?U?P\w+\s+", "", text) for text in code[begin:end]]) for begin, end in innermost]
    return [loop for loop in found if loop.counts.get("matmul")]


def _loop(body: list[str]) -> Loop:
    kinds = [_class(text) for text in body]
    in_flight = 0  # matmuls since the last wait
    waiting = 0  # those that no exponential has followed yet
    for _ in range(2):  # the first iteration finds the matmuls in flight at the start of the second
        overlapped, hidden = 0, 0
        for text, kind in zip(body, kinds, strict=True):
            if text.startswith("HGMMA"):
                in_flight, waiting = in_flight + 1, waiting + 1
            elif kind == "exponential" and in_flight:
                hidden, overlapped, waiting = hidden + 1, overlapped + waiting, 0
            elif _WAIT.match(text):
                in_flight = waiting = 0
    return Loop(len(body), dict(Counter(kinds).most_common()), overlapped, hidden)


def _class(text: str) -> str:
    return next((name for name, pattern in CLASSES.items() if re.match(pattern, text)), "other")
