"""Attention's kernels for compute capability 9.0, run on the CPU under the checker: who takes which call, and what the
parity table does not have. That table runs its cases on them too."""

from __future__ import annotations

import pytest
import torch
from cuda_on_cpu.build import LIBRARY, load_operators
from table import HOPPER, Row, hopper_passes, on_hopper, taken_by_hopper

import foundry_kernels as fk
from foundry_kernels.core.registry import OpSpec
from foundry_kernels.ops.flash_attention import FLASH_ATTENTION, FLASH_ATTENTION_VARLEN
from foundry_kernels.ops.flash_attention.case_makers import ALL_OPTIONS, dense_case, packed_case
from foundry_kernels.testing import Case, assert_parity, call, normal
from foundry_kernels.tools.check import numel

BF16 = torch.bfloat16
ROWS = [pytest.param(Row(op, "native", "cpu", cuda_on_cpu=True, hopper=True), id=op.name) for op in HOPPER]


def op_of(case: Case) -> OpSpec:
    return FLASH_ATTENTION_VARLEN if "cu_seqlens_q" in case.args else FLASH_ATTENTION


def on_other_kernels(op: OpSpec) -> Row:
    return Row(op, "native", "cpu", cuda_on_cpu=True)


def checked(case: Case, dtype: torch.dtype = BF16) -> tuple[int, int]:
    """Parity of a case; how many passes forward and backward these kernels made."""
    op, before = op_of(case), hopper_passes()
    with on_other_kernels(op).active():
        getattr(torch.ops, LIBRARY).pretend_hopper(True)
        try:
            assert_parity(op, case, backend="native", dtype=dtype, device="cpu")
        finally:
            getattr(torch.ops, LIBRARY).pretend_hopper(False)
    after = hopper_passes()
    return after[0] - before[0], after[1] - before[1]


@pytest.mark.parametrize("op", HOPPER, ids=lambda op: op.name)
def test_what_python_leaves_to_others_these_kernels_refuse(op: OpSpec) -> None:
    """Of the cases in 16 bits; that they take the others is what each row of the parity table asserts."""
    load_operators()
    left = [c for c in op.cases.CASES[op.name] if c.id not in taken_by_hopper(op)]
    left = [c for c in left if op.cases.why_not(c, "native", "cuda") is None and numel(c) < 20_000]
    assert len(left) >= 20
    library = getattr(torch.ops, LIBRARY)
    before = hopper_passes()
    with on_other_kernels(op).active(), fk.batch_invariant(), torch.no_grad():
        library.pretend_hopper(True)
        try:
            for case in left:
                call(op, case.make(BF16, "cpu"), case.options, backend="native")
                assert hopper_passes() == before, case.id
        finally:
            library.pretend_hopper(False)


#: Forward by others, as there are few queries; without a gradient for keys backward by others.
SHARED = (
    (dense_case(1, (2, 1), (127, 150), 64, "few-queries", causal=True, return_lse=True), (0, 1)),
    (dense_case(1, (2, 1), (128, 150), 64, "queries", causal=True, return_lse=True), (1, 1)),
    (dense_case(1, (2, 1), (128, 70), 64, "frozen-keys", frozen="kv", sinks=normal(), return_lse=True), (1, 0)),
    (packed_case((100, 0, 28), (30, 5, 44), (2, 1), 64, "short", causal=True, return_lse=True), (0, 1)),
    (packed_case((130, 0, 28), (130, 5, 44), (2, 1), 64, "long", causal=True, return_lse=True), (1, 1)),
)


@pytest.mark.parametrize(("case", "passes"), [pytest.param(*each, id=each[0].id) for each in SHARED])
def test_passes_of_different_kernels_go_together(case: Case, passes: tuple[int, int]) -> None:
    """lse is what one pass tells the other."""
    assert checked(case) == passes


ANY_ORDER = (
    dense_case(1, (4, 2), (140, 290), 64, "full", return_lse=True),
    dense_case(2, (2, 2), (265, 297), 128, "causal", causal=True, layout="swapped"),
    dense_case(1, (2, 1), (150, 140), 256, "wide", causal=True),
    dense_case(1, (2, 1), (197, 140), 40, "rows-without-keys", causal=True, window=(9, 9), sinks=normal()),
    dense_case(1, (3, 1), (165, 150), 96, "all", alibi_slopes=(3,), sinks=normal(), **ALL_OPTIONS),
    packed_case((140, 0, 166), (130, 5, 144), (4, 2), 128, "full", return_lse=True),
)


@pytest.mark.parametrize("case", ANY_ORDER, ids=lambda case: case.id)
def test_gradients_in_any_order(case: Case) -> None:
    free = Case(case.id, case.args, case.options | {"deterministic": False}, case.cotangent)
    assert checked(free) == (1, 1)


def test_a_refused_tensor_map_names_the_tensor() -> None:
    q, k = (torch.randn(1, 2, n, 64, dtype=BF16).requires_grad_() for n in (130, 140))
    library = getattr(torch.ops, LIBRARY)
    with on_other_kernels(FLASH_ATTENTION).active(), on_hopper():
        out = fk.flash_attention(q, k, k.detach().clone(), backend="native")
        expected = r"the driver refuses a tensor map of k of shape \[1, 2, 140, 64\] and strides \[17920, 8960, 64, 1\]"
        library.refuse_map_of(k.detach())
        try:
            with pytest.raises(RuntimeError, match="attention forward: " + expected):
                fk.flash_attention(q, k, k.detach().clone(), backend="native")
            with pytest.raises(RuntimeError, match="attention backward: " + expected):
                out.sum().backward()
        finally:
            library.refuse_map_of(torch.empty(0))
