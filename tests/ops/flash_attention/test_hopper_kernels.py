"""Attention's kernels for compute capability 9.0, run on the CPU under the checker: who takes which call, and what the
parity table does not have. That table runs its cases on them too."""

from __future__ import annotations

import pytest
import torch
from cuda_on_cpu.build import LIBRARY, load_operators
from slow import rest_slow
from table import HOPPER, Row, hopper_passes, pretended_hopper, taken_by_hopper

import foundry_kernels as fk
from foundry_kernels.core.registry import OpSpec
from foundry_kernels.ops.flash_attention import FLASH_ATTENTION, FLASH_ATTENTION_VARLEN
from foundry_kernels.ops.flash_attention.case_makers import ALL_OPTIONS, dense_case, packed_case
from foundry_kernels.testing import Case, Result, assert_parity, call, make_cotangents, normal, run
from foundry_kernels.tools.check import numel

BF16 = torch.bfloat16


def op_of(case: Case) -> OpSpec:
    return FLASH_ATTENTION_VARLEN if "cu_seqlens_q" in case.args else FLASH_ATTENTION


def on_other_kernels(op: OpSpec) -> Row:
    return Row(op, "native", "cpu", cuda_on_cpu=True)


def checked(case: Case, dtype: torch.dtype = BF16) -> tuple[int, int]:
    """Parity of a case; how many passes forward and backward these kernels made."""
    op, before = op_of(case), hopper_passes()
    with on_other_kernels(op).active(), pretended_hopper():
        assert_parity(op, case, backend="native", dtype=dtype, device="cpu")
    after = hopper_passes()
    return after[0] - before[0], after[1] - before[1]


@pytest.mark.parametrize("op", HOPPER, ids=lambda op: op.name)
def test_what_python_leaves_to_others_these_kernels_refuse(op: OpSpec) -> None:
    """Of the cases in 16 bits; that they take the others is what each row of the parity table asserts."""
    load_operators()
    left = [c for c in op.cases.CASES[op.name] if c.id not in taken_by_hopper(op)]
    left = [c for c in left if op.cases.why_not(c, "native", "cuda") is None and numel(c) < 20_000]
    assert len(left) >= 10
    before = hopper_passes()
    with on_other_kernels(op).active(), pretended_hopper(), fk.batch_invariant(), torch.no_grad():
        for case in left:
            call(op, case.make(BF16, "cpu"), case.options, backend="native")
            assert hopper_passes() == before, case.id


#: Few queries go to others. So do statistics forward, and backward calls that do not need all gradients.
SHARED = (
    (dense_case(1, (2, 1), (63, 150), 64, "few-queries", causal=True, return_lse=True), (0, 0)),
    (dense_case(1, (2, 1), (70, 150), 64, "more", causal=True, return_lse=True), (0, 1)),
    (dense_case(1, (2, 1), (100, 150), 64, "queries", causal=True, return_lse=True), (1, 1)),
    (dense_case(1, (2, 1), (140, 150), 64, "statistics", causal=True, sinks=normal(), return_stats=True), (0, 1)),
    (dense_case(1, (2, 1), (128, 70), 64, "frozen-keys", frozen="kv", sinks=normal(), return_lse=True), (1, 0)),
    (packed_case((60, 0, 28), (30, 5, 44), (2, 1), 64, "short", causal=True, return_lse=True), (0, 0)),
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


IN_ORDER = (
    dense_case(1, (4, 2), (520, 520), 64, "pairs", causal=True, return_lse=True),
    packed_case((140, 0, 300), (130, 5, 290), (4, 2), 128, "packed", causal=True, return_lse=True),
    dense_case(2, (2, 1), (270, 400), 128, "tiles"),
    dense_case(1, (2, 1), (290, 290), 256, "wide", causal=True),
    dense_case(1, (2, 2), (300, 300), 96, "window", causal=True, window=(140, None), sinks=normal()),
)


def in_several_orders(case: Case) -> list[Result]:
    """Its results; blocks and warps run in another order each time, and copies arrive at other times."""
    op, library = op_of(case), load_operators()
    args = case.make(BF16, "cpu")
    before = hopper_passes()
    results: list[Result] = []
    try:
        with on_other_kernels(op).active(), pretended_hopper():
            cotangents = make_cotangents(call(op, args, case.options, backend="native"), case.cotangent)
            for seed in (1, 2, 3, 4):
                library.cuda_on_cpu_schedule(seed, 4)
                results.append(run(op, args, case.options, cotangents, backend="native"))
    finally:
        library.cuda_on_cpu_schedule(1, 4)
    assert tuple(b - a for a, b in zip(before, hopper_passes(), strict=True)) == (5, 4)
    return results


@pytest.mark.parametrize("case", rest_slow(IN_ORDER), ids=lambda case: case.id)
def test_the_bits_do_not_depend_on_who_comes_first(case: Case) -> None:
    first, *others = in_several_orders(case)
    for other in others:
        assert all(map(torch.equal, other.outputs, first.outputs))
        assert all(torch.equal(other.grads[name], grad) for name, grad in first.grads.items())


@pytest.mark.slow
def test_in_any_order_only_dq_depends_on_it() -> None:
    case = IN_ORDER[0]
    first, *others = in_several_orders(
        Case(case.id, case.args, case.options | {"deterministic": False}, case.cotangent)
    )
    assert not all(torch.equal(other.grads["q"], first.grads["q"]) for other in others)
    for other in others:
        assert all(torch.equal(other.grads[name], first.grads[name]) for name in ("k", "v"))


def test_a_refused_tensor_map_names_the_tensor() -> None:
    q, k, v = (torch.randn(1, 2, n, 64, dtype=BF16).requires_grad_() for n in (130, 140, 140))
    library = getattr(torch.ops, LIBRARY)
    with on_other_kernels(FLASH_ATTENTION).active(), pretended_hopper():
        out = fk.flash_attention(q, k, v, backend="native")
        expected = r"the driver rejected the tensor map of k of shape \[1, 2, 140, 64\] and strides \[17920, 8960, 64"
        library.refuse_map_of(k.detach())
        try:
            with pytest.raises(RuntimeError, match="attention forward: " + expected):
                fk.flash_attention(q, k, v, backend="native")
            with pytest.raises(RuntimeError, match="attention backward: " + expected):
                out.sum().backward()
        finally:
            library.refuse_map_of(torch.empty(0))
