"""grouped_mm beyond parity: what groups may do to each other, and what waits for nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from built import needs_native
from table import Row, checked_rows
from table import rows as rows_of
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import foundry_kernels as fk
from foundry_kernels import _triton
from foundry_kernels.core import extension
from foundry_kernels.core.registry import short_dtype

#: On the CPU, where the ends are checked.
ROWS = [r for r in (*rows_of("reference"), *checked_rows()) if r.op.name == "grouped_mm" and r.device == "cpu"]
over_rows = pytest.mark.parametrize("row", [pytest.param(r, id=r.id) for r in ROWS])
#: What is multiplied by matrix instructions, and what is not.
over_widths = pytest.mark.parametrize(("k", "n", "dtype"), [(20, 17, torch.float32), (24, 16, torch.bfloat16)])


def draw(
    rows: int = 10, k: int = 4, n: int = 3, groups: int = 2, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    x, weight = torch.randn(rows, k, generator=g), torch.randn(groups, k, n, generator=g)
    return x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()


def ends(*numbers: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(numbers, dtype=dtype)


@over_rows
@over_widths
def test_nan_stays_in_its_group(row: Row, k: int, n: int, dtype: torch.dtype) -> None:
    """Also in the rows that a tile reads beyond the end of a group, and in those of none."""
    (x, weight), offs = draw(40, k, n, 4, dtype), ends(3, 20, 20, 33)
    with torch.no_grad():
        x[3:20], x[33:], weight[2] = torch.nan, torch.inf, torch.nan
    dy = torch.ones(40, n, dtype=dtype)
    dy[33:] = torch.nan
    y = fk.grouped_mm(x, weight, offs, backend=row.backend)
    dx, dweight = torch.autograd.grad(y, (x, weight), dy)
    assert y.isnan().any(1).nonzero().flatten().tolist() == list(range(3, 20))
    assert dx.isfinite().all()
    assert [d.isfinite().all().item() for d in dweight] == [True, False, True, True]
    assert not y[33:].any()
    assert not dx[33:].any()
    assert not dweight[2].any()


@pytest.mark.skipif(not hasattr(torch.nn.functional, "grouped_mm"), reason="torch has none yet")
def test_what_pytorch_computes() -> None:
    x, weight = (t.detach().bfloat16() for t in draw(24, 16, 8, 3))
    offs = ends(8, 8, 24)
    torch.testing.assert_close(fk.grouped_mm(x, weight, offs), torch.nn.functional.grouped_mm(x, weight, offs=offs))


@over_rows
def test_the_gradient_lies_in_memory_as_the_matrices_do(row: Row) -> None:
    """Those of kernels: what a layer keeps as [E, N, K] and gives transposed gets its gradient without a copy."""
    x, weight = draw()
    stored = weight.detach().transpose(1, 2).contiguous().requires_grad_()
    y = fk.grouped_mm(x, stored.transpose(1, 2), ends(4, 10), backend=row.backend)
    (dstored,) = torch.autograd.grad(y.sum(), stored)
    (dweight,) = torch.autograd.grad(fk.grouped_mm(x, weight, ends(4, 10), backend=row.backend).sum(), weight)
    torch.testing.assert_close(dstored, dweight.transpose(1, 2))
    assert row.backend == "reference" or dstored.is_contiguous()


@pytest.mark.skipif(_triton.MISSING is not None, reason="torch's counter of operations warns without Triton")
@pytest.mark.parametrize("backend", ["reference", pytest.param("native", marks=needs_native)])
@pytest.mark.parametrize("frozen", [False, True])
def test_its_operations_are_counted_as_those_of_a_linear_layer(backend: str, frozen: bool) -> None:
    """Forward two for each product, and as many for each gradient that is wanted."""
    x, weight = draw()
    x.requires_grad_()
    weight.requires_grad_(not frozen)
    with FlopCounterMode(display=False) as counter:
        fk.grouped_mm(x, weight, ends(4, 10), backend=backend).sum().backward()
    products = x.shape[0] * weight.shape[1] * weight.shape[2]
    assert counter.get_total_flops() == (4 if frozen else 6) * products


def test_a_graph_that_is_traced_has_the_loop_as_an_operator() -> None:
    x, weight = draw()
    torch.library.opcheck(torch.ops.foundry_kernels.reference_grouped_mm_fwd.default, (x, weight, ends(4, 9), False))
    tensors = torch.ones(10, 3), x.detach(), weight.detach(), ends(4, 9)
    for needed in ((True, True), (False, True)):
        backward = torch.ops.foundry_kernels.reference_grouped_mm_bwd.default
        torch.library.opcheck(backward, (*tensors, False, *needed), test_utils=("test_schema", "test_faketensor"))
    assert fk.grouped_mm(x.to("meta"), weight.to("meta"), ends(4, 9).to("meta")).shape == (10, 3)


@pytest.mark.parametrize("row", [pytest.param(r, id=r.id) for r in ROWS if r.cuda_on_cpu])
def test_the_native_operator(row: Row) -> None:
    """What the parity suite asks of the operators that run on this device, of the one that runs in the checker."""
    x, weight = draw(10, 8, 16)
    operator = fk.OPS["grouped_mm"].impl("native").fn
    for each in (weight, weight.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()):
        torch.library.opcheck(operator, (x, each, ends(4, 9), False))
    first, second = (torch.autograd.grad(operator(x, weight, ends(4, 9), False).sum(), (x, weight)) for _ in range(2))
    assert all(map(torch.equal, first, second))
    with pytest.raises(RuntimeError, match=r"grouped_mm has no second derivative.*create_graph=True"):
        torch.autograd.grad(operator(x, weight, ends(4, 9), False).sum(), x, create_graph=True)


def test_the_reference_has_second_derivatives_and_transforms() -> None:
    x, weight = (t.detach().double().requires_grad_() for t in draw())
    assert torch.autograd.gradgradcheck(lambda *t: fk.grouped_mm(*t, ends(4, 9)), (x, weight))
    batch = torch.stack([x.detach(), 2 * x.detach()])
    mapped = torch.func.vmap(lambda x: fk.grouped_mm(x, weight.detach(), ends(4, 9)))(batch)
    torch.testing.assert_close(mapped[1], 2 * mapped[0])


# --- on the CPU -------------------------------------------------------------------------------------------------------


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


@needs_native
@DTYPES
def test_few_rows_are_one_pass_over_their_matrices(dtype: torch.dtype) -> None:
    """By decode_linear's kernel, as batch-invariant ones of any number are: a group of 8 rows whose matrix lies as
    [N, K] has the same bits, others are PyTorch's products."""
    (x, weight), offs = draw(8 + 80 + 1, 200, 130, 3, dtype), ends(8, 88, 89)
    matrices = weight.detach().mT.contiguous().mT
    y, invariant = (
        fk.grouped_mm(x, matrices, offs, batch_invariant=on, backend="native").detach() for on in (False, True)
    )
    assert torch.equal(y[:8], invariant[:8])
    assert torch.equal(y[88:], invariant[88:])
    slow = short_dtype(dtype) not in extension.build_info()["fast_products"]
    assert slow or torch.equal(y[8:88], x.detach()[8:88] @ matrices[1])
    wide, matrix = x.detach()[8:88].double(), matrices[1].double()
    exact, terms = wide @ matrix, wide.abs() @ matrix.abs()  # what rounding errors are in proportion to
    for found in (y, invariant):
        bound = torch.finfo(dtype).eps * exact.abs() + 2e-6 * terms
        assert ((found[8:88].double() - exact).abs() <= bound).all()


@needs_native
@DTYPES
@pytest.mark.parametrize("widened", [False, True])
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.enable_grad])
@pytest.mark.usefixtures("threads")
def test_threads_that_share_groups_change_nothing(
    dtype: torch.dtype, widened: bool, mode: Any, bfloat16_choice: Callable[..., None]
) -> None:
    """Groups of up to 90 rows, of which each thread multiplies some alone, and one that all threads multiply."""
    if widened:
        bfloat16_choice(False, False, False)
    sizes = (40, 90, 33, 70, 1, 64, 0, 50, 600)
    offs = torch.tensor(sizes).cumsum(0).int()
    x, weight = draw(sum(sizes) + 3, 150, 333, len(sizes), dtype)

    def found(threads: int) -> list[Tensor]:
        torch.set_num_threads(threads)
        with mode():
            y = fk.grouped_mm(x, weight, offs, backend="native")
            return [y, *torch.autograd.grad(y, (x, weight), y.detach())] if y.requires_grad else [y]

    own = {torch.float32: "float32", torch.bfloat16: "bfloat16"}.get(dtype) in extension.build_info()["own_products"]
    for alone, *together in zip(*map(found, (1, 2, 5)), strict=True):
        scale = alone.detach().abs().max().item()
        for each in together:
            if own:
                assert torch.equal(each, alone)
            else:  # PyTorch's, whose bits may depend on the threads
                torch.testing.assert_close(each, alone, rtol=0, atol=2 * torch.finfo(dtype).eps * scale)


@needs_native
@pytest.mark.parametrize("transposed", [False, True])
def test_bfloat16_is_widened_where_its_instructions_are_slow(
    transposed: bool, bfloat16_choice: Callable[..., None]
) -> None:
    """Forward and backward, of groups that are one pass over their matrices and of others: one rounding each."""
    bfloat16_choice(False, False, False)
    assert "bfloat16" not in extension.build_info()["fast_products"]
    (x, weight), offs = draw(8 + 300 + 45, 200, 330, 3, torch.bfloat16), ends(8, 308, 353)
    if transposed:
        weight = weight.detach().mT.contiguous().mT.requires_grad_()
    y = fk.grouped_mm(x, weight, offs, backend="native")
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(5)).bfloat16()
    found = (y, *torch.autograd.grad(y, (x, weight), dy))
    wide_x, wide = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    exact = torch.cat([part @ wide[i] for i, part in enumerate(wide_x.split((8, 300, 45)))])
    wanted = (exact, *torch.autograd.grad(exact, (wide_x, wide), dy.double()))
    for got, true in zip(found, wanted, strict=True):
        torch.testing.assert_close(got.double(), true, rtol=torch.finfo(torch.bfloat16).eps / 1.9, atol=2e-4)


@needs_native
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_products_are_in_float32_where_those_of_16_bits_are_slow(dtype: torch.dtype) -> None:
    """Some columns at a time: as exact as one rounding."""
    (x, weight), offs = draw(45, 8, 4099, 2, dtype), ends(45, 45)
    with torch.backends.mkldnn.flags(enabled=False):
        y = fk.grouped_mm(x, weight, offs, backend="native")
        dx, dweight = torch.autograd.grad(y, (x, weight), y.detach())
    exact = x.detach().double() @ weight[0].detach().double()
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(y.detach().double(), exact, rtol=unit / 1.9, atol=1e-6)
    dy = y.detach().double()
    torch.testing.assert_close(dx.double(), dy @ weight[0].detach().double().T, rtol=unit / 1.9, atol=3e-4)
    torch.testing.assert_close(dweight[0].double(), x.detach().double().T @ dy, rtol=unit / 1.9, atol=1e-4)
    assert not dweight[1].any()


@pytest.mark.skipif(_triton.MISSING is not None, reason=str(_triton.MISSING))
def test_there_is_a_program_for_every_tile() -> None:
    """However rows are split among groups, those after the last one being one more; and none too many by much."""
    from foundry_kernels.ops.grouped_mm.triton import most_tiles

    for rows, groups, block in ((1, 1, 16), (16, 1, 16), (17, 3, 16), (64, 128, 16), (100, 7, 32), (5, 9, 64)):
        some = min(groups + 1, rows)
        worst = (rows - some) // block + some  # one row each, and the rest in one group
        assert worst <= most_tiles(rows, groups, block) <= -(-rows // block) + groups


@pytest.mark.parametrize("row", [pytest.param(r, id=r.id) for r in ROWS if r.backend != "reference"])
@over_widths
def test_malformed_ends_lead_nowhere_outside(
    row: Row, k: int, n: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ends are not checked on a GPU: the interpreter would crash and the checker report it if they led outside. On
    a CPU the kernels check them too: memory may have changed."""
    monkeypatch.setattr("foundry_kernels.ops.grouped_mm.reference.check_ends", lambda *_: None)
    x, weight = draw(20, k, n, 3, dtype)
    for numbers in ((30, 10, 2**31 - 1), (-5, -(2**31), 4), (20, 0, 20)):
        if row.backend == "native" and not row.cuda_on_cpu:
            with pytest.raises(ValueError, match=r"offs must never decrease and lie in 0 \.\. 20, the rows of x"):
                fk.grouped_mm(x, weight, ends(*numbers), backend="native")
            continue
        y = fk.grouped_mm(x, weight, ends(*numbers), backend=row.backend)
        assert y.shape == (20, n)
        torch.autograd.grad(y, (x, weight), torch.ones_like(y))
