// Scores of few query rows, as inner products along the lanes: keys are read once, straight from memory.
//
// The backward pass takes the scores of rows that decode has done from here too. Its own products add in another order,
// and what that changes in a large score would change the weights against lse.
#pragma once

#include <algorithm>
#include <type_traits>

#include "flash_attention_gemm.h"
#include "transpose.h"

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

// What products of T's factors are made of, see flash_attention_gemm.h.
template <class T> using Product = std::conditional_t<kPairs && std::is_same_v<T, BFloat16>, BFloat16, float>;

// A register of E's lanes from memory.
template <class E, class Access, class T>
inline Vec load_lanes(Access at, const T* p) {
  if constexpr (kPer<E> == 1) {
    return at.load(p);
  } else {
    Vec bits{};
    if constexpr (std::is_same_v<Access, Whole>) std::memcpy(&bits, p, sizeof(bits));
    else std::memcpy(&bits, p, at.count * sizeof(T));
    return bits;
  }
}

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

// scores[row][key] = query . key for kRows rows, `n` keys of a stream; `scores` has room for kSums more.
template <int kRows, class Keys>
void multiply_keys(const float* queries, int64_t head_dim, const Keys& keys, int64_t n, float* scores, int64_t ld) {
  typedef typename Keys::Element T;
  typedef Product<T> E;
  constexpr int kKeys = kSums / kRows;
  constexpr int64_t kStep = kLanes * kPer<E>;
  const int64_t lanes = lanes_of<E>(head_dim);
  for (int64_t key = 0; key < n; key += kKeys) {
    const T* rows[kKeys];
#pragma GCC unroll 16
    for (int j = 0; j < kKeys; ++j) rows[j] = keys.row(std::min(key + j, n - 1));
    Vec acc[kSums] = {};
    const auto step = [&](int64_t i, auto at) FK_INLINE {
      Vec k[kKeys];
#pragma GCC unroll 16
      for (int j = 0; j < kKeys; ++j) {
        k[j] = load_lanes<E>(at, rows[j] + i);
        keys.prefetch(key + j, i);
      }
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const Vec q = Whole::load(queries + r * lanes + i / kPer<E>);
#pragma GCC unroll 16
        for (int j = 0; j < kKeys; ++j) accumulate<E>(acc[r * kKeys + j], q, k[j]);
      }
    };
    int64_t i = 0;
    for (; i + kStep <= head_dim; i += kStep) step(i, Whole{});
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
