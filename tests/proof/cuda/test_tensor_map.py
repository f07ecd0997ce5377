"""What csrc/cuda/hopper/tensor_map.cu asks of the driver: compiled with the toolkit's own headers, on a runtime and a
driver of the test's, since there is no GPU."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

import cuda_build
import nvcc
import pytest

pytestmark = pytest.mark.skipif(nvcc.nvcc() is None, reason="nvcc is neither in CUDA_HOME/bin nor on the PATH")

DRIVER = """
#include "tensor_map.cu"
#include <cstring>

struct Asked {
  unsigned long long sizes[4], strides[3];
  unsigned box[4], steps[4], type, rank, interleave, swizzle, promotion, fill, version;
  const void* data;
};
static Asked asked;
static int lookups = 0;
static bool known = true;
static CUresult answer = CUDA_SUCCESS;

static CUresult CUDAAPI encode(CUtensorMap*, CUtensorMapDataType type, cuuint32_t rank, void* data,
                               const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                               const cuuint32_t* steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                               CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  std::memcpy(asked.sizes, sizes, sizeof asked.sizes);
  std::memcpy(asked.strides, strides, sizeof asked.strides);
  std::memcpy(asked.box, box, sizeof asked.box);
  std::memcpy(asked.steps, steps, sizeof asked.steps);
  asked.type = type, asked.rank = rank, asked.data = data;
  asked.interleave = interleave, asked.swizzle = swizzle, asked.promotion = promotion, asked.fill = fill;
  return answer;
}

extern "C" cudaError_t CUDARTAPI cudaGetDriverEntryPointByVersion(const char* name, void** address, unsigned version,
                                                                  unsigned long long,
                                                                  cudaDriverEntryPointQueryResult* result) {
  ++lookups;
  asked.version = version;
  const bool found = known && !std::strcmp(name, "cuTensorMapEncodeTiled");
  *address = found ? reinterpret_cast<void*>(&encode) : nullptr;
  *result = found ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

extern "C" {
Asked* last() { return &asked; }
int count_lookups() { return lookups; }
void set(bool is_known, int result) { known = is_known, answer = static_cast<CUresult>(result); }
int encode_map(const void* data, bool half, const long long* sizes, const long long* strides, int rows) {
  using namespace foundry;
  CUtensorMap map;
  return cuda::hopper::encode_map(map, {data, half ? Dtype::f16 : Dtype::bf16, sizes[0], sizes[1], sizes[2], sizes[3],
                                        {strides[0], strides[1], strides[2]}, rows});
}
}
"""


class Asked(ctypes.Structure):
    _fields_ = (
        ("sizes", ctypes.c_ulonglong * 4), ("strides", ctypes.c_ulonglong * 3), ("box", ctypes.c_uint * 4),
        ("steps", ctypes.c_uint * 4), ("type", ctypes.c_uint), ("rank", ctypes.c_uint), ("interleave", ctypes.c_uint),
        ("swizzle", ctypes.c_uint), ("promotion", ctypes.c_uint), ("fill", ctypes.c_uint), ("version", ctypes.c_uint),
        ("data", ctypes.c_void_p),
    )  # fmt: skip


@pytest.fixture
def library(tmp_path: Path) -> ctypes.CDLL:
    """A new one each time, which has asked for no function yet."""
    program = nvcc.nvcc()
    assert program is not None
    said = subprocess.run([program, "--dryrun", "-c", "-x", "cu", os.devnull], capture_output=True, text=True).stderr
    include = cuda_build.toolkit(said) / "include"
    target = tmp_path / "tensor_map.so"
    compiler = os.environ.get("CXX", "c++").split()
    folders = [f"-I{include}", f"-I{nvcc.ROOT / 'csrc' / 'cuda' / 'hopper'}"]
    command = [*compiler, "-std=c++17", "-shared", "-fPIC", *folders, "-x", "c++", "-", "-o", str(target)]
    done = subprocess.run(command, input=DRIVER, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded = ctypes.CDLL(str(target))
    loaded.last.restype = ctypes.POINTER(Asked)
    return loaded


def encode(
    library: ctypes.CDLL, sizes: tuple[int, ...], strides: tuple[int, ...], rows: int = 128, half: bool = False
) -> int:
    """sizes: batches, heads, tokens and columns; strides: those of a batch, a head and a token, in elements."""
    given = (ctypes.c_longlong * 4)(*sizes), (ctypes.c_longlong * 3)(*strides)
    return library.encode_map(ctypes.c_void_p(4096), half, *given, rows)


@pytest.mark.parametrize("half", [False, True])
def test_a_map_of_four_dimensions_with_the_swizzle_that_the_kernels_read(library: ctypes.CDLL, half: bool) -> None:
    assert encode(library, (2, 4, 1000, 96), (4 * 96 * 1000, 96, 4 * 96), rows=80, half=half) == 0
    asked = library.last().contents
    assert (asked.rank, asked.data, asked.version) == (4, 4096, 12000)
    assert asked.type == (6 if half else 9)  # CU_TENSOR_MAP_DATA_TYPE_FLOAT16, _BFLOAT16
    assert list(asked.sizes) == [96, 1000, 4, 2]
    assert list(asked.strides) == [2 * 4 * 96, 2 * 96, 2 * 4 * 96 * 1000]  # bytes, of all but the first
    assert list(asked.box) == [64, 80, 1, 1]
    assert list(asked.steps) == [1, 1, 1, 1]
    # No interleaving, 128 bytes of swizzle, 256 bytes of promotion to L2, zeros outside.
    assert (asked.interleave, asked.swizzle, asked.promotion, asked.fill) == (0, 3, 3, 0)


def test_strides_that_no_address_depends_on_are_replaced(library: ctypes.CDLL) -> None:
    """Those of dimensions of size 1 may be anything, also what the driver refuses."""
    assert encode(library, (1, 1, 1, 40), (7, -3, 0)) == 0
    assert list(library.last().contents.strides) == [80, 80, 80]


def test_sizes_past_the_largest_int(library: ctypes.CDLL) -> None:
    token, head = 128, 128 << 25
    assert encode(library, (3, 32, 1 << 25, 128), (32 * head, head, token)) == 0
    asked = library.last().contents
    assert list(asked.sizes) == [128, 1 << 25, 32, 3]
    assert list(asked.strides) == [2 * token, 2 * head, 2 * 32 * head]
    assert asked.strides[2] > 1 << 37


def test_what_the_driver_refuses_is_an_invalid_value(library: ctypes.CDLL) -> None:
    library.set(True, 1)
    assert encode(library, (1, 1, 128, 64), (0, 0, 64)) == 1  # cudaErrorInvalidValue
    library.set(True, 0)
    assert encode(library, (1, 1, 128, 64), (0, 0, 64)) == 0
    assert library.count_lookups() == 1


def test_a_driver_without_tensor_maps_is_an_error(library: ctypes.CDLL) -> None:
    library.set(False, 0)
    assert encode(library, (1, 1, 128, 64), (0, 0, 64)) == 500  # cudaErrorSymbolNotFound
