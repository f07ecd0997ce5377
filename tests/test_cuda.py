"""What only a GPU can show: CUDA graphs, more than 2^31 elements, other streams and devices."""

from __future__ import annotations

import pytest
import torch
from table import Row, over_rows, rows

import foundry_kernels as fk
from foundry_kernels.testing import call, make_cotangents

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
on_cuda = pytest.mark.parametrize("row", [pytest.param(r, id=r.id) for r in rows() if r.device == "cuda"])


@on_cuda
def test_cuda_graph(row: Row) -> None:
    """Forward and backward captured once and replayed on other values."""
    case = row.small_cases[0]
    args = case.make(torch.bfloat16, "cuda")
    wanted = [t for t in args.values() if t is not None and t.requires_grad]
    cotangents = make_cotangents(call(row.op, args, case.options, backend=row.backend), "contiguous")

    def step() -> tuple[torch.Tensor, ...]:
        outputs = call(row.op, args, case.options, backend=row.backend)
        return (*outputs, *torch.autograd.grad(outputs, wanted, cotangents))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for t in wanted:
            t.copy_(torch.randn_like(t))
    graph.replay()
    for a, e in zip(captured, step(), strict=True):
        assert torch.equal(a, e)


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


@over_rows("triton", "native")
def test_the_current_stream_is_used(row: Row) -> None:
    if row.device != "cuda":
        pytest.skip("a CPU has no streams")
    case = row.small_cases[0]
    args = case.make(torch.float32, "cuda")
    expected = call(row.op, args, case.options, backend=row.backend)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        actual = call(row.op, args, case.options, backend=row.backend)
        done = side.record_event()
    assert not done.query(), "the kernel did not wait for the stream it belongs to"
    side.synchronize()
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a, e)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@on_cuda
def test_tensors_on_another_device_than_the_current_one(row: Row) -> None:
    """Forward and backward, bit for bit what they are where that device is the current one."""
    case = row.small_cases[0]

    def results(current: int) -> tuple[torch.Tensor, ...]:
        with torch.cuda.device(current):
            args = case.make(torch.float32, "cuda:1")
            wanted = [t for t in args.values() if t is not None and t.requires_grad]
            outputs = call(row.op, args, case.options, backend=row.backend)
            cotangents = make_cotangents(outputs, "contiguous")
            found = (*outputs, *torch.autograd.grad(outputs, wanted, cotangents))
            assert torch.cuda.current_device() == current
        torch.cuda.synchronize(1)
        return found

    for actual, expected in zip(results(current=0), results(current=1), strict=True):
        assert actual.device == torch.device("cuda:1")
        assert torch.equal(actual, expected)
