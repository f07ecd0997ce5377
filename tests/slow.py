"""Which tests `make test` leaves to `make test-slow`: the further points of long sweeps, chosen by what they are about.

Every operation, backend, dtype and kind of test stays in `make test`. A test of its own that is long says so with
`@pytest.mark.slow`.
"""

from __future__ import annotations

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
#: one code path serves all dtypes: in float32 the cases are tried one and all, in the others those that are small.
#: Tests that try several cases at once do so in these dtypes.
EMULATED_DTYPES = (torch.float32, torch.bfloat16)
FEW_ELEMENTS = 2_000


def reason(parameters: dict[str, Any], instruction_sets: list[str]) -> str | None:
    """Why a test with these parameters is slow, or None."""
    from table import Row

    from foundry_kernels.check import numel

    if (arch := parameters.get("arch")) is not None and arch not in ARCHITECTURES:
        return f"architecture {arch}"
    row, case, dtype = (parameters.get(name) for name in ("row", "case", "dtype"))
    interpreted = isinstance(row, Row) and row.backend == "triton" and row.device == "cpu"
    emulated = interpreted or (isinstance(row, Row) and row.cuda_on_cpu)
    if emulated and parameters.get("part") == "others":
        return "all but the small cases, emulated"
    if isinstance(row, Row) and case is not None and numel(case) > MOST_ELEMENTS:
        return f"more than {MOST_ELEMENTS} elements"
    if interpreted and case is not None and numel(case) > MOST_INTERPRETED:
        return f"interpreted, more than {MOST_INTERPRETED} elements"
    if emulated and dtype is not None:
        several = case is None
        if dtype not in EMULATED_DTYPES if several else dtype != torch.float32 and numel(case) > FEW_ELEMENTS:
            return f"emulated in {dtype}"
    name = parameters.get("name", parameters.get("instruction_set"))
    if name in instruction_sets and name not in {instruction_sets[0], "avx2", instruction_sets[-1]}:
        return f"instruction set {name}"
    return None


def mark(items: list[pytest.Item]) -> None:
    """Give slow tests their marker, and begin with those that are long on their own."""
    from foundry_kernels import _native

    usable = _native.build_info().get("usable_instruction_sets", [])
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    for item in items:
        call = getattr(item, "callspec", None)
        if call is not None and reason(call.params, usable) is not None:
            item.add_marker(pytest.mark.slow)
