// Scores of few query rows, as dot products along the lanes. Keys are read once, straight from memory.
//
// The backward pass recomputes scores of decoded rows with this code too: its own matmuls add in another order, and for
// a large score that difference would change the weights relative to lse.
#pragma once

#include <algorithm>
#include <type_traits>

#include "flash_attention_gemm.h"
#include "flash_attention_pairs.h"
#include "transpose.h"
#include "vec2.h"

namespace foundry {
namespace FK_ISA {

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kSums = 16;  // registers that hold sums
#else
constexpr int kSums = 8;
#endif

// Lane i of the result is the sum of v[i]'s lanes.
template <int kStep = 1>
inline FK_INLINE Vec sums_of(Vec* v) {
  if constexpr (kStep < kLanes) {
    constexpr auto lanes = std::make_integer_sequence<int, kLanes>{};
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; i += 2 * kStep)
      v[i] = exchanged<kStep, false>(v[i], v[i + kStep], lanes) + exchanged<kStep, true>(v[i], v[i + kStep], lanes);
    return sums_of<2 * kStep>(v);
  } else {
    return v[0];
  }
}

// The sum of v's lanes, added in the order of sums_of.
inline float sum_of(Vec v) {
  float lanes[kLanes];
  Whole::store(lanes, v);
  for (int step = 1; step < kLanes; step *= 2)
    for (int i = 0; i < kLanes; i += 2 * step) lanes[i] += lanes[i + step];
  return lanes[0];
}

// Whether rows of T are read split: as 32-bit words whose even elements go to one register and whose odd elements go to
// the next. That takes a shift and a mask; keeping the order would take moves across lanes. Their counterpart must be
// in the same order, see split_in_place; the part of a row beyond a multiple of kSplitStep is in order. The pair
// instruction (vdpbf16ps) would need pairs of rows of values, with a permutation per register, and is no faster than
// the two multiplications here. Code that reads no values may use it: kInPairs of multiply_keys.
template <class T> constexpr bool kReadSplit = std::is_same_v<T, BFloat16>;
constexpr int kSplitStep = 2 * kLanes;

// The rows to read, and those that follow. The hardware prefetcher cannot follow the switch between keys and values;
// without this, memory is read at half the speed.
template <class T> struct Stream {
  typedef T Element;
  const T* data;
  int64_t stride;
  const T* next;

  const T* row(int64_t key) const { return data + key * stride; }
  void prefetch(int64_t key, int64_t i) const { __builtin_prefetch(next + key * stride + i, 0, 2); }
};

// Same for rows anywhere in memory, such as rows in pages.
template <class T> struct ScatteredStream {
  typedef T Element;
  const T *const *rows, *const *next;  // `next` has kSums extra entries

  const T* row(int64_t key) const { return rows[key]; }
  void prefetch(int64_t key, int64_t i) const { __builtin_prefetch(next[key] + i, 0, 2); }
};

// Float queries in the order that multiply_keys<T> needs.
template <class T>
inline void order_queries(float* queries, int64_t rows, int64_t head_dim, int64_t ld) {
  if constexpr (kReadSplit<T>)
    for (int64_t r = 0; r < rows; ++r) split_in_place(queries + r * ld, head_dim);
}

// scores[row][key] = query . key for kRows rows and the `n` keys of a stream. `scores` has room for kSums extra. Call
// order_queries first, unless kInPairs, whose queries are pairs.
template <int kRows, bool kInPairs = false, class Keys>
void multiply_keys(const float* queries, int64_t ld_queries, int64_t head_dim, const Keys& keys, int64_t n,
                   float* scores, int64_t ld) {
  typedef typename Keys::Element T;
  constexpr int kKeys = kSums / kRows;
  for (int64_t key = 0; key < n; key += kKeys) {
    const T* rows[kKeys];
#pragma GCC unroll 16
    for (int j = 0; j < kKeys; ++j) rows[j] = keys.row(std::min(key + j, n - 1));
    Vec acc[kSums] = {};
    const auto add = [&](int64_t i, const Vec(&k)[kKeys]) FK_INLINE {
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const Vec q = Whole::load(queries + r * ld_queries + i);
#pragma GCC unroll 16
        for (int j = 0; j < kKeys; ++j) acc[r * kKeys + j] += q * k[j];
      }
    };
    const auto step = [&](int64_t i, auto at) FK_INLINE {
      Vec k[kKeys];
#pragma GCC unroll 16
      for (int j = 0; j < kKeys; ++j) {
        k[j] = at.load(rows[j] + i);
        keys.prefetch(key + j, i);
      }
      add(i, k);
    };
    int64_t i = 0;
#if defined(FK_PAIRS)
    if constexpr (kInPairs) {
      const auto step_of_pairs = [&](int64_t count) FK_INLINE {
        Vec k[kKeys];
#pragma GCC unroll 16
        for (int j = 0; j < kKeys; ++j) {
          k[j] = load_columns(rows[j] + i, count);
          keys.prefetch(key + j, i);
        }
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
          const Vec q = Whole::load(queries + r * ld_queries + i / 2);
#pragma GCC unroll 16
          for (int j = 0; j < kKeys; ++j) accumulate<BFloat16>(acc[r * kKeys + j], q, k[j]);
        }
      };
      for (; i + kSplitStep <= head_dim; i += kSplitStep) step_of_pairs(kSplitStep);
      if (i < head_dim) step_of_pairs(head_dim - i);
      i = head_dim;
    }
#endif
    if constexpr (kReadSplit<T>) {
      for (; i + kSplitStep <= head_dim; i += kSplitStep) {
        Vec even[kKeys], odd[kKeys];
#pragma GCC unroll 16
        for (int j = 0; j < kKeys; ++j) {
          const Vec2 k = Whole2<true>::load(rows[j] + i);
          even[j] = k.a, odd[j] = k.b;
          keys.prefetch(key + j, i);
        }
        add(i, even);
        add(i + kLanes, odd);
      }
    }
    for (; i + kLanes <= head_dim; i += kLanes) step(i, Whole{});
    if (i < head_dim) step(i, Part{int(head_dim - i)});
    float found[kSums];
#pragma GCC unroll 16
    for (int g = 0; g < kSums; g += kLanes) Whole::store(found + g, sums_of(acc + g));
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) std::memcpy(scores + r * ld + key, found + r * kKeys, kKeys * sizeof(float));
  }
}

}  // namespace FK_ISA
}  // namespace foundry
