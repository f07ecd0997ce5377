"""The extension's product of matrices (`csrc/cpu/matmul.cpp`), by the operator that makes nothing else of it: every
instruction set, layouts, sizes that fill no block, bfloat16 that is widened, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from foundry_kernels.core import extension
from foundry_kernels.ops import _products

SETS = extension.build_info().get("usable_instruction_sets", [])
EPS = torch.finfo(torch.float32).eps

pytestmark = pytest.mark.skipif(_products.matmul is None, reason=str(extension.MISSING))


def matmul(*args: Any) -> None:
    torch.ops.foundry_kernels.matmul_(*args)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def by_columns(x: Tensor) -> Tensor:
    return x.t().contiguous().t()


def bound(a: Tensor, b: Tensor) -> Tensor:
    """Of a float32 sum's error: what 16 roundings of a sum of absolute values make, and few sums come near it."""
    return 16 * EPS * (a.abs().double() @ b.abs().double())


#: Rows that one call takes in a few passes, whole tiles of them and more than one tile; and as much of the others.
SIZES = [(40, 128, 64), (70, 300, 130), (530, 17, 33), (64, 1, 70), (37, 200, 600)]
SMALL = [(1, 1, 1), (3, 5, 2), (3, 0, 20), (50, 0, 20)]


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("add", [False, True], ids=["set", "add"])
@pytest.mark.parametrize("size", SMALL + SIZES, ids=lambda size: "x".join(map(str, size)))
def test_products_of_every_layout(isa: str, add: bool, size: tuple[int, int, int], instruction_set: Any) -> None:
    instruction_set(isa)
    m, k, n = size
    a, b, before = draw(m, k), draw(k, n, seed=1), draw(m, n, seed=2)
    wanted = a.double() @ b.double() + (before.double() if add else 0.0)
    limit = bound(a, b) + EPS * before.abs() * add
    spread = draw(2 * m, 2 * k, seed=3)
    spread[::2, ::2] = a
    for left in (a, by_columns(a), spread[::2, ::2]):
        for right in (b, by_columns(b)):
            for out in (before.clone(), by_columns(before.clone())):
                matmul(out, left, right, add)
                assert ((out - wanted).abs() <= limit).all()


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("add", [False, True], ids=["set", "add"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_bfloat16_is_widened_and_rounded_once(
    isa: str, add: bool, size: tuple[int, int, int], instruction_set: Any
) -> None:
    """The bits are those of the product of the widened matrices."""
    instruction_set(isa)
    m, k, n = size
    a, b, before = draw(m, k).bfloat16(), draw(k, n, seed=1).bfloat16(), draw(m, n, seed=2)
    for left in (a, by_columns(a)):
        for right in (b, by_columns(b)):
            exact = torch.zeros(m, n)
            matmul(exact, left.float(), right.float(), True)
            for dtype in (torch.float32, torch.bfloat16):
                for layout in (torch.Tensor.contiguous, by_columns):
                    start = layout(before.to(dtype).clone())
                    out = start.clone() if add else torch.empty_like(start)
                    matmul(out, left, right, add)
                    # A float32 result is added to part by part, others to the whole sum.
                    wanted = exact + start.float() if add else exact
                    if add and dtype == torch.float32:
                        matmul(wanted.copy_(start), left.float(), right.float(), True)
                    assert torch.equal(out, wanted.to(dtype))


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("add", [False, True], ids=["set", "add"])
@pytest.mark.parametrize("rows", [0, 1, 9, 70])
def test_it_is_written_to_where_it_shall_be(rows: int, add: bool) -> None:
    """What is between the rows of the result stays."""
    a, b = draw(33, rows).t(), draw(70, 33, seed=1).t()
    out = torch.full((rows, 75), 7.0)
    matmul(out[:, 2:72], a, b, add)
    torch.testing.assert_close(out[:, 2:72], a @ b + 7.0 * add)
    assert (out[:, :2] == 7).all()
    assert (out[:, 72:] == 7).all()


@pytest.mark.parametrize("layout", [torch.Tensor.contiguous, by_columns], ids=["rows", "columns"])
def test_a_number_has_the_same_bits_whatever_else_is_computed(layout: Callable[[Tensor], Tensor]) -> None:
    """Other rows, other columns, and any number of threads: tiles differ, the order of sums does not."""
    a, b = layout(draw(600, 333)), layout(draw(333, 710, seed=1))
    whole = torch.zeros(600, 710)
    matmul(whole, a, b, True)
    before = torch.get_num_threads()
    try:
        for threads in (1, 3, 7):
            torch.set_num_threads(threads)
            again, part = torch.zeros(600, 710), torch.zeros(45, 100)
            matmul(again, a, b, True)
            assert torch.equal(again, whole)
            matmul(part, a[501:546], b[:, 600:700], True)
            assert torch.equal(part, whole[501:546, 600:700])
    finally:
        torch.set_num_threads(before)


def test_what_is_not_a_number_stays_in_its_row_and_column() -> None:
    a, b = draw(100, 40), draw(40, 90, seed=1)
    a[17, 3], b[5, 80] = float("nan"), float("inf")
    out = torch.empty(100, 90)
    matmul(out, a, b, False)
    finite = torch.ones(100, 90, dtype=torch.bool)
    finite[17], finite[:, 80] = False, False
    assert torch.equal(out.isfinite(), finite)
    assert out[17].isnan().all()


def test_what_does_not_fit_is_refused() -> None:
    for out, a, b in (((2, 4), (2, 5), (5, 3)), ((2, 3), (2, 5), (4, 3)), ((1, 3), (2, 5), (5, 3))):
        with pytest.raises(ValueError, match=r"out must be \[M, N\], a \[M, K\] and b \[K, N\]"):
            matmul(torch.empty(out), torch.ones(a), torch.ones(b), False)
    with pytest.raises(ValueError, match="out must have dense rows or columns"):
        matmul(torch.empty(4, 6)[::2, ::2], torch.ones(2, 5), torch.ones(5, 3), False)
    for left, right in ((torch.float32, torch.bfloat16), (torch.float16, torch.float16)):
        with pytest.raises(TypeError, match="a and b must both be float32 or bfloat16"):
            matmul(torch.empty(2, 3), torch.ones(2, 5, dtype=left), torch.ones(5, 3, dtype=right), False)
    with pytest.raises(TypeError, match="out must be float32, or of the dtype of a and b"):
        matmul(torch.empty(2, 3).bfloat16(), torch.ones(2, 5), torch.ones(5, 3), False)
