"""The soft cap of csrc/cuda/hopper against double, with the errors that the GPU's instructions may have."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from cuda_on_cpu.build import ROOT, load_plain
from numpy.typing import NDArray

SOURCE = ROOT / "csrc" / "cuda" / "hopper" / "score.cuh"
DRIVER = """
namespace foundry { namespace cuda { namespace hopper {
struct Given { float scale, softcap; };
extern "C" void bend_all(float scale, float softcap, float exp2_error, float reciprocal_error, const float* from,
                         float* to, int64_t count, int small) {
  Log2Score score{};
  score.set(Given{scale, softcap});
  exp2_factor = 1.f + exp2_error;
  reciprocal_factor = 1.f + reciprocal_error;
  for (int64_t i = 0; i < count; ++i) {
    to[i] = score.bend(from[i]);
    if (small && std::fabs(from[i]) <= score.edge && to[i] != score.bend_small(from[i])) to[i] = NAN;
  }
}
}}}
"""
ROUGH = """
#include <cmath>
namespace {
float exp2_factor, reciprocal_factor;
float rough_exp2(float x) { return std::exp2(x) * exp2_factor; }
float rough_reciprocal(float x) { return 1.f / x * reciprocal_factor; }
}
"""
#: Scale and cap; what a cap does at 3e7 is seen by products of 1e6 only.
CALLS = ((0.125, 50.0), (0.088, 30.0), (1.0, 1.0), (2.0, 0.01), (1e-3, 1e4), (0.125, 1e6), (1.0, 3e7), (1.0, 1e12))


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    text = SOURCE.read_text().replace("fast_exp2(", "rough_exp2(").replace("fast_reciprocal(", "rough_reciprocal(")
    assert text.count("rough_") == 2
    head, body = text.split("\nnamespace foundry {", 1)
    return load_plain(SOURCE, f"{head}\n{ROUGH}\nnamespace foundry {{{body}\n{DRIVER}")


def bend(
    library: ctypes.CDLL, scale: float, cap: float, products: NDArray[np.float32], errors: tuple[float, float]
) -> NDArray[np.float32]:
    found = np.empty_like(products)
    pointers = [x.ctypes.data_as(ctypes.c_void_p) for x in (products, found)]
    numbers = [ctypes.c_float(x) for x in (scale, cap, *errors)]
    library.bend_all(*numbers, *pointers, ctypes.c_int64(len(products)), ctypes.c_int(1))
    return found


@pytest.mark.parametrize(("scale", "cap"), CALLS)
def test_the_soft_cap_is_accurate_at_any_size(library: ctypes.CDLL, scale: float, cap: float) -> None:
    """Relative to the result itself: small products do not cancel. Large ones do not overflow."""
    x = np.concatenate([np.geomspace(1e-15, 200, 20001), np.linspace(0.05, 0.5, 20001)])  # around the edge
    products = (np.concatenate([x, -x]) * (cap / scale)).astype(np.float32)
    exact = np.float64(np.float32(cap)) / np.float64(np.float32(scale))
    expected = exact * np.tanh(products.astype(np.float64) / exact)
    for errors in ((0.0, 0.0), *((a * 2.0**-22, b * 2.0**-22) for a in (-1, 1) for b in (-1, 1))):
        found = bend(library, scale, cap, products, errors).astype(np.float64)
        error, small = np.abs(found / expected - 1), np.abs(products) < (0.374 if scale / cap > 1e-6 else 0.062) * exact
        assert error.max() < 2.0 ** (-19.5 if scale / cap > 1e-6 else -17)
        assert error[small].max() < 2.0 ** (-22 if scale / cap > 1e-9 else -18.5)
        assert (np.sign(found) == np.sign(products)).all()
        assert (np.abs(found) <= exact * (1 + 2.0**-20)).all()


def test_what_is_not_finite(library: ctypes.CDLL) -> None:
    found = bend(library, 0.125, 50.0, np.array([np.inf, -np.inf, np.nan, 3e38, 0.0], dtype=np.float32), (0.0, 0.0))
    assert np.array_equal(found, np.array([400, -400, np.nan, 400, 0], dtype=np.float32), equal_nan=True)
