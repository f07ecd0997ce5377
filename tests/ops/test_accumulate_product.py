"""Sums of products of bfloat16 on the CPU: in float32, and in 24 bits; and which products oneDNN has."""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from built import needs_native
from table import cpu_setting
from torch import Tensor

from foundry_kernels.core import extension
from foundry_kernels.ops._linear_loss import chunks

each_instruction_set = pytest.mark.parametrize("isa", extension.build_info().get("usable_instruction_sets", []))


@contextmanager
def onednn(enabled: bool) -> Iterator[None]:
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(enabled)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def test_without_onednn_no_products_of_16_bits_are_fast() -> None:
    if extension.MISSING is not None:
        pytest.skip(extension.MISSING)
    with onednn(False):
        assert not {"bfloat16", "float16"} & set(extension.build_info()["fast_products"])


@needs_native
@pytest.mark.skipif(not platform.machine().startswith("x86"), reason="MKL is for x86-64")
def test_products_of_float32_are_half_as_fast_as_they_could_be_where_mkl_leaves_avx512_unused() -> None:
    """A fact about a processor and a library, looked up; what follows from it is tested everywhere."""
    about = Path("/proc/cpuinfo").read_text()
    zen5 = "AuthenticAMD" in about and int(re.findall(r"cpu family\s*: (\d+)", about)[0]) >= 26
    by_avx2 = torch.backends.mkl.is_available() and zen5
    for name in extension.build_info()["usable_instruction_sets"]:
        with cpu_setting(name, 1):
            fast = "float32" in extension.build_info()["fast_products"]
        assert fast == (not by_avx2 or not name.startswith(("avx512", "amx")))


def test_fast_products_are_those_that_onednn_is_held_to(request: pytest.FixtureRequest) -> None:
    """`make test-isa`: the processor has more."""
    held_to = request.config.getoption("--held-to")
    if held_to is None:
        pytest.skip("oneDNN is held to no instruction set")
    assert chunks.fast_products(torch.bfloat16) == (held_to in ("avx512_bf16", "amx_bf16"))
    assert not chunks.fast_products(torch.float16)


def accumulate_product() -> Any:
    if chunks.accumulate_product is None:
        pytest.skip("the C++ extension is not built")
    return chunks.accumulate_product


@pytest.mark.parametrize("enabled", [True, False], ids=["onednn", "widened"])
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize(
    ("depth", "n_rows", "width"), [(1, 1, 1), (2, 64, 32), (7, 65, 33), (33, 130, 48), (100, 200, 17), (3, 5000, 2)]
)
def test_products_of_bfloat16_are_summed_in_float32(
    depth: int, n_rows: int, width: int, transposed: bool, enabled: bool
) -> None:
    """The products are oneDNN's where it has them, and else in float32: what it can do is asked at each call."""
    operator = accumulate_product()
    generator = torch.Generator().manual_seed(0)
    total = torch.randn(n_rows, width, generator=generator)
    b = torch.randn(depth, width, generator=generator).bfloat16()
    if transposed:
        a = torch.randn(depth, n_rows + 3, generator=generator).bfloat16()[:, :n_rows].t()
    else:
        a = torch.randn(n_rows, depth + 3, generator=generator).bfloat16()[:, :depth]  # rows that are not dense
    expected = total.double() + a.double() @ b.double()

    def add(into: Tensor) -> Tensor:
        for begin in range(0, depth, 8):
            operator(into, a[:, begin : begin + 8], b[begin : begin + 8])
        return into

    with onednn(enabled):
        found = add(total.clone())
        fast = "bfloat16" in extension.build_info()["fast_products"]
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-6 * float(expected.abs().max()) * depth**0.5)
    if not fast:
        return  # bits of PyTorch's products may depend on the number of threads
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert torch.equal(found, add(total.clone()))
    finally:
        torch.set_num_threads(threads)


def test_a_sum_of_products_refuses_what_does_not_fit() -> None:
    operator = accumulate_product()
    total, a, b = torch.zeros(4, 2), torch.zeros(4, 3).bfloat16(), torch.zeros(3, 2).bfloat16()
    operator(total, a[:, :0], b[:0])
    with pytest.raises(ValueError, match=r"sum must be \[M, N\]"):
        operator(total, b, a)
    with pytest.raises(TypeError, match="a and b bfloat16"):
        operator(total, a.float(), b)
    with pytest.raises(ValueError, match="sum must be contiguous"):
        operator(torch.zeros(2, 4).t(), a, b)


@each_instruction_set
@pytest.mark.parametrize(
    ("enabled", "dtype"),
    [(True, torch.bfloat16), (False, torch.bfloat16), (True, torch.float32)],
    ids=["onednn", "widened", "float32"],
)
@pytest.mark.parametrize(
    ("depth", "n_rows", "width"),
    [(1, 1, 1), (2, 64, 32), (7, 65, 33), (33, 130, 48), (100, 200, 17), (70, 66, 1030), (3, 5000, 2)],
)
def test_products_of_bfloat16_are_summed_in_24_bits(
    depth: int, n_rows: int, width: int, enabled: bool, dtype: torch.dtype, isa: str,
    instruction_set: Callable[[str], None], threads: None,
) -> None:  # fmt: skip
    """Within a rounding to bfloat16 and one to 24 bits a part, whatever the memory held; by any number of threads."""
    instruction_set(isa)
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(depth, n_rows + 3, generator=generator).to(dtype)[:, :n_rows]
    b = torch.randn(depth, width, generator=generator).to(dtype)
    starts = range(0, depth, 8)

    def summed() -> Tensor:
        high = torch.full((n_rows, width), torch.nan, dtype=torch.bfloat16)
        low = torch.full((n_rows, width), 255, dtype=torch.uint8)
        for at in starts:
            part = slice(at, at + 8)
            chunks.accumulate_product24(high, low, a[part], b[part], at == 0, at == starts[-1])
        return high

    with onednn(enabled):
        found = summed()
        torch.set_num_threads(1)
        same = torch.equal(found, summed())
    if "bfloat16" in extension.build_info()["fast_products"] and enabled and dtype == torch.bfloat16:
        assert same  # bits of PyTorch's products may depend on the threads
    exact, size = a.double().t() @ b.double(), a.double().abs().t() @ b.double().abs()
    error = (found.double() - exact).abs()
    assert bool((error <= 2.0**-8 * exact.abs() + (2.0**-16 * len(starts) + 2.0**-22) * size).all())


@each_instruction_set
def test_a_sum_in_24_bits_keeps_what_bfloat16_would_lose_and_what_is_not_finite(
    isa: str, instruction_set: Callable[[str], None]
) -> None:
    instruction_set(isa)
    high, low = torch.empty(3, 1, dtype=torch.bfloat16), torch.empty(3, 1, dtype=torch.uint8)
    one = torch.ones(1, 1, dtype=torch.bfloat16)
    for i in range(256):  # each addition alone is lost beside 256 in bfloat16
        a = torch.tensor([[256.0 if i == 0 else 1.0, torch.inf, torch.nan]], dtype=torch.bfloat16)
        chunks.accumulate_product24(high, low, a, one, i == 0, i == 255)
    assert high[0].item() == 256 + 255 + 1  # 511, rounded
    assert high[1].item() == torch.inf
    assert high[2].isnan()
    nan = torch.tensor([[0x7FFFFFFF, -1, 0x7F800001]], dtype=torch.int32).view(torch.float32)  # of any bits
    for last in (False, True):
        chunks.accumulate_product24(high, low, nan, one.float(), not last, last)
        assert high.isnan().all()
