// Functions of a register of floats that the processor has no instruction for. Compiled once per instruction set.
//
// The coefficients are least-maximum fits of relative error, made for these forms in double precision.
#pragma once

#include "vec.h"

namespace foundry {
namespace FK_ISA {

// 2^n for integers n of -252 .. 254, in two factors: each is a normal number where 2^n itself may not be.
inline Vec times_power_of_2(Vec v, Vec n) {
#if defined(__AVX512F__)
  return (Vec)_mm512_scalef_ps((__m512)v, (__m512)n);
#else
  const VecI whole = __builtin_convertvector(n, VecI), half = whole >> 1;
  return v * bit_cast<Vec>((half + 127) << 23) * bit_cast<Vec>((whole - half + 127) << 23);
#endif
}

// e^v. At most 1 unit in the last place from the truth where that is a normal number, at most one subnormal step
// below; 0 below -104, infinity above 88.73, NaN for NaN.
//
// e^v = 2^n e^r, n = v / ln 2 rounded, |r| <= ln(2) / 2. ln 2 is subtracted in two parts, of which n times the first is
// exact.
inline Vec exp(Vec v) {
  constexpr float kLowest = -104.0f, kHighest = 89.0f;  // beyond them the result is 0 or infinity
  v = v < splat(kLowest) ? splat(kLowest) : v;           // a NaN compares false and stays
  v = v > splat(kHighest) ? splat(kHighest) : v;
#if defined(__AVX512F__)
  const Vec n = (Vec)_mm512_roundscale_ps((__m512)(v * 1.44269504f), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  const Vec shift = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Vec n = (v * 1.44269504f + shift) - shift;
#endif
  const Vec r = (v - n * 0.693359375f) - n * -2.12194440e-4f;
  Vec p = splat(0x1.6a23cep-10f);
  p = p * r + 0x1.123a2p-7f;
  p = p * r + 0x1.5558f2p-5f;
  p = p * r + 0x1.555492p-3f;
  p = p * r + 0x1.fffffcp-2f;
  p = p * (r * r) + r + 1.0f;
  return times_power_of_2(p, n);
}

// 1 / (1 + e^-v), within 2 units in the last place where e^-v is finite and 0 where it is not.
inline Vec sigmoid(Vec v) { return 1.0f / (1.0f + exp(-v)); }

// The normal distribution: its density times sqrt(2 pi), and the share of it below v. The tail is
// e^(-z^2/2) f(z), z = |v|, with f a polynomial in 1 / (1 + 0.35 z), so that it keeps its relative exactness however
// small it gets: within 5e-6 of itself, and within 2e-7 in absolute terms everywhere.
struct Normal {
  Vec density, below;
};
inline Normal normal(Vec v) {
  const Vec z = v < splat(0.0f) ? -v : v;
  const Vec density = exp(z * z * -0.5f);
  const Vec t = 1.0f / (1.0f + 0.35f * z);
  Vec p = splat(-0.0291595846f);
  p = p * t + 0.144039312f;
  p = p * t - 0.255856633f;
  p = p * t + 0.159340197f;
  p = p * t - 0.0232267455f;
  p = p * t + 0.105558725f;
  p = p * t + 0.119819675f;
  p = p * t + 0.139863744f;
  p = p * t + 0.139621293f;
  const Vec tail = density * (p * t);
  return {density, v < splat(0.0f) ? tail : 1.0f - tail};
}

}  // namespace FK_ISA
}  // namespace foundry
