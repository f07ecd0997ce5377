"""Which tests `make test` leaves to `make test-slow`: the further points of long sweeps, chosen by what they are about.

Every operation, backend, dtype and kind of test stays in `make test`. A test of its own that is long says so with
`@pytest.mark.slow`. Each commit's CI runs a third of the slow tests, any three commits in a row all of them; `make
test-all` runs all at once.
"""

from __future__ import annotations

import zlib
from typing import Any

import pytest
import torch

#: Ahead of time, kernels are compiled for these; each architecture takes minutes.
ARCHITECTURES = (90, "90a")
#: Cases of more elements, all arguments together, repeat on several tiles or chunks what smaller ones show on a few.
MOST_ELEMENTS = 100_000
#: Likewise where kernels are interpreted.
MOST_INTERPRETED = 20_000
#: Where kernels are emulated (Triton's interpreter, CUDA on the CPU) every element takes a thousand times as long, and
#: one code path is for all dtypes: in float32 (of kernels for 16 bits in bfloat16) the cases are tried one and all, in
#: the others those that are small.
FEW_ELEMENTS = 2_000
#: Tests that try several cases at once, or an instruction set, do so in these dtypes; where kernels are emulated, in
#: the first.
SWEPT_DTYPES = (torch.float32, torch.bfloat16)


def reason(parameters: dict[str, Any], instruction_sets: list[str]) -> str | None:
    """Why a test with these parameters is slow, or None."""
    from table import Row

    from foundry_kernels.tools.check import numel

    if (arch := parameters.get("arch")) is not None and arch not in ARCHITECTURES:
        return f"architecture {arch}"
    row, case, dtype = (parameters.get(name) for name in ("row", "case", "dtype"))
    interpreted = isinstance(row, Row) and row.backend == "triton" and row.device == "cpu"
    emulated = interpreted or (isinstance(row, Row) and row.cuda_on_cpu)
    if emulated and parameters.get("part") in ("small", "others"):
        return "all but a few cases, emulated"
    if isinstance(row, Row) and case is not None and numel(case) > MOST_ELEMENTS:
        return f"more than {MOST_ELEMENTS} elements"
    if interpreted and case is not None and numel(case) > MOST_INTERPRETED:
        return f"interpreted, more than {MOST_INTERPRETED} elements"
    if dtype is not None and case is None and isinstance(row, Row):
        if dtype not in SWEPT_DTYPES[: 1 if emulated else None]:
            return f"several cases in {dtype}"
    elif emulated and dtype not in (None, first_dtype(row)) and numel(case) > FEW_ELEMENTS:
        return f"emulated in {dtype}"
    name = instruction_set_in(parameters)
    if name in instruction_sets:
        if name not in {instruction_sets[0], "avx2", instruction_sets[-1]}:
            return f"instruction set {name}"
        if dtype not in (None, *SWEPT_DTYPES):
            return f"instruction sets in {dtype}"
    return None


def first_dtype(row: Any) -> torch.dtype:
    """That in which all cases are tried where kernels are emulated."""
    return torch.bfloat16 if row.hopper else torch.float32


def instruction_set_in(parameters: dict[str, Any]) -> Any:
    """What a test calls `name` or `instruction_set`; the first may be the name of something else."""
    return parameters.get("name", parameters.get("instruction_set"))


def instruction_set_of(item: pytest.Item) -> Any:
    call = getattr(item, "callspec", None)
    return None if call is None else instruction_set_in(call.params)


def third_of(nodeid: str) -> int:
    """The third that a test belongs to, 0 to 2: by its name, so that a new test moves no other."""
    return zlib.crc32(nodeid.encode()) % 3


def is_slow(item: pytest.Item) -> bool:
    return item.get_closest_marker("slow") is not None


def mark(items: list[pytest.Item]) -> None:
    """Give slow tests their marker, and begin with those that are long on their own."""
    from foundry_kernels.core import extension

    usable = extension.build_info().get("usable_instruction_sets", [])
    items.sort(key=lambda item: not is_slow(item))
    for item in items:
        call = getattr(item, "callspec", None)
        if call is not None and reason(call.params, usable) is not None:
            item.add_marker(pytest.mark.slow)
