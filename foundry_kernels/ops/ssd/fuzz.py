"""Random cases of the operations of this folder."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

from foundry_kernels.ops.gated_delta_rule.cases import Between
from foundry_kernels.ops.ssd.cases import RATES, sequence_case, step_case
from foundry_kernels.testing import Case, normal
from foundry_kernels.testing.fuzzing import laid_out, sizes

_RATES = st.sampled_from([RATES, Between(-1e-3, 0.0), Between(-60.0, 0.0)])
_SIZES = st.sampled_from([normal(1.0, -3.0), normal(2.0), Between(-10.0, 30.0)])
_LIMITS = st.sampled_from([(0.0, float("inf")), (0.01, 0.5), (0.0, 2.0)])


@st.composite
def random_case(draw: st.DrawFn, op: str) -> Case:
    groups = draw(st.integers(1, 3))
    heads = groups, groups * draw(st.sampled_from([1, 1, 2, 3]))
    wide = draw(st.integers(0, 5)) == 0
    dims = draw(sizes(300 if wide else 40, 1)), draw(sizes(256 if wide else 40, 1))
    batch = draw(st.integers(0, 3))
    options: dict[str, Any] = {
        "dt": draw(_SIZES),
        "D": draw(st.sampled_from([None, "H", "HP"])),
        "z": draw(st.booleans()),
        "bias": draw(st.booleans()),
        "wide_rows": draw(st.booleans()),
        "dt_limit": draw(_LIMITS),
        "dt_softplus": True,
    }
    if op == "ssd_step":
        return laid_out(draw, step_case(batch, heads, dims, **options), kept="state")
    tokens: int | tuple[int, ...] = draw(sizes(20 if wide else 70))
    if draw(st.integers(0, 2)) == 0:
        batch, tokens = 1, tuple(draw(st.lists(sizes(40), max_size=4)))
    case = sequence_case(
        batch,
        heads,
        tokens,
        dims,
        A=draw(_RATES),
        state=draw(st.booleans()),
        index=draw(st.sampled_from([torch.int32, torch.int64])),
        chunk_size=draw(st.sampled_from([None, None, 16, 32, 128])),
        return_final_states=draw(st.booleans()),
        **options,
    )
    return laid_out(draw, case, kept="cu_seqlens")
