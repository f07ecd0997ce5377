"""deterministic=False: one kernel for all gradients, which adds q's in memory, in any order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import product

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import foundry_kernels as fk
from foundry_kernels import _triton
from foundry_kernels.core.registry import OpSpec
from foundry_kernels.ops.flash_attention import FLASH_ATTENTION, FLASH_ATTENTION_VARLEN
from foundry_kernels.ops.flash_attention.case_makers import ALL_OPTIONS, dense_case, packed_case
from foundry_kernels.ops.flash_attention.fuzz import random_case
from foundry_kernels.testing import Case, assert_parity, normal

DEVICE = "cpu" if _triton.INTERPRET else "cuda"
needs_triton = pytest.mark.skipif(
    FLASH_ATTENTION.why_not("triton", DEVICE) is not None, reason=str(FLASH_ATTENTION.why_not("triton", DEVICE))
)

#: More queries than a tile has, and last tiles of queries and of keys that are not full.
DENSE = (
    dense_case(1, (4, 2), (70, 45), 64, "full", return_lse=True),
    dense_case(2, (2, 2), (65, 97), 40, "causal", causal=True, layout="swapped"),
    dense_case(
        1, (2, 1), (97, 40), 32, "rows-without-keys", causal=True, window=(9, 9), sinks=normal(), return_lse=True
    ),
    dense_case(1, (4, 1), (70, 70), 32, "window", window=(20, 3), align="top_left", head_dim_v=72),
    dense_case(1, (2, 1), (70, 70), 32, "window-left", window=(20, None)),
    dense_case(1, (2, 1), (65, 45), 32, "softcap", softcap=2.0, q_values=normal(30.0)),
    dense_case(1, (3, 1), (65, 50), 59, "all", alibi_slopes=(3,), sinks=normal(), **ALL_OPTIONS),
    # Of what is no key the score would be 0, next to which the probabilities of these are infinite.
    dense_case(1, (2, 1), (65, 45), 32, "low", q_values=normal(0.1, 10.0), k_values=normal(0.1, -10.0)),
)
PACKED = (
    packed_case((40, 0, 66), (30, 5, 44), (4, 2), 32, "full", return_lse=True),
    packed_case((5, 70, 33), (33, 70, 5), (2, 1), 40, "all", alibi_slopes=(3, 2), sinks=normal(), **ALL_OPTIONS),
)


@contextmanager
def programs_shuffled(seed: int) -> Iterator[None]:
    """Runs the interpreter's programs, which come one after another, in another order."""
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE == "cpu":
            from triton.runtime.interpreter import interpreter_builder as builder

            own = builder.set_grid_idx

            @cache
            def order(programs: int) -> list[int]:
                return torch.randperm(programs, generator=torch.Generator().manual_seed(seed)).tolist()

            def set_grid_idx(x: int, y: int, z: int) -> None:
                own(order(builder.grid_dim[0])[x], y, z)

            patch.setattr(builder, "set_grid_idx", set_grid_idx)
        yield


def any_order(case: Case) -> Case:
    return Case(case.id, case.args, case.options | {"deterministic": False}, case.cotangent)


@needs_triton
@pytest.mark.parametrize("case", [*DENSE, *PACKED], ids=lambda case: case.id)
@pytest.mark.usefixtures("poisoned")
def test_parity(case: Case) -> None:
    op = FLASH_ATTENTION_VARLEN if case in PACKED else FLASH_ATTENTION
    assert_parity(op, any_order(case), backend="triton", dtype=torch.float32, device=DEVICE)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.usefixtures("poisoned")
def test_sums_are_wide_and_rounded_once(dtype: torch.dtype) -> None:
    if dtype == torch.float64 and DEVICE == "cuda":
        pytest.skip("a GPU takes no float64 here")
    assert_parity(FLASH_ATTENTION, any_order(DENSE[1]), backend="triton", dtype=dtype, device=DEVICE)


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("op", [FLASH_ATTENTION, FLASH_ATTENTION_VARLEN], ids=lambda op: op.name)
@pytest.mark.usefixtures("poisoned")
def test_random_cases(op: OpSpec) -> None:
    @settings(
        max_examples=30, derandomize=True, deadline=None, print_blob=True, suppress_health_check=list(HealthCheck)
    )
    @given(random_case(op.name), st.sampled_from([torch.float32, torch.bfloat16]), st.integers(0, 9999))
    def attempt(case: Case, dtype: torch.dtype, seed: int) -> None:
        with programs_shuffled(seed):
            assert_parity(op, any_order(case), backend="triton", dtype=dtype, device=DEVICE, of_its_output=True)

    attempt()


@needs_triton
@pytest.mark.skipif(DEVICE == "cuda", reason="the order of programs is chosen in the interpreter alone")
def test_programs_in_any_order() -> None:
    """What has a sum of its own has the same bits; q's gradient, to which all add, others, which are as good."""
    q, k, v = (torch.randn(1, h, 100, 16).requires_grad_() for h in (4, 2, 2))
    grads: dict[bool, list[tuple[torch.Tensor, ...]]] = {True: [], False: []}
    for deterministic, seed in product(grads, range(3)):
        with programs_shuffled(seed):
            out = fk.flash_attention(q, k, v, causal=True, deterministic=deterministic, backend="triton")
            grads[deterministic].append(torch.autograd.grad(out, (q, k, v), torch.ones_like(out)))
    first = grads[True][0]
    assert all(torch.equal(a, b) for run in grads[True] for a, b in zip(run, first, strict=True))
    assert all(torch.equal(a, b) for run in grads[False] for a, b in zip(run[1:], first[1:], strict=True))
    assert not all(torch.equal(run[0], grads[False][0][0]) for run in grads[False])
    for run in grads[False]:
        torch.testing.assert_close(run[0], first[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["reference", "native"])
def test_other_backends_are_deterministic_in_any_case(backend: str) -> None:
    if FLASH_ATTENTION.why_not(backend, "cpu") is not None:
        pytest.skip(str(FLASH_ATTENTION.why_not(backend, "cpu")))
    q, k, v = (torch.randn(2, h, 70, 16).requires_grad_() for h in (4, 2, 2))
    results = []
    for deterministic in (True, False):
        out = fk.flash_attention(q, k, v, causal=True, deterministic=deterministic, backend=backend)
        results.append((out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))))
    assert all(map(torch.equal, *results))
