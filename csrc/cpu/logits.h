// What the kernels of cross_entropy.cpp and log_probs.cpp share: rows of logits. Compiled once per instruction set.
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

template <class X>
inline float load_one(const X* p) {
  return Part{1}.load(p)[0];
}

// Writes value(i, access) to a row of n columns; streamed past the caches if asked for. The caller
// ends with `stream_fence`.
template <bool kStream, class X, class F>
inline FK_INLINE void write_row(X* row, int64_t n, F&& value) {
  // A row may start anywhere, but streaming stores need register alignment.
  int64_t head = 0;
  if constexpr (kStream) {
    constexpr uintptr_t kAlign = kLanes * sizeof(X);
    head = std::min<int64_t>(n, (kAlign - reinterpret_cast<uintptr_t>(row) % kAlign) % kAlign / sizeof(X));
  }
  for_each_vec(head, [&](int64_t i, auto at, int) FK_INLINE { at.store(row + i, value(i, at)); });
  for_each_vec(n - head, [&](int64_t i, auto at, int) FK_INLINE {
    at.template store_to<kStream>(row + head + i, value(head + i, at));
  });
}

}  // namespace FK_ISA
}  // namespace foundry
