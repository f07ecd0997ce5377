"""The machine code of the kernels that take rows (norms, activations of x + bias), by nvcc: what results do not show,
and an H100 would in time. Limits are those of its 132 multiprocessors at 3 TB/s: what has to be under way, and issued.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

import nvcc
import pytest

from foundry_kernels.tools.inspect.sass import loaded_ahead

needs_nvcc = pytest.mark.skipif(nvcc.nvcc() is None, reason="nvcc is neither in CUDA_HOME/bin nor on the PATH")
FOLDER = nvcc.ROOT / "csrc" / "cuda"
TYPES = ("bfloat16", "__half")

#: Threads of a row and 16-byte reads of each that registers hold, as in rms_norm_rows.cuh.
FORWARD_SHAPES = ((8, 4), (32, 4), (64, 4), (128, 4), (256, 4), (512, 4))
BACKWARD_SHAPES = ((8, 4), (32, 4), (128, 2), (256, 2), (512, 2))
REGISTERS = 65536  # of a multiprocessor
#: Bytes of reads under way that a multiprocessor needs: of the 22.7 a nanosecond that are its part of 3 TB/s half are
#: read forward and two thirds backward, each a microsecond after it was asked for, and blocks that add up or write ask
#: for nothing.
ENOUGH_FORWARD, ENOUGH_BACKWARD = 40 * 1024, 24 * 1024


@dataclass(frozen=True)
class Code:
    registers: int
    text: str

    def resident_bytes(self, threads: int, each: int) -> int:
        """Bytes under way if each thread that a multiprocessor holds has so many."""
        allocated = -(-self.registers // 8) * 8
        return REGISTERS // (allocated * threads) * threads * each

    def operations(self) -> list[str]:
        """Instructions in the order of the code, by name alone."""
        found = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", self.text)
        return [name for name in found if name != "NOP"]


@functools.cache
def kernels(source: str) -> dict[str, Code]:
    path = FOLDER / f"{source}.cu"
    registers = {k.name: k.registers for k in nvcc.compile_kernels(path, "90a")}
    return {name: Code(registers[name], text) for name, text in nvcc.machine_code(path, "90a").items()}


def norm(direction: str, dtype: str, threads: int, cached: int, centered: bool) -> Code:
    name = f"{direction}_kernel<{dtype}, {dtype}, {dtype}, 8, {threads}, {cached}, {str(centered).lower()}, false>"
    return kernels("rms_norm")[name]


def activation(direction: str, dtype: str, kind: int) -> Code:
    return kernels("bias_gelu")[f"{direction}_kernel<{dtype}, {dtype}, {kind}, 8, false>"]


@needs_nvcc
@pytest.mark.parametrize("centered", [False, True], ids=["rms_norm", "layer_norm"])
@pytest.mark.parametrize("dtype", TYPES)
def test_norms_have_a_row_under_way_before_they_use_any(dtype: str, centered: bool) -> None:
    for threads, cached in FORWARD_SHAPES:
        code = norm("forward", dtype, threads, cached, centered)
        assert loaded_ahead(code.text) >= 16 * cached, threads
        assert code.resident_bytes(max(threads, 128), 16 * cached) >= ENOUGH_FORWARD, threads
    for threads, cached in BACKWARD_SHAPES:
        code = norm("backward", dtype, threads, cached, centered)
        assert loaded_ahead(code.text) >= 2 * 16 * cached, threads
        assert code.resident_bytes(max(threads, 128), 2 * 16 * cached) >= ENOUGH_BACKWARD, threads


@needs_nvcc
@pytest.mark.parametrize(("direction", "centered", "barriers"), [
    ("forward", False, 1), ("forward", True, 2), ("backward", False, 1), ("backward", True, 1),
])  # fmt: skip
def test_norms_meet_once_a_sum(direction: str, centered: bool, barriers: int) -> None:
    """LayerNorm's variance is about the mean, which comes first; what is summed at the same time shares a barrier."""
    cached = 4 if direction == "forward" else 2
    code = norm(direction, "bfloat16", 256, cached, centered).operations()
    assert sum(name.startswith("BAR.SYNC") for name in code) == barriers


@needs_nvcc
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("kind", "limit"), [(1, 19), (2, 14)], ids=["gelu", "gelu_tanh"])
def test_activations_are_issued_faster_than_memory_moves(dtype: str, kind: int, limit: int) -> None:
    """Instructions of one element between the stores of two rows. Forward 38 take as long as its four bytes."""
    code = activation("forward", dtype, kind)
    operations = code.operations()
    stores = [at for at, name in enumerate(operations) if name.startswith("STG")]
    assert [operations[at] for at in stores] == ["STG.E.128"] * 4
    assert (stores[3] - stores[2]) / 8 <= limit
    assert loaded_ahead(code.text) >= 4 * 16
    assert code.resident_bytes(128, 4 * 16) >= ENOUGH_FORWARD


@needs_nvcc
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", [1, 2], ids=["gelu", "gelu_tanh"])
def test_gradients_of_activations_have_their_next_rows_under_way(dtype: str, kind: int) -> None:
    code = activation("backward", dtype, kind)
    assert {name for name in code.operations() if name.startswith("STG")} == {"STG.E.128"}
    assert code.resident_bytes(128, 4 * 16) >= ENOUGH_BACKWARD
