"""Machine code of compiled kernels: the inner loops that multiply matrices and what their products hide, and how much
is loaded before any of it is used."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

#: Classes of instructions, by how their names begin; the first that fits.
CLASSES = {
    "product": r"[HQIB]G?MMA|UTC[HQIO]?MMA",
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
    """`counts` of instructions by class, "other" for the rest. Of asynchronous products (HGMMA) `overlapped` have
    exponentials between them and the wait for them, and `hidden` exponentials are issued while one is under way."""

    instructions: int
    counts: dict[str, int]
    overlapped: int
    hidden: int

    def __str__(self) -> str:
        several = ", ".join(f"{n} {name}" for name, n in self.counts.items())
        return (
            f"loop of {self.instructions} instructions: {several}; {self.overlapped} products overlap exponentials, "
            f"{self.hidden} exponentials are hidden"
        )


def _parse(disassembly: str) -> tuple[list[str], dict[str, int]]:
    """The instructions, and at which of them labels are."""
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
    """Of what `nvdisasm -c` or `cuobjdump --dump-sass` prints: the most bytes that a thread has asked of global memory
    and not used yet, in the order of the code and with every branch's loads. What a loop loads for its next round it
    does not see, nor copies to shared memory."""
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
        elif text.startswith(("BRA", "EXIT", "RET")):  # what follows is not reached from here
            waiting = []
    return most


def _registers(operands: str, each: int) -> set[int]:
    """Those that operands of so many registers each name."""
    return {int(n) + i for n in re.findall(r"\bR(\d+)", operands) for i in range(each)}


def inner_loops(disassembly: str) -> list[Loop]:
    """Of what `nvdisasm -c` prints, the innermost loops that multiply matrices, in the order of the code."""
    code, labels = _parse(disassembly)
    spans = []
    for at, text in enumerate(code):
        target = re.search(r"BRA.*`\((\.L_\w+)\)", text)
        if target and labels.get(target[1], at + 1) <= at:
            spans.append((labels[target[1]], at + 1))
    innermost = [s for s in spans if not any(o != s and s[0] <= o[0] and o[1] <= s[1] for o in spans)]
    found = [_loop([re.sub(r"^@!?U?P\w+\s+", "", text) for text in code[begin:end]]) for begin, end in innermost]
    return [loop for loop in found if loop.counts.get("product")]


def _loop(body: list[str]) -> Loop:
    counts = Counter(_class(text) for text in body)
    under_way = waiting = 0  # products since the last wait, and those of them that no exponential has followed yet
    for _ in range(2):  # the first time round tells what is under way when the loop begins again
        overlapped = hidden = 0
        for text in body:
            kind = _class(text)
            if text.startswith("HGMMA"):
                under_way, waiting = under_way + 1, waiting + 1
            elif kind == "exponential" and under_way:
                hidden, overlapped, waiting = hidden + 1, overlapped + waiting, 0
            elif _WAIT.match(text):
                under_way = waiting = 0
    return Loop(len(body), dict(counts.most_common()), overlapped, hidden)


def _class(text: str) -> str:
    return next((name for name, pattern in CLASSES.items() if re.match(pattern, text)), "other")
