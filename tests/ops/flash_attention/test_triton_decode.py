"""Decoding in one launch: the counters of the programs that are done, of which the last adds the splits of its head."""

from __future__ import annotations

import os
import re
from types import SimpleNamespace

import fresh
import pytest
import torch
from slow import ahead_of_time
from torch import Tensor

from foundry_kernels import _triton, flash_attention, flash_attention_varlen

if not _triton.INTERPRET:
    pytest.skip("needs Triton's interpreter", allow_module_level=True)

from foundry_kernels.ops.flash_attention.triton import decode_launch


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def counters(monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """What all launches of a test have in common, as those of a stream do."""
    kept = torch.zeros(64, dtype=torch.int32)
    monkeypatch.setattr(decode_launch, "arrivals", lambda n, device: kept)
    return kept


def test_a_launch_leaves_the_counters_as_it_found_them(counters: Tensor) -> None:
    """So the next one finds zeros, whatever its batch, its heads and its number of splits are; an empty sequence and
    one that has fewer splits than others count to their own."""
    q, k, v = draw(2, 4, 1, 16), draw(2, 2, 300, 16, seed=1), draw(2, 2, 300, 16, seed=2)
    first = flash_attention(q, k, v, backend="triton")
    assert not counters.any()
    torch.testing.assert_close(first, flash_attention(q, k, v, backend="reference"))

    ends = torch.tensor([0, 300, 300, 370, 500], dtype=torch.int32)
    packed_q, packed_k, packed_v = draw(4, 4, 16), draw(500, 2, 16, seed=3), draw(500, 2, 16, seed=4)
    packed = (packed_q, packed_k, packed_v, torch.arange(5, dtype=torch.int32), ends, 1, 300)
    found = flash_attention_varlen(*packed, backend="triton")
    assert not counters.any()
    torch.testing.assert_close(found, flash_attention_varlen(*packed, backend="reference"))

    assert torch.equal(flash_attention(q, k, v, backend="triton"), first)


def test_splits_that_are_not_there_yet_are_not_added(counters: Tensor) -> None:
    """A program that is not the last writes no result: here each head still waits for one more."""
    q, k, v = draw(1, 4, 1, 16), draw(1, 2, 300, 16, seed=1), draw(1, 2, 300, 16, seed=2)
    counters.fill_(-1)
    torch.use_deterministic_algorithms(True)  # fresh memory is NaN
    try:
        out = flash_attention(q, k, v, backend="triton")
    finally:
        torch.use_deterministic_algorithms(False)
    assert out.isnan().all()
    assert counters[:2].tolist() == [4, 4], "of the 5 splits"


def test_counters_of_streams_and_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """One tensor for each stream, whose launches follow one another; a graph that is captured has its own each time."""
    state = SimpleNamespace(stream=1, capturing=False)
    cuda = SimpleNamespace(
        is_current_stream_capturing=lambda: state.capturing,
        current_stream=lambda device: SimpleNamespace(cuda_stream=state.stream),
    )
    zeros = lambda n, dtype, device: torch.zeros(n, dtype=dtype)  # noqa: E731
    monkeypatch.setattr(decode_launch, "torch", SimpleNamespace(cuda=cuda, zeros=zeros, int32=torch.int32))
    monkeypatch.setattr(decode_launch, "_arrived", {})
    device = torch.device("cuda", 0)
    kept = decode_launch.arrivals(8, device)
    assert decode_launch.arrivals(512, device) is kept
    assert decode_launch.arrivals(8, torch.device("cuda", 1)) is not kept
    more = decode_launch.arrivals(5000, device)
    assert more.shape[0] >= 5000
    assert decode_launch.arrivals(8, device) is more
    state.stream = 2
    assert decode_launch.arrivals(8, device) is not more
    state.capturing = True
    captured = [decode_launch.arrivals(8, device) for _ in range(2)]
    assert len({id(x) for x in (*captured, *decode_launch._arrived.values())}) == 5


@ahead_of_time
def test_sums_are_written_before_a_program_counts_itself() -> None:
    """In the code for a GPU, which the interpreter says nothing about: after the last store of sums a barrier of the
    program, then an atomic addition that releases what all its threads wrote and acquires what others did."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = ["-m", "foundry_kernels", "inspect", "flash_attention", "--arch", "90", "--timed"]
    chosen = ["--kernel", "decode", "--case", "x1.2048x128-few-queries bf", "--brief", "--ptx"]
    done = fresh.python(*command, *chosen, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    kernels = done.stdout.split("flash_attention_decode_kernel 1x8.2x1")[1:]
    assert kernels
    for kernel in kernels:
        found = re.findall(r"st\.global|bar\.sync|atom\.\S+|ld\.global|cp\.async\.cg", kernel)
        at = next(i for i, word in enumerate(found) if word.startswith("atom"))
        assert found[at].startswith("atom.global.gpu.acq_rel.add")
        assert found[at - 2 : at] == ["st.global", "bar.sync"]
        after = found[at + 1 :]
        assert after.index("bar.sync") < after.index("ld.global")
