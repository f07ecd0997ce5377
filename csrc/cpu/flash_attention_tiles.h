// What the attention kernels are made of: matrix products of tiles, powers of two, transposition, and reading rows of
// any memory type into a tile.
//
// In a tile of scores the rows of the queries lie along the lanes of registers and the keys one after the other, so
// that everything the softmax does is elementwise. Keys and values enter products as single numbers that are spread
// over a register, and so are never transposed.
//
// Factors of products are of a type E: float, or bfloat16 where memory holds that and the processor has dot products of
// pairs (vdpbf16ps: exact products, added in float). A lane then holds a pair, which are neighbours along the depth of
// the product, and weights and gradients of scores are rounded to bfloat16 before they are multiplied, as on GPUs.
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

#if defined(__AVX512BF16__)
constexpr bool kPairs = true;
#else
constexpr bool kPairs = false;
#endif

template <class E> constexpr int kPer = sizeof(float) / sizeof(E);  // numbers in a lane

// Lanes of a row of `width` numbers in scratch, and how many steps along them a product takes.
template <class E> inline int64_t lanes_of(int64_t width) { return round_up(width, kAttentionPad * kPer<E>) / kPer<E>; }
template <class E> inline int64_t steps_of(int64_t depth) { return (depth + kPer<E> - 1) / kPer<E>; }

// A [rows, depth] whose element (i, k) lies at i * row + k * step; with pairs, k counts these.
template <class E> struct Factor {
  const E* data;
  int64_t row, step;
};

// A lane's content in every lane.
template <class E> inline Vec spread(const E* p) {
  float lane;
  std::memcpy(&lane, p, sizeof(lane));
  return splat(lane);
}

template <class E> inline void accumulate(Vec& acc, Vec a, Vec b) {
#if defined(__AVX512BF16__)
  if constexpr (kPer<E> == 2) {
    acc = (Vec)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
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
      const Vec left = spread(a.data + i * a.row + k * a.step);
#pragma GCC unroll 16
      for (int v = 0; v < kVecs; ++v) accumulate<E>(acc[i][v], left, right[v]);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 16
    for (int v = 0; v < kVecs; ++v) Whole::store(c + i * ldc + v * kLanes, acc[i][v]);
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
  (kAlong ? a.step : a.row) = kPer<E>;  // a constant, so that one of the strides costs no arithmetic
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

// C [rows, vecs registers] = A [rows, depth] B [depth, vecs registers] + what `start` says; `factor` has one number a
// column. One of A's strides is that of neighbours, kPer<E>.
template <class E>
inline void multiply(int64_t rows, int64_t vecs, Factor<E> a, const float* b, int64_t ldb, int64_t depth, float* c,
                     int64_t ldc, Start start, const float* factor = nullptr) {
  a.step == kPer<E> ? multiply_any<true>(rows, vecs, a, b, ldb, depth, c, ldc, start, factor)
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
  return s.batch * strides.batch + (first_head + row % group) * strides.head +
         (s.q_start + row / group) * strides.token;
}

// The element at which a key or value begins.
inline int64_t key_offset(const HeadStrides& strides, const AttentionSequence& s, int64_t kv_head, int64_t key) {
  return s.batch * strides.batch + kv_head * strides.head + (s.k_start + key) * strides.token;
}

// Elements [offset, offset + n) of memory as E, zero up to `lanes` of them.
template <class E>
inline void read_row(Dtype type, const void* data, int64_t offset, int64_t n, float* out, int64_t lanes) {
  if constexpr (kPer<E> == 2) {
    std::memcpy(out, static_cast<const E*>(data) + offset, n * sizeof(E));
    std::memset(reinterpret_cast<E*>(out) + n, 0, (2 * lanes - n) * sizeof(E));
  } else {
    with_type(type, [&](auto* t) { widen(static_cast<decltype(t)>(const_cast<void*>(data)) + offset, n, out, lanes); });
  }
}

// Rows of keys, values, queries or gradients.
template <class E> struct Tile {
  const E* data;
  int64_t ld;
};

// Rows [0, n) of memory with this stride, in place where they are of E and whole lanes; else in `scratch`.
template <class E>
inline Tile<E> read_tile(Dtype type, const void* data, int64_t offset, int64_t stride, int64_t n, int64_t width,
                         float* scratch) {
  const bool is_e = type == (kPer<E> == 2 ? Dtype::bf16 : Dtype::f32);
  if (is_e && width % kPer<E> == 0) return {static_cast<const E*>(data) + offset, stride};
  const int64_t lanes = lanes_of<E>(width);
  for (int64_t i = 0; i < n; ++i) read_row<E>(type, data, offset + i * stride, width, scratch + i * lanes, lanes);
  return {reinterpret_cast<const E*>(scratch), lanes * kPer<E>};
}

#if defined(__AVX512BF16__)
constexpr VecI kColumn = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// Of two rows of 32 numbers, a lane for each column of the first 16 (kHalf 0) or the last: the first row's number and
// the second's.
template <int kHalf>
inline Vec columns_paired(Vec a, Vec b) {
  return (Vec)_mm512_permutex2var_epi16((__m512i)a, (__m512i)(kColumn * 0x10001 + 0x200000 + kHalf * 0x100010),
                                        (__m512i)b);
}
#endif

// The tile for a product along its rows: itself, or with pairs a lane for each column of two rows, [n / 2, width] in
// `scratch`, zero in the place of a last row that is missing.
template <class E>
inline Tile<E> across(Tile<E> tile, int64_t n, int64_t width, float* scratch) {
#if defined(__AVX512BF16__)
  if constexpr (kPer<E> == 2) {
    const int64_t ld = round_up(width, kAttentionPad);
    for (int64_t i = 0; i < n; i += 2) {
      const E *a = tile.data + i * tile.ld, *b = i + 1 < n ? a + tile.ld : nullptr;
      float* out = scratch + i / 2 * ld;
      for (int64_t c = 0; c < width; c += 32) {
        const __mmask32 mask = width - c >= 32 ? ~__mmask32(0) : (__mmask32(1) << (width - c)) - 1;
        const Vec x = (Vec)_mm512_maskz_loadu_epi16(mask, a + c);
        const Vec y = b ? (Vec)_mm512_maskz_loadu_epi16(mask, b + c) : Vec{};
        Whole::store(out + c, columns_paired<0>(x, y));
        if (width - c > 16) Whole::store(out + c + 16, columns_paired<1>(x, y));
      }
    }
    return {reinterpret_cast<const E*>(scratch), 2 * ld};
  }
#endif
  return tile;
}

// Two registers rounded to bfloat16: as one of pairs, and if wanted each as a row of its own.
inline void store_pairs(float* pairs, Vec a, Vec b, BFloat16* row_a = nullptr, BFloat16* row_b = nullptr) {
#if defined(__AVX512BF16__)
  const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
  if (pairs) _mm512_storeu_si512(pairs, _mm512_permutexvar_epi16((__m512i)(kColumn * 0x10001 + 0x100000), halves));
  if (row_a) _mm256_storeu_si256((__m256i*)row_a, _mm512_castsi512_si256(halves));
  if (row_b) _mm256_storeu_si256((__m256i*)row_b, _mm512_extracti64x4_epi64(halves, 1));
#endif
}

}  // namespace FK_ISA
}  // namespace foundry
