"""Random cases of the operations of this folder."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

from foundry_kernels.ops.gated_delta_rule.cases import Between, sequence_case, step_case
from foundry_kernels.testing import Case, Values, normal
from foundry_kernels.testing.fuzzing import laid_out, sizes

_DECAYS = st.sampled_from(
    [Between(-0.6, 0.0), Between(-1e-3, 0.0), Between(-0.3, 0.0, (-50.0, 0.0)), Between(-90.0, 0.0)]
)
_STEPS = st.sampled_from([Between(0.0, 1.0), Between(0.0, 2.0, (0.0, 1.0, 2.0)), Between(-0.2, 0.2)])


@st.composite
def random_case(draw: st.DrawFn, op: str) -> Case:
    hk = draw(st.integers(1, 3))
    heads = hk, hk * draw(st.sampled_from([1, 1, 2, 3]))
    wide = draw(st.integers(0, 5)) == 0
    dims = draw(sizes(256 if wide else 40, 1)), draw(sizes(300 if wide else 40, 1))
    batch = draw(st.integers(0, 3))
    g: Values | None = draw(st.none() | _DECAYS)
    beta: Values | None = draw(st.none() | _STEPS)
    l2norm = draw(st.booleans())
    options: dict[str, Any] = {"qk_l2norm": l2norm, "scale": draw(st.sampled_from([None, 0.3, 1.0]))}
    options["channels"] = draw(st.booleans())
    if g is not None and (gates := draw(st.sampled_from(["", "", "A", "Ab"]))):
        g, options["gates"] = normal(draw(st.sampled_from([1.0, 8.0]))), gates
    if op == "gated_linear_attention":
        beta = None
    elif beta is not None and draw(st.integers(0, 3)) == 0:
        beta, options["beta_limit"] = normal(2.0), draw(st.sampled_from([1.0, 2.0]))
    if op == "gated_delta_rule_step":
        case = step_case(batch, heads, dims, g=g, beta=beta, **options)
        return laid_out(draw, case, kept="state")
    tokens: int | tuple[int, ...] = draw(sizes(20 if wide else 70))
    if draw(st.integers(0, 2)) == 0:
        batch, tokens = 1, tuple(draw(st.lists(sizes(40), max_size=4)))
    case = sequence_case(
        batch,
        heads,
        tokens,
        dims,
        g=g,
        beta=beta,
        k=normal(draw(st.sampled_from([1.0, 30.0]))) if l2norm else None,
        state=draw(st.booleans()),
        wide_rows=draw(st.booleans()),
        index=draw(st.sampled_from([torch.int32, torch.int64])),
        chunk_size=draw(st.sampled_from([None, None, 16, 32, 128])),
        return_final_state=draw(st.booleans()),
        **options,
    )
    return laid_out(draw, case, kept="cu_seqlens")
