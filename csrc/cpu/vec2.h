// Two registers of floats, with loads and stores of as many elements: the unit of elementwise kernels.
//
// If all tensors are bfloat16, a kernel reads them split: as 32-bit words whose even elements go to one register and
// whose odd elements go to the other. That takes a shift and a mask; keeping the order would take moves across lanes.
// Writing is just as cheap. Floats that are combined with such elements (weights) are stored in the same order: see
// split_in_place.
#pragma once

#include <utility>

#include "vec.h"

namespace foundry {
namespace FK_ISA {

struct Vec2 {
  Vec a, b;
};

inline Vec2 operator+(Vec2 x, Vec2 y) { return {x.a + y.a, x.b + y.b}; }
inline Vec2 operator-(Vec2 x, Vec2 y) { return {x.a - y.a, x.b - y.b}; }
inline Vec2 operator*(Vec2 x, Vec2 y) { return {x.a * y.a, x.b * y.b}; }
inline Vec2 operator*(Vec2 x, Vec y) { return {x.a * y, x.b * y}; }
inline Vec2 operator+(Vec2 x, Vec y) { return {x.a + y, x.b + y}; }
inline Vec2 operator-(Vec2 x, Vec y) { return {x.a - y, x.b - y}; }

// bfloat16 numbers in 32-bit words, the first of two in the lower half.
constexpr uint32_t kUpper = 0xFFFF0000u;

inline Vec2 even_and_odd(VecU words) { return {bit_cast<Vec>(words << 16), bit_cast<Vec>(words & kUpper)}; }

// Rounds v to bfloat16 in the upper half of each lane. NaN stays NaN: the lower half of the default NaN and of NaNs
// widened from 16 bits is 0, so nothing carries. Other NaNs (from weights or tables) are replaced when they are read.
inline VecU rounded_up(Vec v) {
  const VecU u = bit_cast<VecU>(v);
  return u + 0x7FFFu + ((u >> 16) & 1u);
}

inline VecU joined(VecU even, VecU odd) {
#if defined(__AVX512BW__)
  return (VecU)_mm512_mask_blend_epi16(0xAAAAAAAA, (__m512i)(even >> 16), (__m512i)odd);
#elif defined(__AVX2__)
  return (VecU)_mm256_blend_epi16((__m256i)(even >> 16), (__m256i)odd, 0xAA);
#else
  return (even >> 16) | (odd & kUpper);
#endif
}

// Access to 2 * kLanes elements. With kSplit, BFloat16 elements are split and floats are stored in that order.
template <bool kSplit>
struct Whole2 {
  template <class T> static constexpr bool kWords = kSplit && std::is_same_v<T, BFloat16>;

  template <class T> static Vec2 load(const T* p) {
    if constexpr (kWords<T>) {
      VecU words;
      std::memcpy(&words, p, sizeof(words));
      return even_and_odd(words);
    } else {
      return {Whole::load(p), Whole::load(p + kLanes)};
    }
  }
  template <class T> static void store(T* p, Vec2 v, bool streamed = false) {
    if constexpr (kWords<T>) {
      const VecU words = joined(rounded_up(v.a), rounded_up(v.b));
      if (streamed) stream(p, words);
      else std::memcpy(p, &words, sizeof(words));
    } else {
      Whole::store(p, v.a, streamed);
      Whole::store(p + kLanes, v.b, streamed);
    }
  }
  // Returns the stored value.
  template <class T> static Vec2 store_rounded(T* p, Vec2 v) {
    if constexpr (kWords<T>) {
      const VecU even = rounded_up(v.a), odd = rounded_up(v.b), words = joined(even, odd);
      std::memcpy(p, &words, sizeof(words));
      return {bit_cast<Vec>(even & kUpper), bit_cast<Vec>(odd & kUpper)};
    } else {
      return {Whole::store_rounded(p, v.a), Whole::store_rounded(p + kLanes, v.b)};
    }
  }
  static Vec2 within(Vec2 v) { return v; }
  template <class T> static Vec2 rounded(Vec2 v) {
    if constexpr (kWords<T>) return {bit_cast<Vec>(rounded_up(v.a) & kUpper), bit_cast<Vec>(rounded_up(v.b) & kUpper)};
    else return {FK_ISA::rounded<T>(v.a), FK_ISA::rounded<T>(v.b)};
  }
};

// Access to the first `count` of 2 * kLanes elements, in order: the remainder of a row is not split.
struct Part2 {
  int count;
  template <class T> Vec2 load(const T* p) const {
    if (count <= kLanes) return {Part{count}.load(p), Vec{}};
    return {Whole::load(p), Part{count - kLanes}.load(p + kLanes)};
  }
  template <class T> void store(T* p, Vec2 v, bool = false) const {
    if (count <= kLanes) return Part{count}.store(p, v.a);
    Whole::store(p, v.a);
    Part{count - kLanes}.store(p + kLanes, v.b);
  }
  template <class T> Vec2 store_rounded(T* p, Vec2 v) const {
    if (count <= kLanes) return {Part{count}.store_rounded(p, v.a), Vec{}};
    return {Whole::store_rounded(p, v.a), Part{count - kLanes}.store_rounded(p + kLanes, v.b)};
  }
  // v with zeros in place of what lies beyond the elements.
  Vec2 within(Vec2 v) const {
    Vec2 out{};
    std::memcpy(&out, &v, count * sizeof(float));
    return out;
  }
  template <class T> static Vec2 rounded(Vec2 v) { return {FK_ISA::rounded<T>(v.a), FK_ISA::rounded<T>(v.b)}; }
};

// Calls f(i, access, k) for i = 0, 2 * kLanes, ... < n. `k` is 0 or 2: the first of two of the four accumulators, so
// that successive additions do not depend on each other.
template <bool kSplit, class F>
inline FK_INLINE void for_each_vec2(int64_t n, F&& f) {
  constexpr int kStep = 2 * kLanes;
  int64_t i = 0;
  for (; i + 2 * kStep <= n; i += 2 * kStep) {
    f(i, Whole2<kSplit>{}, 0);
    f(i + kStep, Whole2<kSplit>{}, 2);
  }
  if (i + kStep <= n) f(i, Whole2<kSplit>{}, 0), i += kStep;
  if (i < n) f(i, Part2{(int)(n - i)}, 2);
}

// Calls f(i, access) for the same i: for an f without accumulators, which is compiled twice, not four times.
template <bool kSplit, class F>
inline FK_INLINE void for_each_vec2_alone(int64_t n, F&& f) {
  constexpr int kStep = 2 * kLanes;
  int64_t i = 0;
#pragma GCC unroll 1
  for (; i + kStep <= n; i += kStep) f(i, Whole2<kSplit>{});
  if (i < n) f(i, Part2{(int)(n - i)});
}

// Converts two registers of consecutive floats into even and odd ones, and back.
template <int... kLane>
inline Vec2 split(Vec2 v, std::integer_sequence<int, kLane...>) {
#if defined(__clang__)
  return {__builtin_shufflevector(v.a, v.b, (2 * kLane)...), __builtin_shufflevector(v.a, v.b, (2 * kLane + 1)...)};
#else
  return {__builtin_shuffle(v.a, v.b, VecI{(2 * kLane)...}), __builtin_shuffle(v.a, v.b, VecI{(2 * kLane + 1)...})};
#endif
}
template <int... kLane>
inline Vec2 in_order(Vec2 v, std::integer_sequence<int, kLane...>) {
  constexpr int kHalf = kLanes / 2;
#if defined(__clang__)
  return {__builtin_shufflevector(v.a, v.b, (kLane / 2 + kLane % 2 * kLanes)...),
          __builtin_shufflevector(v.a, v.b, (kHalf + kLane / 2 + kLane % 2 * kLanes)...)};
#else
  return {__builtin_shuffle(v.a, v.b, VecI{(kLane / 2 + kLane % 2 * kLanes)...}),
          __builtin_shuffle(v.a, v.b, VecI{(kHalf + kLane / 2 + kLane % 2 * kLanes)...})};
#endif
}

// Reorders floats into the order of a split row of n elements. Replaces NaN by the default NaN, which rounded_up needs.
inline void split_in_place(float* p, int64_t n) {
  const Vec nan = splat(__builtin_nanf(""));
  const auto own_nan = [&](Vec v) FK_INLINE { return v == v ? v : nan; };
  for (int64_t i = 0; i + 2 * kLanes <= n; i += 2 * kLanes) {
    const Vec2 v = Whole2<true>::load(p + i);
    Whole2<true>::store(p + i, split(Vec2{own_nan(v.a), own_nan(v.b)}, std::make_integer_sequence<int, kLanes>{}));
  }
}

// The reverse.
inline void put_in_order(float* p, int64_t n) {
  for (int64_t i = 0; i + 2 * kLanes <= n; i += 2 * kLanes)
    Whole2<true>::store(p + i, in_order(Whole2<true>::load(p + i), std::make_integer_sequence<int, kLanes>{}));
}

// Whether streaming stores pay off and work: the output is larger than the caches, and all its rows are
// register-aligned.
template <class T>
bool worth_streaming(const T* out, const Rows& rows, int64_t n_cols) {
  constexpr uintptr_t kAlign = sizeof(Vec);
  return out && rows.count() * n_cols * int64_t(sizeof(T)) > kStreamBytes &&
         reinterpret_cast<uintptr_t>(out) % kAlign == 0 && n_cols * sizeof(T) % kAlign == 0;
}

}  // namespace FK_ISA
}  // namespace foundry
