"""Matrix instructions and asynchronous copies under the checker: PTX's layouts, mistakes, bank conflicts."""

from __future__ import annotations

import ctypes
import functools
import re
import subprocess
from pathlib import Path

import nvcc
import pytest
import torch
from cuda_on_cpu.build import HERE, load_plain, shared_memory_traffic
from torch import Tensor

SOURCE = HERE / "matrix_samples.cu"
TYPES = {"bf16": torch.bfloat16, "f16": torch.float16}

pytestmark = pytest.mark.usefixtures("guarded_memory")


@functools.cache
def samples() -> ctypes.CDLL:
    library = load_plain(SOURCE, SOURCE.read_text())
    library.run_sample.restype = ctypes.c_char_p
    return library


def run(name: str, a: Tensor, b: Tensor, out: Tensor) -> str:
    pointers = [ctypes.c_void_p(x.data_ptr()) for x in (a, b, out)]
    return samples().run_sample(name.encode(), *pointers).decode()


def run_right(name: str, a: Tensor, b: Tensor, out: Tensor) -> None:
    assert run(name, a, b, out) == ""


# --- layouts: (row, column) of element e of register i in lane `lane` ---


def place_a(lane: int, i: int, e: int) -> tuple[int, int]:
    g, t = lane // 4, lane % 4
    return [(g, 2 * t + e), (g + 8, 2 * t + e), (g, 2 * t + 8 + e), (g + 8, 2 * t + 8 + e)][i]


def place_b(lane: int, i: int, e: int) -> tuple[int, int]:
    g, t = lane // 4, lane % 4
    return [(2 * t + e, g), (2 * t + 8 + e, g)][i]


def place_c(lane: int, i: int) -> tuple[int, int]:
    g, t = lane // 4, lane % 4
    return [(g, 2 * t), (g, 2 * t + 1), (g + 8, 2 * t), (g + 8, 2 * t + 1)][i]


def run_fragments(name: str, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a b + c by one mma, its fragments made and read by the layouts above."""
    left, right, sums = torch.empty(32, 4, 2, dtype=a.dtype), torch.empty(32, 2, 2, dtype=a.dtype), torch.empty(32, 4)
    for lane in range(32):
        for e in range(2):
            for i in range(4):
                left[lane, i, e] = a[place_a(lane, i, e)]
            for i in range(2):
                right[lane, i, e] = b[place_b(lane, i, e)]
        for i in range(4):
            sums[lane, i] = c[place_c(lane, i)]
    run_right(f"fragments_{name}", left, right, sums)
    result = torch.full((16, 8), torch.nan)
    for lane in range(32):
        for i in range(4):
            result[place_c(lane, i)] = sums[lane, i]
    return result


@pytest.mark.parametrize("name", TYPES)
def test_mma_multiplies(name: str) -> None:
    g = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-9, 10, shape, generator=g).to(TYPES[name]) for shape in ((16, 16), (16, 8)))
    c = torch.randint(-99, 100, (16, 8), generator=g).float()
    assert torch.equal(run_fragments(name, a, b, c).double(), a.double() @ b.double() + c)


@pytest.mark.parametrize("name", TYPES)
def test_mma_multiplies_each_element_where_it_belongs(name: str) -> None:
    """Each column k of a and row k of b alone: no two places can be mixed up."""
    row, col = torch.arange(16.0)[:, None], torch.arange(8.0)[None]
    for k in range(16):
        a, b = torch.zeros(16, 16, dtype=TYPES[name]), torch.zeros(16, 8, dtype=TYPES[name])
        a[:, k], b[k] = (row[:, 0] + 1).to(a.dtype), (16 * col[0] + k).to(b.dtype)
        assert torch.equal(run_fragments(name, a, b, torch.zeros(16, 8)), (row + 1) * (16 * col + k))


@pytest.mark.parametrize("name", TYPES)
def test_nan_and_infinity_travel_as_in_a_product(name: str) -> None:
    a, b = torch.ones(16, 16, dtype=TYPES[name]), torch.ones(16, 8, dtype=TYPES[name])
    a[3, 5], a[4, 0], b[7, 2], b[0, 6] = torch.nan, torch.inf, -torch.inf, 0
    c = torch.zeros(16, 8)
    c[15, 7], c[14, 7] = torch.inf, torch.nan
    expected = a.double() @ b.double() + c
    assert expected.isnan().any()
    assert expected.isinf().any()
    found = run_fragments(name, a, b, c).double()
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_mma_rounds_once() -> None:
    """What is too little for a float's last place, and enough in sum, is not lost on the way."""
    a, b = torch.full((16, 16), 2.0**-6).bfloat16(), torch.full((16, 8), 2.0**-6).bfloat16()
    c = torch.full((16, 8), 2.0**13)
    assert torch.equal(run_fragments("bf16", a, b, c), c + 2.0**-8)


@pytest.mark.parametrize("trans", [False, True])
def test_ldmatrix_distributes(trans: bool) -> None:
    m = torch.arange(4 * 8 * 8, dtype=torch.int16).view(4, 8, 8)
    out = torch.empty(32, 4, 2, dtype=torch.int16)
    run_right("matrices_trans" if trans else "matrices", m, m, out)
    for lane in range(32):
        g, t = lane // 4, lane % 4
        for i in range(4):
            for e in range(2):
                row, col = (2 * t + e, g) if trans else (g, 2 * t + e)
                assert out[lane, i, e] == m[i, row, col]


@pytest.mark.parametrize("name", TYPES)
def test_a_product_from_memory_to_memory(name: str) -> None:
    """Copies, both forms of ldmatrix, mma, and the product as pairs through shared memory."""
    g = torch.Generator().manual_seed(1)
    a, b = (torch.randint(-3, 4, shape, generator=g).to(TYPES[name]) for shape in ((16, 16), (16, 8)))
    out = torch.full((16, 8), torch.nan)
    run_right(f"product_{name}", a, b, out)
    assert torch.equal(out.double(), a.double() @ b.double())


@pytest.mark.parametrize("name", TYPES)
def test_pairs_are_rounded_to_nearest_even(name: str) -> None:
    x = torch.randn(64, generator=torch.Generator().manual_seed(2))
    ulp = torch.finfo(TYPES[name]).eps
    special = [torch.nan, torch.inf, -torch.inf, 1e30, 0.0, -0.0, 1 + ulp / 2, 1 + 1.5 * ulp, 1 + 0.51 * ulp, -3.0]
    x[: len(special)] = torch.tensor(special)
    out = torch.empty(128)
    run_right(f"pairs_{name}", x, x, out)
    expected = x.to(TYPES[name])
    bits, values = out[:32].view(TYPES[name]), out[32:96]
    for found in (bits.float(), values):
        assert torch.equal(found.nan_to_num(7.0), expected.float().nan_to_num(7.0))
        assert torch.equal(found.isnan(), x.isnan())
    torch.testing.assert_close(out[96:], torch.exp2(x[::2]), equal_nan=True, rtol=1e-6, atol=0)


# --- mistakes ---

CHUNKS = torch.arange(127 * 4, dtype=torch.int32)  # of two tiles, without the last chunk

REPORTED = {
    "narrow_warp": "mma in a warp of fewer than 32 threads",
    "no_wait": "shared memory is read while cp.async fills it: thread 0 has not waited for the copy, line",
    "short_wait": "shared memory is read while cp.async fills it: thread 0 has not waited for the copy, line",
    "no_commit": "shared memory is read while cp.async fills it: thread 0 has not committed the copy, line",
    "no_barrier": "race: shared memory is read without a barrier after thread 0 wrote it, line",
    "overwritten": "race: shared memory is written without a barrier after thread 1 read it, line",
    "stored_in_flight": "shared memory is written while cp.async fills it: thread 0 has not committed the copy, line",
    "copied_twice": "shared memory is written while cp.async fills it: thread 0 has not committed the copy, line",
    "divergent": "ldmatrix at line .* never completes: not all that it waits for arrive, .* thread 32",
    "two_places": "ldmatrix at line .* never completes",
    "gone": "ldmatrix names lane 5, which has left",
    "misaligned": "shared address 8 is not a multiple of 16, line .* thread 0",
    "misaligned_load": "shared address 4 is not a multiple of 16, line .* thread 0",
    "misaligned_source": "misaligned access of 16 bytes, line",
    "outside": "shared memory index 64 is outside of 0..63, line .* thread 63",
    "outside_load": "shared memory index 64 is outside of 0..63, line .* thread 0",
    "source_outside": "access outside of an allocation at .*, line .* thread 63",
    "never_waited": "the kernel ends before its cp.async copies were waited for, line .* thread 0",
    "words_missing": "shared memory is read before it is written, line .* thread 31",
    "words_misplaced": "shared address 2 is not a multiple of 4, line",
    "words_unordered": "race: shared memory is read without a barrier|read before it is written",
    "words_same": "race: shared memory is written without a barrier after thread 0 wrote it, line .* thread 1",
    "words_back_too_soon": "race: shared memory is written without a barrier after thread 0 read it, line .* thread 1",
}


@pytest.mark.parametrize("name", REPORTED)
def test_mistakes_are_reported(name: str) -> None:
    a = CHUNKS.clone()  # where memory ends where the tensor does
    report = run(name, a, a, torch.empty(128))
    assert re.search(REPORTED[name], report), report


def test_the_same_without_the_mistakes() -> None:
    a, out = CHUNKS.clone(), torch.empty(128)
    run_right("pipeline", a, a, out)
    run_right("words", a, a, out)
    row, register = torch.arange(32)[:, None] // 4, torch.arange(4)
    word = (8 * register + row) * 4 + torch.arange(32)[:, None] % 4  # in order of its address
    assert torch.equal(out.view(32, 4), word.float())


def test_a_report_names_the_line_of_the_call() -> None:
    report = run("words_misplaced", CHUNKS, CHUNKS, torch.empty(128))
    assert f"line {line_of('store_pair(shared, to, uint32_t(')}, block (0,0,0) thread 0" in report


# --- bank conflicts ---


def line_of(text: str) -> int:
    (number,) = [n for n, line in enumerate(SOURCE.read_text().splitlines(), 1) if text in line]
    return number


#: Accesses of that line, and conflicts of each where rows of 128 bytes are not swizzled.
COUNTED = {
    "// copies down a column": (8, 7),
    "// loads a column": (4, 7),
    "// loads it transposed": (4, 7),
    "// stores accumulators": (1, 7),
    "// copies along rows": (4, 0),
    "// loads one row for all": (4, 0),
}


@pytest.mark.parametrize("swizzled", [False, True])
def test_bank_conflicts_are_counted(swizzled: bool) -> None:
    samples().cuda_on_cpu_forget_traffic()
    a = CHUNKS.clone()
    run_right("banks_swizzled" if swizzled else "banks_plain", a, a, torch.empty(128))
    found = shared_memory_traffic(samples())
    expected = {
        (SOURCE.name, line_of(text)): (accesses, 0 if swizzled else accesses * conflicts)
        for text, (accesses, conflicts) in COUNTED.items()
    }
    assert found == expected


def test_counts_add_up() -> None:
    a = CHUNKS.clone()
    samples().cuda_on_cpu_forget_traffic()
    for _ in range(3):
        run_right("banks_plain", a, a, torch.empty(128))
    assert shared_memory_traffic(samples())[SOURCE.name, line_of("// loads a column")] == (12, 84)


# --- the instructions themselves ---


@pytest.mark.skipif(nvcc.nvcc() is None, reason="nvcc is neither in CUDA_HOME/bin nor on the PATH")
def test_the_samples_compile_for_a_gpu(tmp_path: Path) -> None:
    program = nvcc.nvcc()
    assert program is not None
    target = tmp_path / "samples.ptx"
    command = [program, "-std=c++17", "-O3", "-gencode", "arch=compute_80,code=sm_80", "-cubin"]
    subprocess.run([*command, "-o", str(tmp_path / "samples.cubin"), str(SOURCE)], check=True)
    command = [program, "-std=c++17", "-O3", "-arch=compute_80", "-ptx"]
    subprocess.run([*command, "-o", str(target), str(SOURCE)], check=True)
    text = target.read_text()
    for instruction in (
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32",
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16",
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16",
        "st.shared.b32",
        "cp.async.cg.shared.global",
        "cp.async.commit_group",
        "cp.async.wait_group 1",
        "cvt.rn.bf16x2.f32",
        "cvt.rn.f16x2.f32",
        "ex2.approx.ftz.f32",
    ):
        assert instruction in text, instruction
