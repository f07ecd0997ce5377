"""Analyses the machine code of compiled kernels: the inner loops of matmuls, what overlaps with them, and how much is
loaded before the first use."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
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
_WGMMA = re.compile(r"HGMMA\.(\d+)x(\d+)x(\d+)\.\S+ R\d+, (gdesc|R)")
_BRANCH = re.compile(r"(@\S+ )?BRA\S*(.*)`\((\.L_\w+)\)")


@dataclass(frozen=True)
class Loop:
    """A loop of machine code.

    counts: instructions by class, "other" for the rest.
    overlapped: the asynchronous matmuls (HGMMA) with exponentials between them and the wait for them.
    hidden: the exponentials that are issued while a matmul runs.
    skipped: the instructions that a branch skips, for example in tiles without a mask.
    multiply_adds, matmul_cycles: of the 16-bit matmuls of one warpgroup, on an H100.
    overlapped_cycles: of the overlapped ones among them.
    """

    instructions: int
    counts: dict[str, int]
    overlapped: int
    hidden: int
    skipped: int = 0
    multiply_adds: int = 0
    matmul_cycles: float = 0.0
    overlapped_cycles: float = 0.0

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
    found = []
    for begin, end in innermost:
        body = [re.sub(r"^@!?U?P\w+\s+", "", text) for text in code[begin:end]]
        jumps = [(at - begin, labels[label] - begin) for at, label in _forward(code, labels, begin, end)]
        found.append(_loop(body, jumps))
    return [loop for loop in found if loop.counts.get("matmul")]


def _forward(code: list[str], labels: dict[str, int], begin: int, end: int) -> Iterator[tuple[int, str]]:
    """Yields the conditional forward branches within begin .. end - 1, and their labels."""
    for at in range(begin, end):
        branch = _BRANCH.match(code[at])
        conditional = branch and (branch[1] or "P" in branch[2])
        if branch and conditional and at < labels.get(branch[3], -1) < end:
            yield at, branch[3]


def _loop(body: list[str], jumps: list[tuple[int, int]]) -> Loop:
    kinds = [_class(text) for text in body]
    counts = Counter(kinds)
    skipped: set[int] = set()
    for at, target in jumps:
        if not {"matmul", "exponential"} & set(kinds[at + 1 : target]):
            skipped.update(range(at + 1, target))
    in_flight = 0  # matmuls since the last wait
    waiting: list[float] = []  # the cycles of those that no exponential has followed yet
    for _ in range(2):  # the first iteration finds the matmuls in flight at the start of the second
        overlapped, hidden, overlapped_cycles = 0, 0, 0.0
        for text, kind in zip(body, kinds, strict=True):
            if text.startswith("HGMMA"):
                in_flight += 1
                waiting.append(_matmul(text)[1])
            elif kind == "exponential" and in_flight:
                hidden, overlapped, overlapped_cycles = (
                    hidden + 1,
                    overlapped + len(waiting),
                    sum(waiting, overlapped_cycles),
                )
                waiting = []
            elif _WAIT.match(text):
                in_flight, waiting = 0, []
    matmuls = [_matmul(text) for text in body if text.startswith(("HGMMA", "HMMA.16816"))]
    return Loop(
        len(body), dict(counts.most_common()), overlapped, hidden, len(skipped),
        sum(n for n, _ in matmuls), sum(cycles for _, cycles in matmuls), overlapped_cycles,
    )  # fmt: skip


def _matmul(text: str) -> tuple[int, float]:
    """(multiply-adds, cycles on an H100) of one 16-bit matmul instruction. Four tensor cores do 2048 multiply-adds a
    cycle, unless shared memory is slower: it delivers both operands, or only the right one, at 128 bytes a cycle. HMMA,
    a warp's matmul, reaches 63 % (Luo et al., 2024, arXiv:2402.13499)."""
    if text.startswith("HMMA.16816"):
        return 4 * 2048, 4 / 0.63
    found = _WGMMA.match(text)
    if found is None:
        raise ValueError(f"{text} is an unknown matmul instruction")
    m, n, k = map(int, found.groups()[:3])
    read = 2 * k * (n + (m if found[4] == "gdesc" else 0))
    return m * n * k, max(m * n * k / 2048, read / 128)


def _class(text: str) -> str:
    return next((name for name, pattern in CLASSES.items() if re.match(pattern, text)), "other")
