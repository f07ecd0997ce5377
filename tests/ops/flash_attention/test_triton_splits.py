"""Groups of heads that are split over programs in the backward pass, because dK and dV would have too few."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from slow import rest_slow

from foundry_kernels import _triton
from foundry_kernels._triton.launch import Plan
from foundry_kernels._triton.plans import forget_plans
from foundry_kernels.ops.flash_attention import FLASH_ATTENTION, FLASH_ATTENTION_VARLEN, flash_attention
from foundry_kernels.ops.flash_attention.case_makers import ALL_OPTIONS, dense_case, packed_case
from foundry_kernels.testing import Case, assert_parity, normal

DEVICE = "cpu" if _triton.INTERPRET else "cuda"
pytestmark = pytest.mark.skipif(
    FLASH_ATTENTION.why_not("triton", DEVICE) is not None, reason=str(FLASH_ATTENTION.why_not("triton", DEVICE))
)

DENSE = (
    dense_case(2, (3, 1), (70, 45), 59, "all", alibi_slopes=(2, 3), sinks=normal(), head_dim_v=72, **ALL_OPTIONS),
    dense_case(1, (8, 2), (50, 33), 32, "rows-without-keys", causal=True, return_lse=True, layout="swapped"),
    dense_case(1, (4, 2), (40, 70), 32, "no-dv", causal=True, align="top_left", frozen="v"),
    dense_case(1, (4, 1), (33, 65), 64, "window", window=(20, 3)),
)
PACKED = (
    packed_case((5, 0, 70, 3), (33, 4, 70, 0), (6, 2), 40, "all", alibi_slopes=(4, 6), sinks=normal(), **ALL_OPTIONS),
    packed_case((40, 33), (66, 5), (4, 2), 32, "slack", causal=True, slack=40),
)


@pytest.fixture
def splits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Each head of a group is a share of its own; the shares of which sums were made."""
    from foundry_kernels.ops.flash_attention.triton import backward_launch

    seen: list[int] = []
    launch = backward_launch.launch

    def noted(kernel: object, plan: Plan, *tensors: object) -> None:
        if kernel is backward_launch.flash_attention_sum_splits_kernel:
            seen.append(plan.numbers[1])
        launch(kernel, plan, *tensors)

    forget_plans()
    monkeypatch.setattr(backward_launch, "head_splits", lambda programs, group, *_: group)
    monkeypatch.setattr(backward_launch, "launch", noted)
    yield seen
    forget_plans()


@pytest.mark.parametrize("case", [*rest_slow(DENSE), *rest_slow(PACKED)], ids=lambda case: case.id)
@pytest.mark.usefixtures("poisoned")
def test_parity(case: Case, splits: list[int]) -> None:
    op, heads = (FLASH_ATTENTION_VARLEN, 1) if case in PACKED else (FLASH_ATTENTION, 1)
    assert_parity(op, case, backend="triton", dtype=torch.float32, device=DEVICE)
    q, k, v = (case.args[name] for name in "qkv")
    assert q is not None
    assert k is not None
    assert v is not None
    assert splits == [q.shape[heads] // k.shape[heads]] * (2 if v.grad else 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.usefixtures("poisoned", "splits")
def test_sums_are_wide_and_rounded_once(dtype: torch.dtype) -> None:
    if dtype == torch.float64 and DEVICE == "cuda":
        pytest.skip("a GPU takes no float64 here")
    assert_parity(FLASH_ATTENTION, DENSE[2], backend="triton", dtype=dtype, device=DEVICE)


def test_is_bitwise_deterministic(splits: list[int]) -> None:
    q, k, v = (torch.randn(1, h, 40, 16, device=DEVICE).requires_grad_() for h in (4, 1, 1))
    out = flash_attention(q, k, v, causal=True, backend="triton")
    runs = [torch.autograd.grad(out, (k, v), torch.ones_like(out), retain_graph=True) for _ in range(3)]
    assert splits == [4] * 6
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ((128, 4, 2048, True, 132), 2),  # B=1 H=32 Hk=8 T=2048, 128 keys a tile, causal: the first tiles end last
        ((128, 4, 2048, False, 132), 1),
        ((256, 4, 4096, True, 132), 1),
        ((1024, 4, 2048, True, 132), 1),
        ((4, 8, 512, True, 132), 8),  # B=1 Hk=1 T=512
        ((8, 7, 1024, True, 132), 7),
        ((66, 4, 4096, False, 132), 2),
        ((100, 4, 4096, False, 132), 1),  # two rounds of halves take as long
        ((16, 4, 32, True, 132), 1),  # hardly any work
        ((1, 1, 4096, True, 132), 1),
        ((0, 4, 0, True, 132), 1),
    ],
)
def test_what_is_split(call: tuple[int, int, int, bool, int], expected: int) -> None:
    from foundry_kernels.ops.flash_attention.triton import backward_launch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backward_launch, "_ROWS_OF_A_SPLIT", 300)
        assert backward_launch.head_splits(*call) == expected
