"""Attention in CUDA C++ under the checker: bank conflicts, broken copies of the kernels, and what they cost by nvcc."""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Iterator

import nvcc
import pytest
import torch
from built import needs_native
from cuda_on_cpu.build import LIBRARY, ROOT, load_operators, load_plain, shared_memory_traffic
from table import Row

import foundry_kernels as fk
from foundry_kernels.ops.flash_attention import FLASH_ATTENTION, FLASH_ATTENTION_VARLEN
from foundry_kernels.ops.flash_attention.case_makers import dense_case, packed_case
from foundry_kernels.testing import Case, assert_parity, normal

pytestmark = needs_native

CUDA = ROOT / "csrc" / "cuda"
SCALE = 0.3


@pytest.fixture
def _guarded() -> Iterator[None]:
    load_operators()
    getattr(torch.ops, LIBRARY).guard(True)
    yield
    getattr(torch.ops, LIBRARY).guard(False)


# --- bank conflicts ---


@pytest.mark.parametrize("d", [40, 64, 128, 256])
def test_no_access_of_shared_memory_meets_another_in_its_bank(d: int) -> None:
    """In the kernels with matrix instructions: of the copies, and of what is loaded for the products."""
    library = load_operators()
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, d, generator=g).bfloat16().requires_grad_() for n in (150, 140, 140))
    library.cuda_on_cpu_forget_traffic()
    with Row(FLASH_ATTENTION, "native", "cpu", cuda_on_cpu=True).active():
        fk.flash_attention(q, k, v, causal=True, backend="native").sum().backward()
    counted = {place: n for place, n in shared_memory_traffic(library).items() if "flash_attention" in place[0]}
    files = {place[0].rsplit("/", 1)[-1] for place in counted}
    assert {"flash_attention_forward_tiles.cu", "flash_attention_backward.cuh"} <= files  # scores; products with dout
    assert sum(accesses for accesses, _ in counted.values()) > 1000
    assert {place: n for place, (_, n) in counted.items() if n} == {}


# --- split keys ---

#: Few queries of many keys, wide values and narrow ones; of the first, parts of keys that are not seen at all.
SPLIT = (
    dense_case(1, (2, 1), (2, 1100), 64, "hidden", causal=True, window=(300, None), return_stats=True, frozen="kv"),
    dense_case(2, (4, 2), (1, 700), 40, "sinks", sinks=normal(), return_stats=True, return_lse=True, frozen="kv"),
    dense_case(1, (1, 1), (1, 2100), 16, "one-head", return_lse=True, head_dim_v=136, frozen="kv"),
    packed_case((1, 0, 3), (900, 5, 0), (2, 1), 64, "packed", return_lse=True, return_stats=True),
)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("case", SPLIT, ids=lambda case: case.id)
def test_splits_of_the_keys_are_added(case: Case) -> None:
    op = FLASH_ATTENTION_VARLEN if "cu_seqlens_q" in case.args else FLASH_ATTENTION
    with Row(op, "native", "cpu", cuda_on_cpu=True).active():
        assert_parity(op, case, backend="native", dtype=torch.bfloat16, device="cpu")


# --- the kernels, broken ---

DRIVER = """
#include <stdexcept>
#include <string>
namespace {
foundry::cuda::AttentionBackward inputs(int t, int s, float scale, void* q, void* k, void* v) {
  foundry::cuda::AttentionBackward a{};
  a.q = q; a.k = k; a.v = v;
  a.q_strides = {64 * t, 64 * t, 64};
  a.k_strides = a.v_strides = {64 * s, 64 * s, 64};
  a.type = foundry::Dtype::bf16;
  a.n_sequences = a.n_heads = a.group = 1;
  a.n_queries = t; a.n_keys = s;
  a.head_dim = a.head_dim_v = 64;
  a.scale = scale;
  a.window_left = foundry::kUnbounded;
  a.bottom_right = true;
  a.row_strides = {t, t, 1};
  return a;
}
template <class F>
const char* report_of(const F& f) {
  static std::string report;
  try {
    report = f() ? "launch failed" : "";
  } catch (const std::runtime_error& e) {
    report = e.what();
  }
  return report.c_str();
}
}  // namespace
"""
FORWARD = """
extern "C" const char* run(int t, int s, float scale, int large, void* q, void* k, void* v, void* out, double* lse) {
  foundry::cuda::AttentionForward a{};
  static_cast<foundry::cuda::AttentionInputs&>(a) = inputs(t, s, scale, q, k, v);
  a.out = out; a.lse = lse;
  a.out_strides = a.q_strides;
  return report_of([&] { return foundry::cuda::forward_tiles(a, {1, 1, large != 0, t, nullptr}, nullptr); });
}
"""
BACKWARD = """
extern "C" const char* run(int t, int s, float scale, int, void* q, void* k, void* v, void* dout, float* numbers,
                           void* dq, void* dk, void* dv) {
  foundry::cuda::AttentionBackward a = inputs(t, s, scale, q, k, v);
  a.dout = dout; a.numbers = numbers;
  a.dq = dq; a.dk = dk; a.dv = dv;
  a.dout_strides = a.dq_strides = a.q_strides;
  a.dk_strides = a.dv_strides = a.k_strides;
  return report_of([&] { return foundry::cuda::backward_tiles(a, nullptr); });
}
"""


def source_name(kernel: str) -> str:
    return f"flash_attention_{'forward' if kernel == 'forward' else 'backward'}_tiles"


@functools.cache
def source_text(kernel: str) -> str:
    """A kernel's source for bfloat16 and heads of 64 alone: a fraction of the time to compile."""
    text = (CUDA / f"{source_name(kernel)}.cu").read_text()
    for pattern, after in (
        (r"if \(width <= 128\) return [^;]*;", ""),
        (r"return launch_of_width<T, 256>[^;]*;", "return cudaErrorInvalidValue;"),
        (r"return a\.type == Dtype::bf16 \? (of_type\(Tag<__nv_bfloat16>\{\}\)) : [^;]*;", r"return \1;"),
        (r"if \(has_options\(a\)[^;]*;", ""),
        (r"return has_options\(a\)[^:]*: ", "return "),
    ):
        text = re.sub(pattern, after, text, flags=re.S)
    return text


def run(kernel: str, text: str, t: int, s: int, large: bool = False) -> tuple[str, float]:
    """The checker's report, and how far the results are from the reference's."""
    forward, name = kernel == "forward", source_name(kernel)
    library = load_plain(CUDA / f"{name}.cu", text + DRIVER + (FORWARD if forward else BACKWARD))
    library.run.restype = ctypes.c_char_p
    g = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, 1, n, 64, generator=g).bfloat16() for n in (t, s, s, t))
    wide = [x.float().requires_grad_() for x in (q, k, v)]
    out, lse = fk.flash_attention(*wide, causal=True, scale=SCALE, return_lse=True, backend="reference")
    grads = torch.autograd.grad(out, wide, dout.float())
    if forward:
        made = [torch.full_like(q, torch.nan), torch.full((t,), torch.nan, dtype=torch.float64)]
        expected = [out.detach(), lse.detach().flatten()]
        given = (q, k, v, *made)
    else:
        delta = (out * dout.float()).sum(-1)
        numbers = torch.stack([lse / torch.log(torch.tensor(2.0)), delta], -1).detach().contiguous()
        made = [torch.full_like(x, torch.nan) for x in (q, k, v)]
        expected = list(grads)
        given = (q, k, v, dout, numbers, *made)
    pointers = [ctypes.c_void_p(x.data_ptr()) for x in given]
    report = library.run(t, s, ctypes.c_float(SCALE), large, *pointers).decode()
    if report:
        return report, 0.0
    differences = ((x.double() - y.double()).abs().nan_to_num(torch.inf) for x, y in zip(made, expected, strict=True))
    return "", max(float(d.max() / y.abs().max()) for d, y in zip(differences, expected, strict=True))


RACE = "race: |has not delivered|has not waited|read before|in flight|on its way|not committed"
OUTSIDE = "outside of an allocation|never"
SYNC_K, SYNC_V, SYNC = (f"    __syncthreads();  // {about}" for about in ("K's tile", "V's tile", "the tiles"))
#: (kernel, what is broken, before, after, what the checker says, or None where only results show it)
BROKEN = (
    ("forward", "no barrier before K", SYNC_K, "//", RACE),
    ("forward", "no barrier before V", SYNC_V, "//", RACE),
    ("forward", "K is not waited for", "cp_async_wait<0>();\n" + SYNC_K, SYNC_K, RACE),
    ("forward", "V is not waited for", "cp_async_wait<1>();\n" + SYNC_V, SYNC_V, RACE),
    ("forward", "V waits for too little", "cp_async_wait<1>();\n" + SYNC_V, "cp_async_wait<2>();\n" + SYNC_V, RACE),
    ("forward", "one place for K", "    k_next ^= S::kTile;\n", "", RACE),
    ("forward", "a tile too far", "if (next >= first_tile) k", "k", OUTSIDE),
    ("forward", "a key too many is seen", "h.end_key(at) - column", "h.end_key(at) - column + 1", None),
    ("forward", "the sum is not rescaled", "float sum = r.sum * shrink;", "float sum = r.sum;", None),
    ("forward", "V's tail is not cleared", "copy<kBlockN, kMasked>", "copy<kBlockN, false>", OUTSIDE),
    ("backward", "no barrier", SYNC, "//", RACE),
    ("backward", "no wait", "cp_async_wait<0>();\n" + SYNC, SYNC, RACE),
    ("backward", "one place", "place_now ^ S::kTile);", "place_now);", RACE),
    ("backward", "a tile too far", "if (!kMasked || tile > first_tile) {", "if (true) {", OUTSIDE),
    ("backward", "weights of hidden pairs", "const float w = seen ? ", "const float w = true ? ", None),
    ("backward", "delta is forgotten", "dx = w * (dx - numbers.delta);", "dx = w * dx;", None),
)
SHAPES = ((150, 150, True), (70, 200, False))


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["forward", "backward"])
@pytest.mark.parametrize(("t", "s", "large"), SHAPES)
@pytest.mark.usefixtures("_guarded")
def test_the_intact_copy_is_right(kernel: str, t: int, s: int, large: bool) -> None:
    report, error = run(kernel, source_text(kernel), t, s, large)
    assert report == ""
    assert error < 0.01


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "what", "before", "after", "says"),
    [pytest.param(*b, id=f"{b[0]}-{b[1]}") for b in BROKEN],
)
@pytest.mark.usefixtures("_guarded")
def test_a_broken_copy_is_caught(kernel: str, what: str, before: str, after: str, says: str | None) -> None:
    text = source_text(kernel)
    assert before in text, what
    found = [run(kernel, text.replace(before, after), *shape) for shape in SHAPES]
    if says is None:
        assert max(error for _, error in found) > 0.05
    else:
        assert any(report and re.search(says, report) for report, _ in found), found


# --- what nvcc makes of them ---

#: Instructions per product of 16x8x16 in the innermost loop that no mask is in, by chip and kernel.
BUDGETS = {
    "80": {
        "attention_forward_tiles<bfloat16, 128, 2, 0>": 3.55,
        "attention_forward_tiles<bfloat16, 64, 2, 0>": 4.95,
        "attention_backward_tiles<bfloat16, 128, 0, false>": 3.3,
        "attention_backward_tiles<bfloat16, 128, 1, false>": 3.2,
        "attention_backward_tiles<bfloat16, 64, 0, false>": 3.95,
        "attention_backward_tiles<bfloat16, 64, 1, false>": 3.65,
    },
    "89": {
        "attention_forward_tiles<bfloat16, 128, 1, 0>": 4.1,
        "attention_forward_tiles<bfloat16, 64, 2, 0>": 4.95,
    },
}


@pytest.mark.skipif(nvcc.nvcc() is None, reason="nvcc is neither in CUDA_HOME/bin nor on the PATH")
@pytest.mark.slow
@pytest.mark.parametrize("chip", BUDGETS)
@pytest.mark.parametrize("part", ["forward", "backward"])
def test_the_loops_keep_their_budgets(part: str, chip: str) -> None:
    budgets = {name: most for name, most in BUDGETS[chip].items() if part in name}
    if not budgets:
        pytest.skip(f"no budget of the {part} pass on {chip}")
    loops = nvcc.inner_loops(CUDA / f"flash_attention_{part}_tiles.cu", chip)
    for name, most in budgets.items():
        clean = nvcc.clean_loop(loops[name])
        assert "local" not in clean.counts
        assert clean.instructions / clean.counts["matmul"] <= most, (name, str(clean))
