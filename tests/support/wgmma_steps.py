"""Loops of kernels with asynchronous products (wgmma), in machine code: what is done while some are under way.

A loop waits for a part of what it issued (`WARPGROUP.DEPBAR.LE gsb0, 0x1`: for all but the newest group) and then for
the rest (`0x0`). What stands between runs beside the rest: a step. That ptxas moved the exponentials elsewhere, or that
a step grew, is not seen in results, only in time.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from foundry_kernels.tools.inspect.sass import _parse

_BRANCH = re.compile(r"BRA.*`\((\.L_\w+)\)")
_WAIT = re.compile(r"WARPGROUP\.DEPBAR\S* \w+, 0x(\w)")


@dataclass(frozen=True)
class Loop:
    """`instructions` without those of loops within it, which wait for barriers. `hidden`: of the exponentials, those
    that are issued while a product is under way. `steps`: from a wait for a part to that for the rest, the instructions
    and the exponentials between. `local`: accesses of memory of a thread's own."""

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


def product_loops(disassembly: str) -> list[Loop]:
    """Those loops with products that contain no other such, of what `nvdisasm -c` prints, in the order of the code."""
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
    for _ in range(2):  # the first time round tells what is under way when the loop begins again
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
