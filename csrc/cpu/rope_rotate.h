// Shared by the RoPE kernels: tables as they are read, the rotation of a head, loops over tokens and heads.
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "dispatch.h"
#include "multiply_add.h"
#include "rope.h"
#include "vec2.h"

namespace foundry {
namespace FK_ISA {

// Lanes 1, 0, 3, 2, ...
inline Vec swap_neighbours(Vec v) {
#if defined(__AVX512F__)
  return (Vec)_mm512_permute_ps((__m512)v, 0xB1);
#elif defined(__AVX2__)
  return (Vec)_mm256_permute_ps((__m256)v, 0xB1);
#elif defined(__SSE2__)
  return (Vec)_mm_shuffle_ps((__m128)v, (__m128)v, 0xB1);
#elif defined(__aarch64__)
  return (Vec)vrev64q_f32((float32x4_t)v);
#else
  Vec out;
  for (int i = 0; i < kLanes; ++i) out[i] = v[i ^ 1];
  return out;
#endif
}

// Same for 2 * kLanes elements, depending on how they were read.
inline Vec2 swap_neighbours(Whole2<true>, Vec2 v) { return {v.b, v.a}; }
template <class Access> inline Vec2 swap_neighbours(Access, Vec2 v) {
  return {swap_neighbours(v.a), swap_neighbours(v.b)};
}

inline Vec2 multiply_add(Vec2 a, Vec2 b, Vec2 c) { return {multiply_add(a.a, b.a, c.a), multiply_add(a.b, b.b, c.b)}; }

// cos and sin of a few tokens of one sequence, in float and in the order that `rotate` reads. They are read once for
// all heads of q and k and stay in the L1 cache.
class TableBlock {
 public:
  // `split`: heads are read split.
  TableBlock(const RopeTables& tables, bool interleaved, bool inverse, bool split)
      : tables_(tables),
        interleaved_(interleaved),
        split_(split),
        sign_(inverse ? -1.0f : 1.0f),
        row_(round_up((interleaved ? 2 : 1) * tables.half)),
        capacity_(std::max<int64_t>(1, std::min<int64_t>(16, 2048 / row_))),
        memory_(row_ * (2 * capacity_ + 1) + kLanes) {
    const uintptr_t start = reinterpret_cast<uintptr_t>(memory_.data());
    values_ = memory_.data() + (round_up(start / sizeof(float)) - start / sizeof(float));
  }

  int64_t capacity() const { return capacity_; }
  const float* cos(int64_t i) const { return values_ + 2 * row_ * i; }
  const float* sin(int64_t i) const { return cos(i) + row_; }

  void read(int64_t b, int64_t begin, int64_t end) {
    with_type(tables_.type, [&](auto* type) {
      using T = std::remove_pointer_t<decltype(type)>;
      for (int64_t t = begin; t < end; ++t) {
        const int64_t row = tables_.row(b, t);
        float* cos = values_ + 2 * row_ * (t - begin);
        widen(static_cast<const T*>(tables_.cos) + tables_.cos_offset(b, row), cos, 1.0f, 1.0f);
        widen(static_cast<const T*>(tables_.sin) + tables_.sin_offset(b, row), cos + row_, -sign_, sign_);
      }
    });
  }

 private:
  // Rows start at multiples of a register, so that no read crosses a cache line.
  static int64_t round_up(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

  // Widens a row and multiplies it by `odd`. If interleaved, both members of a pair get the value, the first times
  // `even`.
  template <class T>
  void widen(const T* in, float* out, float even, float odd) {
    const int64_t half = tables_.half;
    float* values = interleaved_ ? values_ + 2 * row_ * capacity_ : out;
    for_each_vec(half,
                 [&](int64_t i, auto at, int) FK_INLINE { at.store(values + i, at.load(in + i)); });
    if (interleaved_) {
      for (int64_t i = 0; i < half; ++i) {
        out[2 * i] = values[i] * even;
        out[2 * i + 1] = values[i] * odd;
      }
    } else if (odd != 1.0f) {
      for (int64_t i = 0; i < half; ++i) out[i] *= odd;
    }
    if (split_) split_in_place(out, (interleaved_ ? 2 : 1) * half);
  }

  const RopeTables& tables_;
  const bool interleaved_, split_;
  const float sign_;
  const int64_t row_, capacity_;
  std::vector<float> memory_;
  float* values_;
};

// Rotates one head of one token. `read(i, access)` returns input elements, `write(i, access, k, v)` stores results.
template <bool kInterleaved, bool kSplit, class Read, class Write>
inline FK_INLINE void rotate(const float* cos, const float* sin, int64_t half, int64_t width,
                                                 Read&& read, Write&& write) {
  if constexpr (kInterleaved) {
    for_each_vec2<kSplit>(2 * half, [&](int64_t i, auto at, int k) FK_INLINE {
      const Vec2 v = read(i, at);
      write(i, at, k, multiply_add(v, at.load(cos + i), swap_neighbours(at, v) * at.load(sin + i)));
    });
  } else {
    for_each_vec2<kSplit>(half, [&](int64_t i, auto at, int k) FK_INLINE {
      const Vec2 a = read(i, at), b = read(half + i, at), c = at.load(cos + i), s = at.load(sin + i);
      write(i, at, k, multiply_add(a, c, Vec2{-b.a, -b.b} * s));
      write(half + i, at, k, multiply_add(b, c, a * s));
    });
  }
  if (2 * half == width) return;
  for_each_vec2<kSplit>(width - 2 * half, [&](int64_t i, auto at, int k) FK_INLINE {
    write(2 * half + i, at, k, read(2 * half + i, at));
  });
}

// Calls f(begin, count) for the parts of a head that `rotate` handles one after the other.
template <class F>
inline FK_INLINE void for_each_part(bool interleaved, int64_t half, int64_t width, F&& f) {
  const int64_t ends[] = {interleaved ? 0 : half, 2 * half, width};
  int64_t begin = 0;
  for (const int64_t end : ends) {
    if (begin < end) f(begin, end - begin);
    begin = end;
  }
}

// Whether heads are read split (see vec2.h).
template <class X>
constexpr bool kSplit = std::is_same_v<X, BFloat16>;

// The weights of a call's q and k in the order of split heads.
template <class Heads>
class SplitWeights {
 public:
  template <class Call> SplitWeights(const Call& a, bool split) : heads{a.heads[0], a.heads[1]} {
    if (!split) return;
    memory_.resize(2 * a.width);
    for (int side = 0; side < 2; ++side) {
      if (!heads[side].weight) continue;
      float* weight = memory_.data() + side * a.width;
      std::copy_n(heads[side].weight, a.width, weight);
      for_each_part(a.interleaved, a.tables.half, a.width,
                    [&](int64_t part, int64_t count) { split_in_place(weight + part, count); });
      heads[side].weight = weight;
    }
  }

  Heads heads[2];

 private:
  std::vector<float> memory_;
};

// Cuts tokens [begin, end) of B * T into blocks of at most `most` tokens of one sequence, and calls f(batch, begin,
// end) for each.
template <class F>
void for_each_block(int64_t begin, int64_t end, int64_t n_tokens, int64_t most, F&& f) {
  while (begin < end) {
    const int64_t b = begin / n_tokens, t = begin % n_tokens;
    const int64_t count = std::min({most, n_tokens - t, end - begin});
    f(b, t, t + count);
    begin += count;
  }
}

// Calls f(rows) for groups of at most `most` heads, in memory order. rows(g) calls g(head, token) for each.
template <class F>
inline FK_INLINE void for_each_group(const RopeStrides& strides, int64_t n_heads, int64_t begin,
                                                         int64_t end, int64_t most, F&& f) {
  const bool heads_first = strides.head < strides.token;
  const int64_t n_tokens = end - begin, n_outer = heads_first ? n_tokens : n_heads;
  const int64_t n_inner = heads_first ? n_heads : n_tokens;
  // One loop for both orders: f is inlined, and a second copy would double this file's compile time.
  for (int64_t i = 0; i < n_outer; ++i)
    for (int64_t from = 0; from < n_inner; from += most)
      f([&](auto&& g) FK_INLINE {
        const int64_t to = std::min(n_inner, from + most);
        for (int64_t j = from; j < to; ++j) g(heads_first ? j : i, begin + (heads_first ? i : j));
      });
}

// Calls f(head, token) for all heads of some tokens, in memory order.
template <class F>
inline FK_INLINE void for_each_row(const RopeStrides& strides, int64_t n_heads, int64_t begin,
                                                       int64_t end, F&& f) {
  const int64_t all = std::max(n_heads, end - begin);
  for_each_group(strides, n_heads, begin, end, all, [&](auto&& rows) FK_INLINE { rows(f); });
}

// Whether streaming stores pay off and work: the output is larger than the caches, and all its vectors are
// register-aligned.
template <class T>
bool worth_streaming(const void* out, int64_t n_rows, int64_t width, int64_t half) {
  constexpr uintptr_t kAlign = sizeof(Vec);
  return out && n_rows * width * int64_t(sizeof(T)) > kStreamBytes && reinterpret_cast<uintptr_t>(out) % kAlign == 0 &&
         width * sizeof(T) % kAlign == 0 && half * sizeof(T) % kAlign == 0;
}

}  // namespace FK_ISA
}  // namespace foundry
