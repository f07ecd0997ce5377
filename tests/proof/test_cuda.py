"""What only a GPU can show: CUDA graphs, more than 2^31 elements, other streams and devices."""

from __future__ import annotations

import pytest
import torch
from table import Row, rows

import foundry_kernels as fk
from foundry_kernels.core import extension
from foundry_kernels.tools import check

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
on_cuda = pytest.mark.parametrize("row", [pytest.param(r, id=r.id) for r in rows() if r.device == "cuda"])


@on_cuda
def test_cuda_graph(row: Row) -> None:
    check.cuda_graph(row.op, row.backend, row.small_cases[0])


@on_cuda
def test_the_current_stream_is_used(row: Row) -> None:
    check.side_stream(row.op, row.backend, row.small_cases[0])


@pytest.mark.skipif(not extension.HAS_HOPPER, reason="an extension without the kernels for compute capability 9.0")
def test_auto_gives_attention_on_hopper_to_its_kernels() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("not compute capability 9.0")
    count = torch.ops.foundry_kernels.flash_attention_hopper_passes
    q = torch.randn(2, 4, 300, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    before = count()
    fk.flash_attention(q, q, q, causal=True).sum().backward()
    assert tuple(n - m for n, m in zip(count(), before, strict=True)) == (1, 1)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@on_cuda
def test_tensors_on_another_device_than_the_current_one(row: Row) -> None:
    check.second_device(row.op, row.backend, row.small_cases[0])


@on_cuda
def test_more_than_2_to_the_31_elements(row: Row) -> None:
    if row.op.name != "rms_norm":
        pytest.skip("memory: one operation stands for the pattern")
    rows_, width = 2**19 + 3, 4096
    if torch.cuda.mem_get_info()[0] < 6 * rows_ * width * 2:
        pytest.skip("needs 26 GB of free memory")
    x = torch.zeros(rows_, width, dtype=torch.bfloat16, device="cuda")
    x[-2:] = torch.randn(2, width, device="cuda").bfloat16()
    x.requires_grad_()
    y = fk.rms_norm(x, backend=row.backend)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    tail = x[-2:].detach().clone().requires_grad_()
    expected = fk.rms_norm(tail, backend=row.backend)
    assert torch.equal(y[-2:], expected)
    assert torch.equal(dx[-2:], torch.autograd.grad(expected, tail, torch.ones_like(expected))[0])
