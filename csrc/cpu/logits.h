// What the kernels of cross_entropy.cpp, log_probs.cpp and kl_div.cpp share: rows of logits. Compiled once per
// instruction set.
#pragma once

#include <algorithm>
#include <limits>

#include "math.h"

namespace foundry {
namespace FK_ISA {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
// Columns that are read twice, for the maximum and for the exponentials. They fit in the L1 cache.
constexpr int64_t kBlock = 2048;

// The lanes that `at` reads; `otherwise` in the other lanes.
inline FK_INLINE Vec masked(Whole, Vec v, float) { return v; }
inline FK_INLINE Vec masked(Part at, Vec v, float otherwise) {
  VecI lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
  return lane < at.count ? v : splat(otherwise);
}

inline float largest(const Vec (&v)[4]) {
  const Vec top = larger(larger(v[0], v[1]), larger(v[2], v[3]));
  float found = top[0];
  for (int i = 1; i < kLanes; ++i) found = std::max(found, top[i]);
  return found;
}

// The soft cap of logits and its derivative.
template <bool kCap>
struct Cap {
  float cap, inverse;
  explicit Cap(float cap) : cap(cap), inverse(kCap ? 1.0f / cap : 0.0f) {}
  FK_INLINE Vec operator()(Vec x) const {
    if constexpr (kCap) return cap * tanh(x * inverse);
    return x;
  }
  float operator()(float x) const { return (*this)(splat(x))[0]; }
  template <class T>
  FK_INLINE T slope(T y) const {  // y is the capped logit
    const T t = y * inverse;
    return 1.0f - t * t;
  }
};

// Below this distance from the largest logit an exponential is 0. It replaces minus infinity in products with it.
constexpr float kFar = -1000.0f;

inline FK_INLINE Vec not_farther(Vec below) {
  return below < kFar ? splat(kFar) : below;
}  // NaN stays

// The maximum m of a row's logits y and, over all classes but the target, the sum of exp(y - m). With the entropy also
// the sum of exp(y - m) (y - m). The caller starts with the target's logit as the maximum; with minus infinity, no
// class is left out. With the statistics also the sums of exp(y - m)^2 and y, and the largest logit before the soft
// cap, under which different ones may become equal.
template <class X, bool kCap, bool kEntropy, bool kStats = false>
struct ExpSums {
  const X* x;
  Vec logit_scale;
  Cap<kCap> cap;
  float max;
  Vec exps[4] = {}, products[4] = {}, squares[4] = {}, totals[4] = {};
  float others = -kInfinity;

  void add(int64_t begin, int64_t end) {
    for (int64_t col = begin; col < end; col += kBlock) add_block(x + col, std::min(kBlock, end - col));
  }

  void add_block(const X* in, int64_t count) {
    Vec top[4] = {splat(-kInfinity), splat(-kInfinity), splat(-kInfinity), splat(-kInfinity)};
    for_each_vec(count, [&](int64_t i, auto at, int k) FK_INLINE {
      const Vec v = masked(at, at.load(in + i) * logit_scale, -kInfinity);
      top[k] = larger(v, top[k]);  // never NaN: that would hide larger values
    });
    const float uncapped = largest(top), found = cap(uncapped);
    if constexpr (kStats) others = std::max(others, uncapped);
    if (found > max) {
      const float step = max == -kInfinity ? 0.0f : max - found;  // without a finite logit so far, the sums are 0
      const Vec scale = splat(std::exp(max - found));
      for (int k = 0; k < 4; ++k) {
        if constexpr (kEntropy) products[k] = scale * (products[k] + step * exps[k]);
        exps[k] *= scale;
        if constexpr (kStats) squares[k] *= scale * scale;
      }
      max = found;
    }
    const Vec shift = splat(max == -kInfinity ? 0.0f : max);
    for_each_vec(count, [&](int64_t i, auto at, int k) FK_INLINE {
      __builtin_prefetch(in + i + kBlock);
      const Vec y = cap(at.load(in + i) * logit_scale);
      const Vec below = masked(at, y - shift, -kInfinity), e = exp(below);
      exps[k] += e;
      if constexpr (kEntropy) products[k] += e * not_farther(below);
      if constexpr (kStats) {
        squares[k] += e * e;
        totals[k] += masked(at, y, 0.0f);
      }
    });
  }
};

template <class X>
inline float load_one(const X* p) {
  return Part{1}.load(p)[0];
}

// Writes value(i, access) to a row of n columns; streamed past the caches if asked for. The caller
// ends with `stream_fence`.
template <class X, class F>
inline FK_INLINE void write_row(X* row, int64_t n, bool streamed, F&& value) {
  // A row may start anywhere, but streaming stores need register alignment.
  int64_t head = 0;
  if (streamed) {
    constexpr uintptr_t kAlign = kLanes * sizeof(X);
    head = std::min<int64_t>(n, (kAlign - reinterpret_cast<uintptr_t>(row) % kAlign) % kAlign / sizeof(X));
  }
  for_each_vec(head, [&](int64_t i, auto at, int) FK_INLINE { at.store(row + i, value(i, at)); });
  for_each_vec(n - head, [&](int64_t i, auto at, int) FK_INLINE {
    at.store(row + head + i, value(head + i, at), streamed);
  });
}

}  // namespace FK_ISA
}  // namespace foundry
