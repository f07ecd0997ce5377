"""Errors planted in Hopper's forward kernel of attention: the checker names each, or the result is wrong."""

from __future__ import annotations

import ctypes
import itertools
import re

import pytest
import torch
from cuda_on_cpu.build import ROOT, load_plain
from torch import Tensor

FOLDER = ROOT / "csrc" / "cuda" / "hopper"
HEADERS = ("attention_forward_kernel.cuh", "attention_forward.cuh", "packed_order.cuh", "attention.cuh")

DRIVER = """
extern "C" const char* run(const void* q, const void* k, const void* v, void* out, double* lse, const int32_t* starts,
                           long long sequences, long long heads, long long group, long long tokens,
                           long long dim, long long dim_v) {
  using namespace foundry;
  static std::string report;
  cuda::AttentionForward a{};
  a.q = q, a.k = k, a.v = v, a.out = out, a.lse = lse;
  a.starts_q = a.starts_k = starts;
  a.type = Dtype::bf16;
  a.n_sequences = sequences, a.n_heads = heads, a.group = group, a.n_queries = a.n_keys = tokens;
  a.total_q = a.total_k = starts ? starts[sequences] : 0;
  a.head_dim = static_cast<int>(dim), a.head_dim_v = static_cast<int>(dim_v);
  a.scale = 0.125f;
  a.window_left = kUnbounded, a.window_right = 0, a.bottom_right = true;
  const int64_t rows = starts ? a.total_q : tokens;
  a.q_strides = a.k_strides = {0, rows * dim, dim};  // of one sequence, or packed ones
  a.v_strides = a.out_strides = {0, rows * dim_v, dim_v};
  a.row_strides = {0, rows, 1};
  int counter = 0;
  try {
    report = cuda::hopper::attention_forward(a, 2, &counter, nullptr) ? "launch failed" : counter ? "counter" : "";
  } catch (const std::runtime_error& e) {
    report = e.what();
  }
  return report.c_str();
}
"""


def source_text() -> str:
    """The kernel with its headers in place, of bfloat16 and without options: a fraction of the time to compile."""
    text = "#include <stdexcept>\n#include <string>\n" + (FOLDER / "attention_forward.cu").read_text()
    for header in HEADERS:  # each before those that it includes
        include = f'#include "{header}"\n'
        assert include in text
        text = text.replace(include, (FOLDER / header).read_text().replace("#pragma once", ""), 1)
    text = text.replace('#include "../', '#include "../../cuda/')
    for before, after in (
        ("return has_score_options(a) ? launch_kernel<T, S, true>(a, order, blocks, stream)", "return"),
        (": launch_kernel<T, S, false>", "launch_kernel<T, S, false>"),
        (": launch_of_type<__half>(a, order, blocks, stream)", ": cudaErrorInvalidValue"),
        ("if (width <= 96) return of(Tag<Shape<96>>{});", ""),
        ("if (width > 192) return of(Tag<Shape<256>>{});", ""),
    ):
        assert before in text, before
        text = text.replace(before, after)
    return text


def run(text: str, dim: int, packed: bool, seeds: int, dim_v: int | None = None) -> str:
    """The report of the first schedule that shows something, else "wrong" or "" for a right result."""
    library = load_plain(FOLDER / "attention_forward.cu", text + DRIVER)
    library.run.restype = ctypes.c_char_p
    generator = torch.Generator().manual_seed(0)
    heads, group, lengths = 4, 2, [130, 0, 130, 163] if packed else [300]
    tokens = sum(lengths)
    dim_v = dim_v or dim
    shapes = ((heads, dim, 8.0), (heads // group, dim, 1.0), (heads // group, dim_v, 1.0))  # maxima grow on the way
    q, k, v = ((x * torch.randn(h, tokens, d, generator=generator)).bfloat16() for h, d, x in shapes)
    ends = torch.tensor([0, *lengths]).cumsum(0).tolist()
    expected = torch.cat([_expected(q[:, a:b], k[:, a:b], v[:, a:b]) for a, b in itertools.pairwise(ends)], 1)
    starts = torch.tensor(ends, dtype=torch.int32) if packed else None
    if packed:  # the last sequence must not reach the others
        for x in (q, k, v):
            x[:, ends[-2] :] = torch.nan
        expected[:, ends[-2] :] = torch.nan
    for seed in range(seeds):
        out = torch.full((heads, tokens, dim_v), torch.nan, dtype=torch.bfloat16)
        lse = torch.full((heads, tokens), torch.nan, dtype=torch.float64)
        pointers = [None if t is None else ctypes.c_void_p(t.data_ptr()) for t in (q, k, v, out, lse, starts)]
        sizes = [len(lengths) if packed else 1, heads, group, max(lengths), dim, dim_v]
        library.cuda_on_cpu_schedule(seed, 2)
        report = library.run(*pointers, *map(ctypes.c_longlong, sizes)).decode()
        if report:
            return report
        try:
            torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=2e-2, equal_nan=True)
        except AssertionError:
            return "wrong"
    return ""


def _expected(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x.repeat_interleave(2, 0).float() for x in (k, v))
    scores = q.float() @ k.mT * 0.125
    hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
    return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v


@pytest.mark.parametrize(("dim", "dim_v"), [(64, 64), (128, 128), (192, 128), (192, 192)])
@pytest.mark.parametrize("packed", [False, True])
def test_the_intact_copy_is_right(dim: int, dim_v: int, packed: bool) -> None:
    assert run(source_text(), dim, packed, 5, dim_v) == ""


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("ways", [1, 2, 3])
def test_each_way_of_64_is_right(ways: int, packed: bool) -> None:
    assert run(f"#define FK_HOPPER_WAYS_OF_64 {ways}\n" + source_text(), 64, packed, seeds=5) == ""


#: What is written, what stands there instead, the width, whether sequences are packed, and what is reported.
PLANTED = {
    "K's stage released before its scores are waited for": (
        "    wgmma_wait<1>();\n    settle(s);\n    release_k();",
        "    release_k();\n    wgmma_wait<1>();\n    settle(s);",
        128,
        False,
        "a stage released early",
    ),
    "V's stage released before the output is waited for": (
        "    wgmma_wait<0>();\n    settle(o);\n    settle(p);\n    release_v(in_v);\n    if",
        "    release_v(in_v);\n    wgmma_wait<0>();\n    settle(o);\n    settle(p);\n    if",
        128,
        False,
        "a stage released early",
    ),
    "no wait for the scores": ("wgmma_wait<1>();", "", 128, False, "has not been waited for"),
    "no wait for the output": (
        "    wgmma_wait<0>();\n    settle(o);\n    settle(p);\n    release_v(in_v);\n    if",
        "    settle(o);\n    release_v(in_v);\n    if",
        128,
        False,
        "has not been waited for",
    ),
    "no fence before a step's products": (
        "    settle(p);\n    wgmma_fence();\n    issue_scores();",
        "    settle(p);\n    issue_scores();",
        128,
        False,
        "fence",
    ),
    "weights replaced while the product reads them": (
        "    wgmma_wait<0>();\n    settle(o);\n    settle(p);\n    release_v(in_v);\n    if",
        "    pack_weights();\n    wgmma_wait<0>();\n    settle(o);\n    settle(p);\n    release_v(in_v);\n    if",
        128,
        False,
        "changed",
    ),
    "K waited for in the wrong phase": ("in_k{0, 0};", "in_k{0, 1};", 128, False, "never"),
    "K's place in the wrong stage": (
        "matrix(base + S::kK + in_k.stage * S::kKBytes)",
        "matrix(base + S::kK + (in_k.stage ^ 1) * S::kKBytes)",
        128,
        False,
        "race|in flight|fills|before it is written",
    ),
    "Q released before it was read": (
        "      keep_q(base + S::kQ);\n      release_q();",
        "      release_q();\n      keep_q(base + S::kQ);",
        128,
        False,
        "race|in flight|fills",
    ),
    "the distance of V's panels": (
        "at.stage * S::kVBytes, S::kKPanel)",
        "at.stage * S::kVBytes, 2 * S::kKPanel)",
        128,
        False,
        "race|wrong",
    ),
    "the stride from one 16 of V's rows to the next": (
        "k * 16 * kPanelBytes",
        "k * 8 * kPanelBytes",
        128,
        False,
        "wrong",
    ),
    "a chunk of Q not swizzled": ("((chunk ^ r % 8) << 4)", "(chunk << 4)", 128, False, "wrong"),
    "fewer bytes announced than copied": (
        "mbarrier_expect(barrier, panels * panel_bytes)",
        "mbarrier_expect(barrier, panels * panel_bytes - 64)",
        128,
        False,
        "bytes",
    ),
    "more bytes announced than copied": (
        "mbarrier_expect(barrier, panels * panel_bytes)",
        "mbarrier_expect(barrier, panels * panel_bytes + 64)",
        128,
        False,
        "never",
    ),
    "too few arrivals": (
        "mbarrier_init(base + S::kKEmpty + 8 * i, 4 * S::kGroups)",
        "mbarrier_init(base + S::kKEmpty + 8 * i, 4 * S::kGroups + 1)",
        128,
        False,
        "never",
    ),
    "barriers without their fence": ("    mbarrier_init_fence();\n", "", 128, False, "fence"),
    "no barrier after the barriers' beginning": (
        "  }\n  __syncthreads();\n  const int warpgroup",
        "  }\n  const int warpgroup",
        128,
        False,
        "mbarrier|init",
    ),
    "values behind a sequence's end kept": ("    clear_values(h, keys);\n", "", 128, True, "wrong"),
    "cleared values without a fence": ("  fence_proxy_async();\n}", "}", 128, True, "fence"),
    "cleared values without a barrier": ("    FK_NAMED_BARRIER(1, 128 * S::kGroups);\n", "", 128, True, "race|barrier"),
    "a place of two sequences": ("(of_other == keys && other < n)", "of_other == keys", 128, True, "written|wrong"),
    "tiles beyond the end taken": ("position < end ? end - 1 - position : kFar", "end - 1 - position", 128, True, "."),
    "the counter not reset": ("*order.counter = 0;", ";", 128, False, "counter"),
    "an edge taken for whole": ("weigh<true, true>(n,", "weigh<false, true>(n,", 64, False, "wrong"),
    "a tile that is passed over not released": (
        "      release_v(last);\n",
        "",
        64,
        False,
        "never",
    ),
    "more registers than there are": (
        "kGroups == 3 ? 160 : 240;",
        "kGroups == 3 ? 160 : 248;",
        128,
        False,
        "never ends",
    ),
    "a tile that is passed over released before its values came": (
        "      wait_v(last);\n      release_v(last);",
        "      release_v(last);",
        64,
        False,
        "fills",
    ),
    "values copied as wide as keys": (
        "S::kPanelsV, S::kKPanel",
        "S::kPanels, S::kKPanel",
        192,
        False,
        "race|fills",
    ),
    "the stages of values as far apart as those of keys": (
        "matrix(base + S::kV + at.stage * S::kVBytes",
        "matrix(base + S::kV + at.stage * S::kKBytes",
        192,
        False,
        "race|fills|before it is written|an mbarrier is read|wrong",
    ),
    "cleared values of the wrong stage": (
        "clear_rows(base + S::kV + in_k.stage * S::kVBytes",
        "clear_rows(base + S::kV + (in_k.stage ^ 1) * S::kVBytes",
        192,
        True,
        "race|fills|wrong",
    ),
    "the output never rescaled": ("o[x] *= rows.shrink[x / 2 % 2]", "o[x] *= 1.f", 64, False, "wrong"),
    "the place of a tile of rows taken too early": (
        "    const Work done = work();\n    if constexpr (!S::kKeepWork) release_q();",
        "    if constexpr (!S::kKeepWork) release_q();\n    const Work done = work();",
        64,
        False,
        "race|wrong",
    ),
}


@pytest.mark.parametrize("how", PLANTED)
def test_a_planted_error_is_found(how: str) -> None:
    before, after, dim, packed, expected = PLANTED[how]
    text = source_text()
    assert before in text, "the kernel has changed: plant the error in another place"
    report = run(text.replace(before, after), dim, packed, 40, min(dim, 128))
    assert report, "the error was not noticed"
    assert re.search(expected, report), report


def test_a_turn_that_is_not_passed_is_found() -> None:
    """By a warpgroup that skips a tile, and so has no matmuls to begin."""
    text = "#define FK_HOPPER_WAYS_OF_64 2\n" + source_text()
    before = "        wait_for_turn();\n        pass_turn();\n"
    assert before in text
    assert "never ends" in run(text.replace(before, ""), 64, packed=False, seeds=2)
