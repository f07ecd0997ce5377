// Scores of few query rows, as inner products along the lanes: keys are read once, straight from memory.
//
// The backward pass takes the scores of rows that decode has done from here too. Its own products add in another order,
// and what that changes in a large score would change the weights against lse.
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
constexpr int kSums = 16;  // registers that sums are formed in
#else
constexpr int kSums = 8;
#endif

// Lane i is the sum of v[i]'s lanes.
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

// The sum of v's lanes, added as sums_of does.
inline float sum_of(Vec v) {
  float lanes[kLanes];
  Whole::store(lanes, v);
  for (int step = 1; step < kLanes; step *= 2)
    for (int i = 0; i < kLanes; i += 2 * step) lanes[i] += lanes[i + step];
  return lanes[0];
}

// Whether rows of T are read as 32-bit words, the even elements of which go to one register and the odd ones to the
// next: a shift and a mask, where elements in order would be moved across lanes. What goes with them lies in that
// order, see split_in_place; what is left of a row beyond a multiple of kSplitStep is in order. The processor's
// products of pairs (vdpbf16ps) would want pairs of rows of values, which take a permutation for each register, and are
// no faster than the two products that take their place. What reads no values may take them: kInPairs of multiply_keys.
template <class T> constexpr bool kReadSplit = std::is_same_v<T, BFloat16>;
constexpr int kSplitStep = 2 * kLanes;

// Rows of memory that are read, and those that come after them. The processor's own prefetching knows nothing of the
// change between keys and values; without this it reads memory at half its rate.
template <class T> struct Stream {
  typedef T Element;
  const T* data;
  int64_t stride;
  const T* next;

  const T* row(int64_t key) const { return data + key * stride; }
  void prefetch(int64_t key, int64_t i) const { __builtin_prefetch(next + key * stride + i, 0, 2); }
};

// The same of rows that lie anywhere, as those in pages do.
template <class T> struct ScatteredStream {
  typedef T Element;
  const T *const *rows, *const *next;  // `next` has kSums more than there are

  const T* row(int64_t key) const { return rows[key]; }
  void prefetch(int64_t key, int64_t i) const { __builtin_prefetch(next[key] + i, 0, 2); }
};

// Queries of floats as multiply_keys<T> wants them.
template <class T>
inline void order_queries(float* queries, int64_t rows, int64_t head_dim, int64_t ld) {
  if constexpr (kReadSplit<T>)
    for (int64_t r = 0; r < rows; ++r) split_in_place(queries + r * ld, head_dim);
}

// scores[row][key] = query . key for kRows rows, `n` keys of a stream; `scores` has room for kSums more. After
// order_queries, or in pairs, with queries of pairs.
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
