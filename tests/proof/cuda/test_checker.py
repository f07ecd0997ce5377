"""The checker finds what it is for: in small kernels, and in deliberately broken copies of the real ones."""

from __future__ import annotations

import ctypes
import re
import sys

import pytest
import torch
from cuda_on_cpu.build import HERE, LIBRARY, ROOT, load_plain
from table import checked_rows
from torch import Tensor
from torch._ops import OpOverload

import foundry_kernels as fk
from foundry_kernels.core.registry import no_direct_call

pytestmark = pytest.mark.usefixtures("guarded_memory")


def run_sample(name: str) -> tuple[str, Tensor]:
    source = HERE / "samples.cu"
    library = load_plain(source, source.read_text())
    library.run_sample.restype = ctypes.c_char_p
    out = torch.zeros(128)
    report = library.run_sample(name.encode(), ctypes.c_void_p(out.data_ptr()))
    return report.decode(), out


i = torch.arange(64)
lane, seg = i % 32, i % 8
EXPECTED = {
    "shuffles": torch.cat(
        [
            (i // 32 * 32 + 5) + 100 * (i ^ 3) + 10000 * torch.where(lane < 30, i + 2, i),
            torch.where(lane > 0, i - 1, i) + 100 * (i // 8 * 8 + 1) + 10000 * torch.where(seg < 4, i + 4, i),
        ]
    ),
    "votes": torch.cat([7 + 100 * (i // 32) + 1000 * (i < 32) + 320000, torch.zeros(64)]),
    "half_warps": torch.cat([torch.where(lane < 16, i ^ 1, i ^ 2), torch.zeros(64)]),
    "dynamic_reverse": torch.cat([31 - torch.arange(32) + 1000 * y for y in (0, 0, 1, 1)]),
    "named": torch.arange(128) ^ 32,
    "neighbours": torch.cat([i ^ 1, torch.zeros(64)]),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_right_kernels_run(name: str) -> None:
    report, out = run_sample(name)
    assert report == ""
    assert torch.equal(out, EXPECTED[name].float())


REPORTED = {
    "named_missing": "race: shared memory is read without a barrier|read before it is written",
    "neighbours_missing": "race: shared memory is read without a barrier|read before it is written",
    "rewritten_too_soon": "race: shared memory is",
    "never_written": "shared memory is read before it is written.*thread 63",
    "shared_by_one": "shared memory index 64 is outside of 0..63.*thread 63",
    "dynamic_too_small": "shared memory index 31 is outside of 0..30",
    "global_by_one": "access outside of an allocation.*thread 127",
    "misaligned": "misaligned access",
    "leaves_before_barrier": "divergent barrier: 32 threads have left",
    "two_barriers": "divergent barrier: thread 0 waits at line .* and thread 32 at line",
    "mask_without_caller": "__shfl_xor_sync with a mask that lacks the calling lane",
    "lane_outside_of_mask": "__shfl_xor_sync reads a lane outside of its mask",
    "mask_with_lanes_gone": "names lane 31, which has left",
    "barrier_against_shuffle": "never completes",
    "too_many_threads": "invalid configuration",
    "empty_grid": "invalid configuration",
}


@pytest.mark.parametrize("name", REPORTED)
def test_wrong_kernels_are_reported(name: str) -> None:
    report, _ = run_sample(name)
    assert re.search(REPORTED[name], report), report


# --- the real kernels, broken ---

DRIVER = """
extern "C" const char* run(long long rows, long long cols, float* x, float* w, float* y, float* rstd, float* dy,
                           float* dx, float* dw, float* partial, int blocks) {
  static std::string report;
  using namespace foundry;
  cuda::RmsNormForward f{};
  f.x = x; f.weight = w; f.y = y; f.rstd = rstd;
  f.rows.size[2] = rows; f.x_strides.stride[2] = cols; f.n_cols = cols; f.eps = 1e-6f;
  cuda::RmsNormBackward b{};
  b.x = x; b.weight = w; b.dy = dy; b.rstd = rstd; b.dx = dx; b.dw = dw; b.dw_partial = partial; b.n_blocks = blocks;
  b.rows = f.rows; b.x_strides = b.dy_strides = f.x_strides; b.n_cols = cols;
  try {
    report = cuda::rms_norm_forward(f, nullptr) || cuda::rms_norm_backward(b, nullptr) ? "launch failed" : "";
  } catch (const std::runtime_error& e) {
    report = e.what();
  }
  return report.c_str();
}
extern "C" int backward_blocks(long long rows, long long cols, int resident_threads, int multiprocessors) {
  using namespace foundry;
  cuda::RmsNormBackward b{};
  b.rows.size[2] = rows; b.n_cols = cols;
  b.x_strides.stride[2] = b.dy_strides.stride[2] = cols;
  cuda_on_cpu::resident_threads = resident_threads;
  return cuda::rms_norm_backward_blocks(b, multiprocessors);
}
"""

SHAPES = {"narrow": (37, 64), "wide": (5, 2048), "ragged": (5, 300), "odd": (5, 301)}


def run_rms_norm(text: str, shape: tuple[int, int]) -> tuple[str, dict[str, Tensor]]:
    library = load_plain(ROOT / "csrc" / "cuda" / "rms_norm.cu", text + DRIVER)
    library.run.restype = ctypes.c_char_p
    rows, cols = shape
    blocks = 2
    g = torch.Generator().manual_seed(0)
    t = {
        "x": torch.randn(shape, generator=g),
        "w": torch.randn(cols, generator=g),
        "y": torch.full(shape, torch.nan),
        "rstd": torch.full((rows,), torch.nan),
        "dy": torch.randn(shape, generator=g),
        "dx": torch.full(shape, torch.nan),
        "dw": torch.full((cols,), torch.nan),
        "partial": torch.full((blocks, cols), torch.nan),
    }
    pointers = [ctypes.c_void_p(v.data_ptr()) for v in t.values()]
    report = library.run(ctypes.c_longlong(rows), ctypes.c_longlong(cols), *pointers, blocks)
    return report.decode(), t


def source_text() -> str:
    """The kernels with the shared headers in place, so that all of it can be broken."""
    text = "#include <stdexcept>\n#include <string>\n" + (ROOT / "csrc" / "cuda" / "rms_norm.cu").read_text()
    for header in (
        "rms_norm_rows.cuh",
        "dropout.cuh",
        "vectors.cuh",
        "dispatch.cuh",
        "launch.cuh",
    ):  # each before those that it includes
        include = f'#include "{header}"\n'
        assert include in text
        content = (ROOT / "csrc" / "cuda" / header).read_text().replace("#pragma once", "")
        text = text.replace(include, content, 1).replace(include, "")  # once, as the pragma would have it
    # float32 without dropout alone: a fraction of the time to compile.
    for before, after in (
        ("return type == Dtype::bf16 ? f(Tag<__nv_bfloat16>{}) : f(Tag<__half>{});", "return cudaErrorInvalidValue;"),
        (
            "return x == Dtype::bf16 ? half(Tag<__nv_bfloat16>{}) : half(Tag<__half>{});",
            "(void)half; return cudaErrorInvalidValue;",
        ),
        ("if (a.centered) return dropout ? f(Constant<true>{}, Constant<true>{}) : f(", "if (a.centered) return f("),
        ("return dropout ? f(Constant<false>{}, Constant<true>{}) : f(", "(void)dropout; return f("),
    ):
        assert before in text
        text = text.replace(before, after)
    return text


def test_the_intact_copy_is_right() -> None:
    for shape in SHAPES.values():
        report, t = run_rms_norm(source_text(), shape)
        assert report == ""
        x, w = t["x"].clone().requires_grad_(), t["w"].clone().requires_grad_()
        y = fk.rms_norm(x, w, backend="reference")
        dx, dw = torch.autograd.grad(y, (x, w), t["dy"])
        for name, expected in (("y", y.detach()), ("dx", dx), ("dw", dw)):
            torch.testing.assert_close(t[name], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("rows", "cols", "resident_threads", "expected"),
    [
        (10**6, 64, 384, 3 * 132),  # blocks of 128 threads: three fit
        (10**6, 64, 512, 4 * 132),
        (10**6, 2048, 512, 2 * 132),  # of 256
        (10**6, 4096, 128, 132),  # at least one on each
        (37, 64, 512, 3),  # 16 rows at a time: the others would have nothing to do
    ],
)
def test_a_persistent_grid_is_as_large_as_the_driver_says(
    rows: int, cols: int, resident_threads: int, expected: int
) -> None:
    """RMSNorm's backward pass, on 132 multiprocessors."""
    library = load_plain(ROOT / "csrc" / "cuda" / "rms_norm.cu", source_text() + DRIVER)
    sizes = ctypes.c_longlong(rows), ctypes.c_longlong(cols)
    assert library.backward_blocks(*sizes, resident_threads, 132) == expected


BROKEN = {
    "missing barrier": (
        "    __syncthreads();\n    const int first",
        "    const int first",
        "wide",
        "race|read before it is written",
    ),
    "scratch reused too early": (
        "(call & 1) * (kSums * kBlockWarps)",
        "0 * call",
        "wide",
        "race: shared memory is written",
    ),
    "wrong shuffle mask": (
        "__shfl_xor_sync(0xFFFFFFFFu",
        "__shfl_xor_sync(0xFFFFu",
        "wide",
        "its mask|mask that lacks",
    ),
    "read past the end": (
        "return of(read) < end;",
        "return of(read) <= end;",
        "ragged",
        "outside of an allocation",
    ),
    "shared value never written": ("adding == 0 ? dw[j][i] : ", "", "narrow", "read before it is written"),
    "shared index by one": ("sums[at] = adding", "sums[at + 1] = adding", "narrow", "index 128 is outside"),
    "divergent barrier": (
        "+ warp] = sums[s];\n    }\n    __syncthreads();",
        "+ warp] = sums[s];\n    __syncthreads();\n    }",
        "wide",
        "barrier",
    ),
    "groups add without a barrier": ("          }\n      __syncthreads();\n", "          }\n", "narrow", "race"),
    "threads leave before the sum": (
        "  const bool live = kThreads >= kMinBlock || wanted < n_rows;",
        "  const bool live = true; if (wanted >= n_rows) return;",
        "narrow",
        "which has left",
    ),
    "vectors where rows are not aligned": (
        "const bool vectors = aligned(a.x, a.x_type, {a.n_cols}) &&",
        "const bool vectors = true ||",
        "odd",
        "misaligned access",
    ),
}


@pytest.mark.parametrize("how", BROKEN)
def test_broken_copies_are_reported(how: str) -> None:
    before, after, shape, expected = BROKEN[how]
    text = source_text()
    assert before in text, "the kernel has changed: break it in another place"
    report, _ = run_rms_norm(text.replace(before, after), SHAPES[shape])
    assert report, "the broken kernel was not noticed"
    assert re.search(expected, report), report


def test_the_parity_suite_runs_these_kernels() -> None:
    """The rows that are said to be CUDA kernels are: an impossible launch is refused by their launcher."""
    rows = [r for r in checked_rows() if r.cuda_on_cpu]
    assert {r.op.name for r in rows} >= {"rms_norm", "add_rms_norm"}
    for row in rows:
        with row.active():
            impl = row.op.impl("native")
            assert impl is not None
            named = [impl.fn] if isinstance(impl.fn, OpOverload) else vars(sys.modules[impl.fn.__module__]).values()
            operators = [x for x in named if isinstance(x, OpOverload)]
            assert operators
            assert all(x._schema.name.startswith(LIBRARY) for x in operators)
            assert row.op.direct is no_direct_call, "a CPU kernel is called past them"
