"""Loops of kernels with asynchronous matmuls (wgmma) in machine code, and the work that overlaps with them.

A loop waits for a part of its matmuls (`WARPGROUP.DEPBAR.LE gsb0, 0x1`: all except the newest group) and then for the
rest (`0x0`). The instructions between the waits, a step, overlap with the rest. If ptxas moved the exponentials
elsewhere, or if a step grew, results would not change, only the time.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

from foundry_kernels.tools.inspect.sass import _parse

_BRANCH = re.compile(r"BRA.*`\((\.L_\w+)\)")
_WAIT = re.compile(r"WARPGROUP\.DEPBAR\S* \w+, 0x(\w)")


@dataclass(frozen=True)
class Loop:
    """`instructions` does not count inner loops, which wait for barriers. `hidden`: the exponentials that are issued
    while a matmul runs. `steps`: the instructions and exponentials between the wait for a part and the wait for the
    rest. `local`: accesses to local memory."""

    instructions: int
    products: int
    exponentials: int
    hidden: int
    steps: tuple[tuple[int, int], ...]
    local: int

    def __str__(self) -> str:
        steps = ", ".join(f"{n} with {e} exponentials" for n, e in self.steps)
        return (
            f"loop of {self.instructions} instructions, {self.products} products, {self.hidden} of {self.exponentials} "
            f"exponentials beside them; between the waits {steps or 'nothing'}"
        )


def executed_between_waits(disassembly: str, through: str) -> list[int]:
    """For each step of the kernel, in the order of the code, how many instructions the shortest way from the wait for a
    part to the wait for the rest executes after an instruction that begins with `through`; steps without are left
    out."""
    code, labels = _parse(disassembly)
    bare = [re.sub(r"^@!?U?P\w+\s+", "", text) for text in code]
    waits = [(at, wait[1]) for at, text in enumerate(bare) if (wait := _WAIT.match(text))]
    found = []
    for (begin, first), (end, second) in itertools.pairwise(waits):
        if first == "0" or second != "0":
            continue
        least: dict[tuple[int, bool], int] = {(begin + 1, False): 0}
        for at in range(begin + 1, end):
            branch = _BRANCH.match(bare[at])
            following = [labels.get(branch[1], at)] if branch else [at + 1]
            if branch and (code[at] != bare[at] or re.match(r"BRA\S* !?U?P\d", bare[at])):
                following.append(at + 1)
            for been in (False, True):
                if (at, been) not in least:
                    continue
                for to in (to for to in following if to > at):
                    key = to, been or bare[at].startswith(through)
                    least[key] = min(least.get(key, end), least[at, been] + 1)
        if (end, True) in least:
            found.append(least[end, True])
    return found


def product_loops(disassembly: str) -> list[Loop]:
    """The innermost loops with matmuls in the output of `nvdisasm -c`, in the order of the code."""
    code, labels = _parse(disassembly)
    code = [re.sub(r"^@!?U?P\w+\s+", "", text) for text in code]
    spans = []
    for at, text in enumerate(code):
        branch = _BRANCH.match(text)
        if branch and labels.get(branch[1], at + 1) <= at:
            spans.append((labels[branch[1]], at + 1))
    multiply = [s for s in spans if any(text.startswith("HGMMA") for text in code[slice(*s)])]
    found = []
    for begin, end in multiply:
        if any(o != (begin, end) and begin <= o[0] and o[1] <= end for o in multiply):
            continue
        nested = {at for o in spans if o != (begin, end) and begin <= o[0] and o[1] <= end for at in range(*o)}
        found.append(_loop([code[at] for at in range(begin, end) if at not in nested]))
    return found


def _loop(body: list[str]) -> Loop:
    steps = []
    since: int | None = None
    for at, text in enumerate(body):
        if wait := _WAIT.match(text):
            if wait[1] == "0" and since is not None:
                between = body[since + 1 : at]
                steps.append((len(between), sum(t.startswith("MUFU.EX2") for t in between)))
            since = at if wait[1] != "0" else None
    hidden = groups = 0
    for _ in range(2):  # the first iteration finds the matmuls in flight at the start of the second
        hidden = 0
        for text in body:
            if wait := _WAIT.match(text):
                groups = min(groups, int(wait[1], 16))
            elif text.startswith("HGMMA"):
                groups += "gsb0" in text
            elif text.startswith("MUFU.EX2"):
                hidden += groups > 0
    count = lambda *names: sum(text.startswith(names) for text in body)  # noqa: E731
    return Loop(len(body), count("HGMMA"), count("MUFU.EX2"), hidden, tuple(steps), count("LDL", "STL"))
