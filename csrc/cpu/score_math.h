// Arithmetic of score functions on registers that csrc/cpu/math.h has not. Compiled once per instruction set.
#pragma once

#include <cmath>

#include "math.h"

namespace foundry {
namespace FK_ISA {

inline VecI as_int(Vec x) { return bit_cast<VecI>(x); }
inline Vec as_float(VecI x) { return bit_cast<Vec>(x); }

// f of each lane. The functions are the compiler's, so that no copy of a library's template with this set's
// instructions is linked.
template <class F> inline FK_INLINE Vec by_lane(Vec x, F&& f) {
  for (int i = 0; i < kLanes; ++i) x[i] = f(x[i]);
  return x;
}

// e^x of any x. Without AVX-512 results below 2^-127 are nearly 0.
inline Vec exp_of_any(Vec x) {
#if defined(__AVX512F__)
  return exp(smaller(splat(1000.0f), x));
#else  // e^x is the square of e^(x/2) to within an ulp more, and exp takes no x beyond 88
  constexpr float kLarge = 64.0f;
  const Vec least = larger(splat(0.0f), x - kLarge), most = smaller(splat(64.0f), least);
  return exp(x - least) * exp(most);
#endif
}

// x = m 2^e with m from sqrt(1/2) to sqrt(2). log x = e ln 2 + f - f^2 / 2 + f^3 p(f), f = m - 1; p is a minimax fit of
// the result's relative error, 6e-9.
struct Logarithm {
  Vec e, f, rest;  // log m = f + rest
  explicit Logarithm(Vec x) {
    const VecI small = x < 0x1p-126f;
    x = small ? x * 0x1p24f : x;
    const VecI power = (as_int(x) - 0x3F3504F3) >> 23;
    f = as_float(as_int(x) - (power << 23)) - 1.0f;
    e = __builtin_convertvector(power + (small & -24), Vec);
    Vec p = splat(-0x1.38b576p-4f);
    p = p * f + 0x1.055b68p-3f;
    p = p * f - 0x1.0d8542p-3f;
    p = p * f + 0x1.22da1ep-3f;
    p = p * f - 0x1.547244p-3f;
    p = p * f + 0x1.99a008p-3f;
    p = p * f - 0x1.000226p-2f;
    p = p * f + 0x1.555554p-2f;
    rest = f * f * (f * p - 0.5f);
  }
  // `found`, or the logarithm of 0, infinity, NaN and what is below 0.
  static Vec checked(Vec x, Vec found) {
    constexpr float kInfinity = __builtin_inff();
    found = x == splat(kInfinity) ? x : found;
    found = x == Vec{} ? splat(-kInfinity) : found;
    return x >= Vec{} ? found : splat(__builtin_nanf(""));
  }
};
inline Vec log(Vec x) {
  const Logarithm l(x);  // ln 2 in two parts: e times the first is exact
  return Logarithm::checked(x, l.e * 0.693359375f + (l.f + (l.rest - l.e * 2.12194440e-4f)));
}
inline Vec log2(Vec x) {
  const Logarithm l(x);
  return Logarithm::checked(x, l.e + (l.f * kLog2E + l.rest * kLog2E));
}

inline Vec sqrt(Vec x) {
#if defined(__AVX512F__)
  return (Vec)_mm512_sqrt_ps((__m512)x);
#elif defined(__AVX2__)
  return (Vec)_mm256_sqrt_ps((__m256)x);
#elif defined(__SSE2__)
  return (Vec)_mm_sqrt_ps((__m128)x);
#else
  return by_lane(x, [](float each) { return __builtin_sqrtf(each); });
#endif
}

inline Vec floor(Vec x) {
  const VecI fits = (as_int(x) & 0x7FFFFFFF) < as_int(splat(0x1p23f));  // others are integers, infinite or NaN
  const Vec whole = __builtin_convertvector(__builtin_convertvector(fits ? x : Vec{}, VecI), Vec);
  return fits ? whole + __builtin_convertvector((VecI)(whole > x), Vec) : x;
}

// NaN if one is. `pick` takes the second if one is.
template <class F> inline FK_INLINE Vec with_nan(Vec a, Vec b, F&& pick) {
  return a == a ? pick(a, b) : a;
}

// Towards 0; NaN gives 0, and the result is at most 2^30 in size.
inline VecI truncated(Vec x) {
  x = x == x ? x : Vec{};
  return __builtin_convertvector(smaller(splat(0x1p30f), larger(splat(-0x1p30f), x)), VecI);
}

// The quotient rounded down, and its remainder; 0 by 0. The quotient in double, rounded to an integer towards 0, is
// exact: a fraction is at least 2^-31 of it from the next integer.
struct Division {
  VecI quotient, remainder;
  Division(VecI a, VecI b) {
    constexpr int kHalf = kLanes / 2;
    typedef double Doubles __attribute__((vector_size(kHalf * 8)));
    typedef int32_t Ints __attribute__((vector_size(kHalf * 4)));
    const VecI none = b == 0;
    b = none ? VecI{} + 1 : b;
    for (int i = 0; i < 2; ++i) {
      Ints x, y;
      std::memcpy(&x, reinterpret_cast<const char*>(&a) + i * sizeof(x), sizeof(x));
      std::memcpy(&y, reinterpret_cast<const char*>(&b) + i * sizeof(y), sizeof(y));
      const Ints q =
          __builtin_convertvector(__builtin_convertvector(x, Doubles) / __builtin_convertvector(y, Doubles), Ints);
      std::memcpy(reinterpret_cast<char*>(&quotient) + i * sizeof(q), &q, sizeof(q));
    }
    remainder = a - quotient * b;
    const VecI down = (remainder != 0) & ((remainder ^ b) < 0);
    quotient = (quotient + down) & ~none;
    remainder = (remainder + (b & down)) & ~none;
  }
};

}  // namespace FK_ISA
}  // namespace foundry
