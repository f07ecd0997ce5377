// Transposition in registers.
#pragma once

#include <utility>

#include "vec.h"

namespace foundry {
namespace FK_ISA {

template <int kStep, bool kSecond, int... kLane>
inline Vec exchanged(Vec a, Vec b, std::integer_sequence<int, kLane...>) {
  // The first result has the even blocks of kStep lanes of a and b, the second the odd ones.
  constexpr int kOdd = kSecond ? kStep : 0;
#if defined(__clang__)
  return __builtin_shufflevector(a, b, ((kLane & kStep) ? kLanes + kLane - kStep + kOdd : kLane + kOdd)...);
#else
  return __builtin_shuffle(a, b, VecI{((kLane & kStep) ? kLanes + kLane - kStep + kOdd : kLane + kOdd)...});
#endif
}

template <int kStep>
inline FK_INLINE void exchange(Vec (&rows)[kLanes]) {
  if constexpr (kStep < kLanes) {
    constexpr auto lanes = std::make_integer_sequence<int, kLanes>{};
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      if (i & kStep) continue;
      const Vec a = rows[i], b = rows[i + kStep];
      rows[i] = exchanged<kStep, false>(a, b, lanes);
      rows[i + kStep] = exchanged<kStep, true>(a, b, lanes);
    }
    exchange<2 * kStep>(rows);
  }
}

// out[c][r] = in[r][c]; both sizes are multiples of kLanes.
inline void transpose(const float* in, int64_t ld_in, int64_t rows, int64_t columns, float* out, int64_t ld_out) {
  for (int64_t r = 0; r < rows; r += kLanes)
    for (int64_t c = 0; c < columns; c += kLanes) {
      Vec block[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) block[i] = Whole::load(in + (r + i) * ld_in + c);
      exchange<1>(block);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) Whole::store(out + (c + i) * ld_out + r, block[i]);
    }
}

}  // namespace FK_ISA
}  // namespace foundry
