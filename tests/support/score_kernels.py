"""Compiles attention's kernels with score functions ahead of time: ``python score_kernels.py ARCH WIDTH NAME ...``.

Prints a line for each kernel: its name, the example's (or "built-in", which is ALiBi as an option), registers, bytes of
stack, and the instructions of its code.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
from score_functions import EXAMPLES, Sizes

import foundry_kernels as fk
from foundry_kernels.testing import Arg, Case
from foundry_kernels.tools.inspect import aot

SIZES = Sizes(2, 8, 1024, 1024)


def cases(width: int, names: list[str]) -> Iterator[tuple[Case, torch.dtype]]:
    heads = {"q": 8, "k": 2, "v": 2}
    args: dict[str, Any] = {name: Arg((2, n, 1024, width)) for name, n in heads.items()}
    for name in names:
        if name == "built-in":
            options: dict[str, Any] = {"alibi_slopes": EXAMPLES["alibi"].captured(SIZES)["slopes"].detach()}
        elif name == "none":
            options = {}
        else:
            example = EXAMPLES[name]
            options = {"score_mod": example.score_mod(example.captured(SIZES))}
        yield Case(name, args, options | {"causal": True}), torch.bfloat16


def main(arch: int, width: int, names: list[str]) -> None:
    made = SimpleNamespace(compiled_cases=lambda name: tuple(cases(width, names)))
    op: Any = SimpleNamespace(name="flash_attention", public=fk.flash_attention, cases=made, bench=None)
    for launch in aot.record(op, arch, everything=False):
        if "preprocess" in launch.name or "sum_splits" in launch.name:
            continue
        found = aot.compile_for(launch, arch, brief=True)
        count = len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/", found.machine_code(), re.MULTILINE))
        print(launch.name, launch.case, found.registers, found.stack, count, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
