"""The policy itself: it passes what a kernel may do and fails what it may not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import foundry_kernels as fk
from foundry_kernels.testing import compare, lay_out, make_cotangents, run
from foundry_kernels.testing.policy import detached, to_float64
from foundry_kernels.tools.check import small_cases


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_correct_rounding_passes(dtype: torch.dtype) -> None:
    oracle = torch.randn(1000, dtype=torch.float64)
    compare("x", oracle.to(dtype), oracle.to(dtype), oracle, 1.0)


def _one_ulp_up(x: Tensor) -> Tensor:
    return x + x.abs() * torch.finfo(x.dtype).eps


BROKEN: dict[str, Callable[[Tensor], Tensor]] = {
    "every value an ulp off": _one_ulp_up,
    "truncated": lambda x: x - x.abs() * torch.finfo(x.dtype).eps / 2,
    "one value wrong": lambda x: torch.cat([x[:1] + 0.1, x[1:]]),
    "one value missing": lambda x: torch.cat([x[:1] * torch.nan, x[1:]]),
    "two values exchanged": lambda x: torch.cat([x[:2].flip(0), x[2:]]),
    "scaled": lambda x: x * 1.01,
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("how", BROKEN)
def test_worse_than_the_reference_fails(dtype: torch.dtype, how: str) -> None:
    oracle = torch.randn(4000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.5
    reference = oracle.to(dtype)
    with pytest.raises(AssertionError):
        compare("x", BROKEN[how](reference), reference, oracle, 1.0)


def test_a_second_oracle_is_held_to_the_same_policy() -> None:
    """What differs from the oracle by more than is allowed passes where it is the second oracle, as exact as ever."""
    oracle = torch.randn(4000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    reference, second = oracle.bfloat16(), oracle + 0.1
    for actual in (reference, second.bfloat16()):
        compare("x", actual, reference, oracle, 1.0, of_its_output=second)
    for wrong in (_one_ulp_up(reference), _one_ulp_up(second.bfloat16()), (oracle + 0.05).bfloat16()):
        with pytest.raises(AssertionError, match="exceeds"):
            compare("x", wrong, reference, oracle, 1.0, of_its_output=second)


def test_infinities_must_agree() -> None:
    oracle = torch.tensor([1.0, -torch.inf], dtype=torch.float64)
    compare("lse", oracle.float(), oracle.float(), oracle, 1.0)
    with pytest.raises(AssertionError, match="differs where infinite"):
        compare("lse", torch.tensor([1.0, -1e30]), oracle.float(), oracle, 1.0)


def test_wrong_dtype_and_shape_fail() -> None:
    x = torch.ones(3)
    with pytest.raises(AssertionError, match="dtype"):
        compare("x", x.half(), x, x.double(), 1.0)
    with pytest.raises(AssertionError, match="shape"):
        compare("x", x[:2], x, x.double(), 1.0)


@pytest.mark.parametrize("layout", ["contiguous", "swapped", "sliced", "offset", "strided"])
def test_layouts_keep_the_values(layout: str) -> None:
    x = torch.randn(2, 3, 4, 5)
    assert torch.equal(lay_out(x, layout), x)
    assert lay_out(x, layout).is_contiguous() == (layout in ("contiguous", "offset"))


@pytest.mark.parametrize("name", fk.OPS)
def test_sizes_are_computed_where_the_arguments_are(name: str) -> None:
    """On a GPU, too: a tensor that is made without naming a device is on another one here, and does not mix."""
    op = fk.OPS[name]
    for case in small_cases(op.cases.CASES[name]):
        args = case.make(torch.float32)
        outputs = run(op, args, case.options, backend="reference").outputs
        cotangents = tuple(c.double() for c in make_cotangents(outputs, case.cotangent))
        args64 = to_float64(args)
        with torch.device("meta"):
            op.cases.scales(detached(args64), case.options, cotangents)
