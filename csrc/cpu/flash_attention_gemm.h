// Matmuls of tiles.
//
// In a tile of scores the query rows lie along the lanes and the keys follow one another, so the whole softmax is
// elementwise. Keys and values are broadcast one number at a time and so are never transposed.
//
// Factors have a type E: float, or bfloat16 if memory holds that and the processor has dot products of pairs
// (vdpbf16ps, bfdot), which add in float. A lane then holds a pair of neighbours along the depth of the matmul. Weights
// and score gradients are rounded to bfloat16 before the matmul, as on GPUs. With AMX, tiles compute the whole tiles of
// such a matmul.
#pragma once

#include <algorithm>

#include "flash_attention.h"
#include "flash_attention_amx.h"
#include "vec.h"

namespace foundry {
namespace FK_ISA {

constexpr int kRowVecs = kAttentionRows / kLanes;

// The block of a result that registers hold: 16 registers with AVX-512 (which has 32), 20 on ARM (which also has 32;
// with 24 GCC spills two), 12 elsewhere (16).
#if defined(__AVX512F__)
constexpr int kBlockRows = 4, kBlockVecs = 4;
#elif defined(__aarch64__)
constexpr int kBlockRows = 5, kBlockVecs = 4;
#else
constexpr int kBlockRows = 6, kBlockVecs = 2;
#endif

enum class Start { zero, add, scaled };  // the result is added to nothing, to C, or to C times one factor per column

#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define FK_PAIRS
constexpr bool kPairs = true;
#else
constexpr bool kPairs = false;
#endif

template <class E> constexpr int kPer = sizeof(float) / sizeof(E);  // numbers per lane

// Lanes of a row of `width` numbers in scratch, and the number of matmul steps along it.
template <class E> inline int64_t lanes_of(int64_t width) { return round_up(width, kAttentionPad * kPer<E>) / kPer<E>; }
template <class E> inline int64_t steps_of(int64_t depth) { return (depth + kPer<E> - 1) / kPer<E>; }

// A [rows, depth] with element (i, k) at i * row + k * step. With pairs, k counts pairs.
template <class E> struct Factor {
  const E* data;
  int64_t row, step;
};

// One lane's content broadcast to every lane.
template <class E> inline Vec spread(const E* p) {
  float lane;
  std::memcpy(&lane, p, sizeof(lane));
  return splat(lane);
}

template <class E> inline void accumulate(Vec& acc, Vec a, Vec b) {
#if defined(FK_PAIRS)
  if constexpr (kPer<E> == 2) {
#if defined(__AVX512BF16__)
    acc = (Vec)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
#else
    acc = (Vec)vbfdotq_f32((float32x4_t)acc, (bfloat16x8_t)a, (bfloat16x8_t)b);
#endif
    return;
  }
#endif
  acc += a * b;
}

template <int kRows, int kVecs, class E>
inline void multiply_block(Factor<E> a, const float* b, int64_t ldb, int64_t depth, float* c, int64_t ldc, Start start,
                           const float* factor) {
  Vec acc[kRows][kVecs];
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 16
    for (int v = 0; v < kVecs; ++v) acc[i][v] = Vec{};
  // An address can add one or two strides to a pointer, so there is a pointer for every third row. Pointers for all
  // rows would not fit in registers.
  const E* third[(kRows + 2) / 3];
#pragma GCC unroll 16
  for (int i = 0; i < kRows; i += 3) third[i / 3] = a.data + i * a.row;
  for (int64_t k = 0; k < depth; ++k) {
    Vec right[kVecs];
#pragma GCC unroll 16
    for (int v = 0; v < kVecs; ++v) right[v] = Whole::load(b + v * kLanes);
    b += ldb;
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      const Vec left = spread(third[i / 3] + i % 3 * a.row);
#pragma GCC unroll 16
      for (int v = 0; v < kVecs; ++v) accumulate<E>(acc[i][v], left, right[v]);
    }
#pragma GCC unroll 16
    for (const E*& p : third) p += a.step;
  }
  // C is added last, so sums over many tiles add tile sums: rounding errors grow with the number of tiles, not of
  // terms.
  const auto store = [&](auto&& total) FK_INLINE {
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 16
      for (int v = 0; v < kVecs; ++v) {
        float* p = c + i * ldc + v * kLanes;
        Whole::store(p, total(acc[i][v], p, v));
      }
  };
  switch (start) {
    case Start::zero: return store([](Vec sum, const float*, int) FK_INLINE { return sum; });
    case Start::add:
      return store([](Vec sum, const float* p, int) FK_INLINE { return Whole::load(p) + sum; });
    case Start::scaled:
      return store([&](Vec sum, const float* p, int v) FK_INLINE {
        return Whole::load(p) * Whole::load(factor + v * kLanes) + sum;
      });
  }
}

// The last rows, fewer than kBlockRows.
template <int kRows, int kVecs, class E>
inline void multiply_rest(int rows, Factor<E> a, const float* b, int64_t ldb, int64_t depth, float* c, int64_t ldc,
                          Start start, const float* factor) {
  if constexpr (kRows > 0) {
    if (rows == kRows) multiply_block<kRows, kVecs>(a, b, ldb, depth, c, ldc, start, factor);
    else multiply_rest<kRows - 1, kVecs>(rows, a, b, ldb, depth, c, ldc, start, factor);
  }
}

template <int kVecs, bool kAlong, class E>
void multiply_columns(int64_t rows, Factor<E> a, const float* b, int64_t ldb, int64_t depth, float* c, int64_t ldc,
                      Start start, const float* factor) {
  (kAlong ? a.step : a.row) = kPer<E>;  // a constant, so that one stride costs no arithmetic
  int64_t i = 0;
  for (; i + kBlockRows <= rows; i += kBlockRows)
    multiply_block<kBlockRows, kVecs, E>({a.data + i * a.row, a.row, a.step}, b, ldb, depth, c + i * ldc, ldc, start,
                                         factor);
  multiply_rest<kBlockRows - 1, kVecs, E>(int(rows - i), {a.data + i * a.row, a.row, a.step}, b, ldb, depth,
                                          c + i * ldc, ldc, start, factor);
}

template <bool kAlong, class E>
void multiply_any(int64_t rows, int64_t vecs, Factor<E> a, const float* b, int64_t ldb, int64_t depth, float* c,
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

template <class E>
inline void multiply_registers(int64_t rows, int64_t vecs, Factor<E> a, const float* b, int64_t ldb, int64_t depth,
                               float* c, int64_t ldc, Start start, const float* factor) {
  a.step == kPer<E> ? multiply_any<true>(rows, vecs, a, b, ldb, depth, c, ldc, start, factor)
                    : multiply_any<false>(rows, vecs, a, b, ldb, depth, c, ldc, start, factor);
}

// Multiplies C [rows, vecs registers] by one factor per column. Most factors are 1 most of the time.
inline void scale_columns(float* c, int64_t ldc, int64_t rows, int64_t vecs, const float* factor) {
  for (int64_t v = 0; v < vecs * kLanes; v += kLanes) {
    if (std::all_of(factor + v, factor + v + kLanes, [](float x) { return x == 1.0f; })) continue;
    const Vec by = Whole::load(factor + v);
    for (int64_t r = 0; r < rows; ++r) Whole::store(c + r * ldc + v, Whole::load(c + r * ldc + v) * by);
  }
}

// C [rows, vecs registers] = A [rows, depth] B [depth, vecs registers], plus what `start` says; `factor` has one number
// per column. One of A's strides is kPer<E>.
template <class E>
inline void multiply(int64_t rows, int64_t vecs, Factor<E> a, const float* b, int64_t ldb, int64_t depth, float* c,
                     int64_t ldc, Start start, const float* factor = nullptr) {
#if defined(__AMX_BF16__)
  if constexpr (kPer<E> == 2) {
    const int64_t whole_rows = rows / kTileRows * kTileRows, whole_depth = depth / kTilePairs * kTilePairs;
    if (whole_rows > 0 && whole_depth > 0 && (a.step == kPer<E> || whole_depth <= kAttentionKeys / 2)) {
      if (start == Start::scaled) scale_columns(c, ldc, whole_rows, vecs, factor);
      multiply_tiles(whole_rows, vecs, a.data, a.row, a.step, b, ldb, whole_depth, c, ldc, start != Start::zero);
      if (whole_depth < depth)
        multiply_registers<E>(whole_rows, vecs, {a.data + whole_depth * a.step, a.row, a.step}, b + whole_depth * ldb,
                              ldb, depth - whole_depth, c, ldc, Start::add, nullptr);
      a.data += whole_rows * a.row;
      c += whole_rows * ldc;
      rows -= whole_rows;
    }
    if (rows == 0) return;
  }
#endif
  multiply_registers<E>(rows, vecs, a, b, ldb, depth, c, ldc, start, factor);
}

}  // namespace FK_ISA
}  // namespace foundry
