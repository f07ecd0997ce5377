// What the attention kernels are made of: matrix products of tiles in float, powers of two, transposition, and reading
// rows of any memory type into a tile.
//
// In a tile of scores the rows of the queries lie along the lanes of registers and the keys one after the other, so that
// everything the softmax does is elementwise. Keys and values enter products as single numbers that are spread over a
// register, and so are never transposed.
#pragma once

#include <algorithm>
#include <utility>

#include "flash_attention.h"
#include "math.h"
#include "vec.h"

namespace foundry {
namespace FK_ISA {

constexpr int kRowVecs = kAttentionRows / kLanes;

// The block of a product that is held in registers: 16 of them with AVX-512 (which has 32), 12 elsewhere (of 16).
#if defined(__AVX512F__)
constexpr int kBlockRows = 4, kBlockVecs = 4;
#else
constexpr int kBlockRows = 6, kBlockVecs = 2;
#endif

enum class Start { zero, add, scaled };  // what a product is added to: nothing, C, or C times a factor a column

// A [rows, depth] whose element (i, k) lies at i * row + k * step.
struct Factor {
  const float* data;
  int64_t row, step;
};

template <int kRows, int kVecs>
inline void multiply_block(Factor a, const float* b, int64_t ldb, int64_t depth, float* c, int64_t ldc, Start start,
                           const float* factor) {
  Vec acc[kRows][kVecs];
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 16
    for (int v = 0; v < kVecs; ++v) {
      if (start == Start::zero) acc[i][v] = Vec{};
      else acc[i][v] = Whole::load(c + i * ldc + v * kLanes);
      if (start == Start::scaled) acc[i][v] *= Whole::load(factor + v * kLanes);
    }
  for (int64_t k = 0; k < depth; ++k) {
    Vec right[kVecs];
#pragma GCC unroll 16
    for (int v = 0; v < kVecs; ++v) right[v] = Whole::load(b + k * ldb + v * kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      const Vec left = splat(a.data[i * a.row + k * a.step]);
#pragma GCC unroll 16
      for (int v = 0; v < kVecs; ++v) acc[i][v] += left * right[v];
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 16
    for (int v = 0; v < kVecs; ++v) Whole::store(c + i * ldc + v * kLanes, acc[i][v]);
}

// The last rows, fewer than kBlockRows.
template <int kRows, int kVecs>
inline void multiply_rest(int rows, Factor a, const float* b, int64_t ldb, int64_t depth, float* c, int64_t ldc,
                          Start start, const float* factor) {
  if constexpr (kRows > 0) {
    if (rows == kRows) multiply_block<kRows, kVecs>(a, b, ldb, depth, c, ldc, start, factor);
    else multiply_rest<kRows - 1, kVecs>(rows, a, b, ldb, depth, c, ldc, start, factor);
  }
}

template <int kVecs, bool kAlong>
void multiply_columns(int64_t rows, Factor a, const float* b, int64_t ldb, int64_t depth, float* c, int64_t ldc,
                      Start start, const float* factor) {
  (kAlong ? a.step : a.row) = 1;  // a constant, so that one of the strides costs no arithmetic
  int64_t i = 0;
  for (; i + kBlockRows <= rows; i += kBlockRows)
    multiply_block<kBlockRows, kVecs>({a.data + i * a.row, a.row, a.step}, b, ldb, depth, c + i * ldc, ldc, start,
                                      factor);
  multiply_rest<kBlockRows - 1, kVecs>(int(rows - i), {a.data + i * a.row, a.row, a.step}, b, ldb, depth, c + i * ldc,
                                       ldc, start, factor);
}

template <bool kAlong>
void multiply_any(int64_t rows, int64_t vecs, Factor a, const float* b, int64_t ldb, int64_t depth, float* c,
                  int64_t ldc, Start start, const float* factor) {
  int64_t v = 0;
  for (; v + kBlockVecs <= vecs; v += kBlockVecs)
    multiply_columns<kBlockVecs, kAlong>(rows, a, b + v * kLanes, ldb, depth, c + v * kLanes, ldc, start,
                                         factor + v * kLanes);
  if constexpr (kBlockVecs > 2) {
    if (v + 2 <= vecs) {
      multiply_columns<2, kAlong>(rows, a, b + v * kLanes, ldb, depth, c + v * kLanes, ldc, start, factor + v * kLanes);
      v += 2;
    }
  }
  if (v < vecs)
    multiply_columns<1, kAlong>(rows, a, b + v * kLanes, ldb, depth, c + v * kLanes, ldc, start, factor + v * kLanes);
}

// C [rows, vecs registers] = A [rows, depth] B [depth, vecs registers] + what `start` says; `factor` has one number a
// column. One of A's strides is 1.
inline void multiply(int64_t rows, int64_t vecs, Factor a, const float* b, int64_t ldb, int64_t depth, float* c,
                     int64_t ldc, Start start, const float* factor = nullptr) {
  a.step == 1 ? multiply_any<true>(rows, vecs, a, b, ldb, depth, c, ldc, start, factor)
              : multiply_any<false>(rows, vecs, a, b, ldb, depth, c, ldc, start, factor);
}

// The larger of two; the second where one is NaN.
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

// tanh, within 3e-7 of itself: with e = 2^y - 1 formed without cancellation, y = -2 |v| / ln 2, it is -e / (e + 2).
inline Vec tanh(Vec v) {
  const Vec magnitude = v < Vec{} ? -v : v;
  Vec y = larger(magnitude * (-2.0f * kLog2E), splat(-60.0f));
  y = v == v ? y : v;
  const Vec shift = splat(12582912.0f);
  const Vec n = (y + shift) - shift, r = y - n;
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

template <int kStep, bool kSecond, int... kLane>
inline Vec exchanged(Vec a, Vec b, std::integer_sequence<int, kLane...>) {
  // The first result has the blocks of kStep lanes at even places of a and b, the second those at odd places.
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

// Calls f with a null pointer to the memory type.
template <class F>
void with_type(Dtype type, F&& f) {
  switch (type) {
    case Dtype::f32: return f((float*)nullptr);
    case Dtype::bf16: return f((BFloat16*)nullptr);
    case Dtype::f16: return f((Half*)nullptr);
  }
}

// `n` elements as floats, zero up to `padded`.
template <class T>
inline void widen(const T* in, int64_t n, float* out, int64_t padded) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) Whole::store(out + i, Whole::load(in + i));
  if (i < n) Whole::store(out + i, Part{(int)(n - i)}.load(in + i)), i += kLanes;
  for (; i < padded; i += kLanes) Whole::store(out + i, Vec{});
}

template <class T>
inline void narrow(const float* in, int64_t n, T* out) {
  for_each_vec(n, [&](int64_t i, auto at, int) FK_INLINE { at.store(out + i, at.load(in + i)); });
}

// The element at which row token * group + head - first_head of a sequence's queries begins.
inline int64_t row_offset(const HeadStrides& strides, const AttentionSequence& s, int64_t first_head, int64_t group,
                          int64_t row) {
  return s.batch * strides.batch + (first_head + row % group) * strides.head + (s.q_start + row / group) * strides.token;
}

// The element at which a key or value begins.
inline int64_t key_offset(const HeadStrides& strides, const AttentionSequence& s, int64_t kv_head, int64_t key) {
  return s.batch * strides.batch + kv_head * strides.head + (s.k_start + key) * strides.token;
}

// A tile of keys or values as floats.
struct Tile {
  const float* data;
  int64_t ld;
};

// Rows [0, n) of memory with this stride. Floats are read in place, others are widened into `scratch` [n, width].
inline Tile read_tile(Dtype type, const void* data, int64_t offset, int64_t stride, int64_t n, int64_t width,
                      float* scratch) {
  if (type == Dtype::f32) return {static_cast<const float*>(data) + offset, stride};
  const int64_t ld = round_up(width, kAttentionPad);
  with_type(type, [&](auto* t) {
    const auto* in = static_cast<decltype(t)>(const_cast<void*>(data)) + offset;
    for (int64_t i = 0; i < n; ++i) widen(in + i * stride, width, scratch + i * ld, ld);
  });
  return {scratch, ld};
}

}  // namespace FK_ISA
}  // namespace foundry
