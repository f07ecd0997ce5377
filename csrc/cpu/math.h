// Functions of a float register for which the processor has no instruction. Compiled once per instruction set.
//
// The polynomial coefficients are minimax fits of the relative error, computed for these forms in double precision.
#pragma once

#include "vec.h"

namespace foundry {
namespace FK_ISA {

// The larger of two; the second if one is NaN.
inline Vec larger(Vec a, Vec b) {
#if defined(__AVX512F__)
  return (Vec)_mm512_maskz_max_ps(0xFFFF, (__m512)a, (__m512)b);
#elif defined(__AVX__)
  return (Vec)_mm256_max_ps((__m256)a, (__m256)b);
#elif defined(__SSE__)
  return (Vec)_mm_max_ps((__m128)a, (__m128)b);
#else
  return a > b ? a : b;
#endif
}

// The smaller of two; the second if one is NaN.
inline Vec smaller(Vec a, Vec b) {
#if defined(__AVX512F__)
  return (Vec)_mm512_maskz_min_ps(0xFFFF, (__m512)a, (__m512)b);
#elif defined(__AVX__)
  return (Vec)_mm256_min_ps((__m256)a, (__m256)b);
#elif defined(__SSE__)
  return (Vec)_mm_min_ps((__m128)a, (__m128)b);
#else
  return a < b ? a : b;
#endif
}

// p * 2^n for an integer n. Without an instruction for it, n is limited to -254 .. 254.
inline FK_INLINE Vec scale_by_power(Vec p, Vec n) {
#if defined(__AVX512F__)
  return (Vec)_mm512_scalef_ps((__m512)p, (__m512)n);
#else  // two factors, which are normal numbers even if 2^n is not
  const VecI whole = __builtin_convertvector(n, VecI), half = whole >> 1;
  return p * bit_cast<Vec>((half + 127) << 23) * bit_cast<Vec>((whole - half + 127) << 23);
#endif
}

constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, which lies in the last bits

// kTimes 2^f, |f| <= 1/2. kShort, for results of 16 bits: relative error up to 2.7e-6.
template <bool kShort = false, int kTimes = 1>
inline FK_INLINE Vec exp2_fraction(Vec f) {
  if constexpr (kShort) {
    Vec p = splat(kTimes * 0x1.3997dap-7f);
    p = p * f + kTimes * 0x1.ca1444p-5f;
    p = p * f + kTimes * 0x1.ec06dap-3f;
    p = p * f + kTimes * 0x1.62e0dcp-1f;
    return p * f + kTimes * 0x1.ffffe8p-1f;
  }
  Vec p = splat(kTimes * 0x1.41fb2ep-13f);
  p = p * f + kTimes * 0x1.5f3f3p-10f;
  p = p * f + kTimes * 0x1.3b2d5p-7f;
  p = p * f + kTimes * 0x1.c6aee6p-5f;
  p = p * f + kTimes * 0x1.ebfbdcp-3f;
  p = p * f + kTimes * 0x1.62e43p-1f;
  return p * f + kTimes * 1.0f;
}

// 2^t. The error is at most 1.5 ulp for normal results and one step for subnormal ones. 0 below -150, infinity from
// 128 on, NaN for NaN.
//
// e^v is exp2(v * kLog2E). Rounding the product shifts the exponent by half an ulp, so the relative error grows by up
// to 8e-8 |v|.
//
// 2^t = 2^n 2^f, n = t rounded, |f| <= 1/2.
template <bool kShort = false>
inline FK_INLINE Vec exp2(Vec t) {
#if defined(__AVX512F__)
  const Vec n = (Vec)_mm512_roundscale_ps((__m512)t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const Vec f = (Vec)_mm512_reduce_ps((__m512)t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);  // 0 for an infinity
#else
  constexpr float kLowest = -151.0f, kHighest = 128.0f;  // beyond these the result does not change
  t = smaller(splat(kHighest), larger(splat(kLowest), t));
  const Vec n = (t + kRound) - kRound, f = t - n;
#endif
  return scale_by_power(exp2_fraction<kShort>(f), n);
}

constexpr float kLog2E = 1.44269504f;

// e^x for x up to 88. The error is at most 1 ulp near 0 and 3 ulp at -80. 0 below -104 (without AVX-512 below -87.7,
// where 2^n is not a normal number), NaN for NaN. Unlike exp2(x * log2(e)), the error hardly grows with |x|.
//
// e^x = 2^n e^r, n = x / ln 2 rounded, r = x - n ln 2.
inline FK_INLINE Vec exp(Vec x) {
  // A result of 0 comes from n alone: a real underflow takes the processor 70 ns.
#if defined(__AVX512F__)
  constexpr float kLowest = -1000.0f, kShift = kRound;
#else
  constexpr float kLowest = -88.0f, kShift = kRound + 127.0f;  // n >= -127: the bits are 2^n's exponent
#endif
  x = larger(splat(kLowest), x);
  const Vec shifted = x * kLog2E + kShift, n = shifted - kShift;
#if defined(__FMA__) || defined(__AVX512F__) || defined(__ARM_FEATURE_FMA)  // fused: the product is not rounded
  const Vec r = x - n * 0x1.62e43p-1f;
#else  // ln 2 in two parts: n times the first is exact
  const Vec r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
#endif
  Vec p = splat(0x1.6a23bcp-10f);
  p = p * r + 0x1.123a2ap-7f;
  p = p * r + 0x1.5558f4p-5f;
  p = p * r + 0x1.555490p-3f;
  p = p * r + 0x1.fffffcp-2f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
#if defined(__AVX512F__)
  return scale_by_power(p, n);
#else
  return p * bit_cast<Vec>(bit_cast<VecU>(shifted) << 23);
#endif
}

// 1 + e^-v, the inverse of the logistic function; infinity if e^-v is.
template <bool kShort = false>
inline FK_INLINE Vec logistic_denominator(Vec v) {
#if defined(__AVX512F__)
  return 1.0f + exp2<kShort>(v * -kLog2E);
#else
  // As exp2, but what is lost beside 1 may become 0. With a factor of 2 in the polynomial one number holds the power.
  constexpr float kLowest = -89.5f, kHighest = 87.3f, kShift = kRound + 126.0f;  // powers from 2^-126 to infinity
  v = smaller(splat(kHighest), larger(splat(kLowest), v));
  const Vec shifted = v * -kLog2E + kShift, f = v * -kLog2E - (shifted - kShift);
  return 1.0f + exp2_fraction<kShort, 2>(f) * bit_cast<Vec>(bit_cast<VecU>(shifted) << 23);
#endif
}

// The normal distribution: its density times sqrt(2 pi), and its cumulative distribution function at v. The tail is
// e^(-z^2/2) f(z), z = |v|, with f a polynomial in 1 / (1 + 0.35 z), so that small values stay precise: the relative
// error is within 1e-5 and the absolute error within 2e-7.
struct Normal {
  Vec density, below;
};
template <bool kShort = false>
inline FK_INLINE Normal normal(Vec v) {
  const Vec z = v < splat(0.0f) ? -v : v;
  const Vec density = exp2<kShort>(z * z * (-0.5f * kLog2E));
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

// tanh with a relative error up to 3e-7: -e / (e + 2), where e = 2^y - 1 is computed without cancellation and y = -2
// |v| / ln 2.
inline Vec tanh(Vec v) {
  const Vec magnitude = v < Vec{} ? -v : v;
  Vec y = larger(magnitude * (-2.0f * kLog2E), splat(-60.0f));
  y = v == v ? y : v;
  const Vec n = (y + kRound) - kRound, r = y - n;
  Vec p = splat(0.00015345812f);  // (2^r - 1) / r
  p = p * r + 0.0013399931f;
  p = p * r + 0.0096184891f;
  p = p * r + 0.055503286f;
  p = p * r + 0.24022646f;
  p = p * r + 0.69314718f;
  const Vec power = bit_cast<Vec>((__builtin_convertvector(n, VecI) + 127) << 23);
  const Vec e = (power - 1.0f) + power * (p * r);
  const Vec t = e / (e + 2.0f);
  return v < Vec{} ? t : -t;
}

}  // namespace FK_ISA
}  // namespace foundry
