// The thin matmuls of linear layers with low-rank adapters, on the register blocks of attention's matmuls. Compiled
// once per instruction set (see isa.h).
#include "lora_linear.h"

#include <algorithm>
#include <vector>

#include "dispatch.h"
#include "dropout.h"
#include "flash_attention_gemm.h"
#include "transpose.h"

namespace foundry {
namespace FK_ISA {

namespace {

static_assert(kLoraPad % kLanes == 0, "packed rows are whole registers");

// Depth of the sums that registers hold. Rows of scratch are not a power of two apart, which would be few cache sets.
constexpr int64_t kDepth = 256, kScratchRow = kDepth + 16;
constexpr int64_t kTile = 128;       // columns that `up` computes at a time
constexpr int64_t kOuterRows = 128;  // rows whose outer products registers sum

// The rows of a block of so many registers of columns: as many as registers can hold.
#if defined(__AVX512F__)
template <int kVecs> constexpr int kRowsOf = kVecs == 1 ? 12 : kVecs == 2 ? 8 : kBlockRows;
#else
template <int kVecs> constexpr int kRowsOf = kVecs == 1 ? 8 : kBlockRows;
#endif

// Columns [n, n + count) of a row of x in float, after dropout.
template <class X>
void widen(const X* x, int64_t row, int64_t first, int64_t count, const Dropout& dropout, float* out) {
  if (!dropout.seed) {
    for_each_vec(count, [&](int64_t i, auto at, int) FK_INLINE { at.store(out + i, at.load(x + first + i)); });
    return;
  }
  float factors[kDepth];
  static_assert(kDepth % kDropoutStep == 0, "factors are written in whole steps");
  dropout_factors<false>(dropout, row, first, count, factors);
  for_each_vec(count, [&](int64_t i, auto at, int) FK_INLINE {
    at.store(out + i, at.load(x + first + i) * at.load(factors + i));
  });
}

template <int kVecs>
void multiply_narrow(int64_t rows, const float* a, int64_t a_row, const float* b, int64_t ldb, int64_t depth, float* c,
                     int64_t ldc, Start start) {
  constexpr int kRows = kRowsOf<kVecs>;
  int64_t i = 0;
  for (; i + kRows <= rows; i += kRows)
    multiply_block<kRows, kVecs, float>({a + i * a_row, a_row, 1}, b, ldb, depth, c + i * ldc, ldc, start, nullptr);
  multiply_rest<kRows - 1, kVecs, float>(int(rows - i), {a + i * a_row, a_row, 1}, b, ldb, depth, c + i * ldc, ldc,
                                         start, nullptr);
}

// As `multiply`, with more rows at a time where the columns are few.
void multiply_thin(int64_t rows, int64_t vecs, const float* a, int64_t a_row, const float* b, int64_t ldb,
                   int64_t depth, float* c, int64_t ldc, Start start) {
  const int64_t wide = vecs / kBlockVecs * kBlockVecs;
  if (wide > 0) multiply<float>(rows, wide, {a, a_row, 1}, b, ldb, depth, c, ldc, start);
  b += wide * kLanes, c += wide * kLanes, vecs -= wide;
  if (kBlockVecs > 2 && vecs >= 2) {
    multiply_narrow<2>(rows, a, a_row, b, ldb, depth, c, ldc, start);
    b += 2 * kLanes, c += 2 * kLanes, vecs -= 2;
  }
  if (vecs > 0) multiply_narrow<1>(rows, a, a_row, b, ldb, depth, c, ldc, start);
}

template <class X> void down(const LoraDown& of, int64_t block_begin, int64_t block_end) {
  const int64_t ld = lora_padded(of.rank);
  std::vector<float> sums(kLoraRows * ld);
  alignas(64) float left[kLoraRows * kScratchRow];
  const bool in_place = std::is_same_v<X, float> && !of.dropout.seed;
  for (int64_t block = block_begin; block < block_end; ++block) {
    const int64_t first = block * kLoraRows, rows = std::min(kLoraRows, of.n_rows - first);
    const X* x = static_cast<const X*>(of.x) + first * of.x_row;
    for (int64_t k = 0; k < of.width; k += kDepth) {
      const int64_t depth = std::min(kDepth, of.width - k);
      const float* a = reinterpret_cast<const float*>(x) + k;
      if (!in_place) {
        a = left;
        for (int64_t r = 0; r < rows; ++r)
          widen(x + r * of.x_row, first + r, k, depth, of.dropout, left + r * kScratchRow);
      }
      multiply_thin(rows, ld / kLanes, a, in_place ? of.x_row : kScratchRow, of.a + k * ld, ld, depth, sums.data(), ld,
                    k > 0 ? Start::add : Start::zero);
    }
    for (int64_t r = 0; r < rows; ++r)
      for_each_vec(of.rank, [&](int64_t i, auto at, int) FK_INLINE {
        at.store(of.t + (first + r) * of.rank + i, Whole::load(sums.data() + r * ld + i) * splat(of.scale));
      });
  }
}

template <class X> void up(const LoraUp& of, int64_t block_begin, int64_t block_end) {
  const int64_t ld = lora_padded(of.width);
  alignas(64) float sums[kLoraRows * kTile], factors[kTile];
  static_assert(kTile % kDropoutStep == 0, "factors are written in whole steps");
  const Vec scale = splat(of.scale);
  for (int64_t block = block_begin; block < block_end; ++block) {
    const int64_t first = block * kLoraRows, rows = std::min(kLoraRows, of.n_rows - first);
    for (int64_t j = 0; j < of.width; j += kTile) {
      const int64_t columns = std::min(kTile, of.width - j);
      multiply<float>(rows, (columns + kLanes - 1) / kLanes, {of.t + first * of.t_row, of.t_row, 1}, of.b + j, ld,
                      of.rank, sums, kTile, Start::zero);
      for (int64_t r = 0; r < rows; ++r) {
        const X* base = static_cast<const X*>(of.base) + (first + r) * of.base_row + j;
        X* y = static_cast<X*>(of.y) + (first + r) * of.y_row + j;
        const float* sum = sums + r * kTile;
        if (of.dropout.seed) {
          dropout_factors<false>(of.dropout, first + r, j, columns, factors);
          for_each_vec(columns, [&](int64_t i, auto at, int) FK_INLINE {
            at.store(y + i, at.load(base + i) + at.load(sum + i) * scale * at.load(factors + i));
          });
        } else {
          for_each_vec(columns, [&](int64_t i, auto at, int) FK_INLINE {
            at.store(y + i, at.load(base + i) + at.load(sum + i) * scale);
          });
        }
      }
    }
  }
}

template <class X> void outer(const LoraOuter& of, int64_t block_begin, int64_t block_end) {
  alignas(64) float right[kOuterRows * kLoraColumns];
  std::vector<float> sums(of.rank * kLoraColumns);
  for (int64_t block = block_begin; block < block_end; ++block) {
    const int64_t first = block * kLoraColumns, columns = std::min(kLoraColumns, of.width - first);
    const int64_t vecs = (columns + kLanes - 1) / kLanes;
    if (columns % kLanes != 0) std::fill(right, right + kOuterRows * kLoraColumns, 0.0f);
    for (int64_t n = 0; n < of.n_rows; n += kOuterRows) {
      const int64_t rows = std::min(kOuterRows, of.n_rows - n);
      const X* x = static_cast<const X*>(of.x) + n * of.x_row;
      for (int64_t r = 0; r < rows; ++r)
        widen(x + r * of.x_row, n + r, first, columns, of.dropout, right + r * kLoraColumns);
      multiply<float>(of.rank, vecs, {of.t + n * of.t_row, 1, of.t_row}, right, kLoraColumns, rows, sums.data(),
                      kLoraColumns, n > 0 ? Start::add : Start::zero);
    }
    for (int64_t r = 0; r < of.rank; ++r)
      for (int64_t k = 0; k < columns; ++k)
        of.out[r * of.out_row + (first + k) * of.out_col] = of.scale * sums[r * kLoraColumns + k];
  }
}

template <class T> void pack(const LoraPack& of) {
  const T* in = static_cast<const T*>(of.in);
  const int64_t ld = lora_padded(of.columns);
  int64_t r = 0;
  if (of.in_row == 1) {  // through registers; other strides are rare
    alignas(64) float rows[kLanes * kLanes];
    for (; r + kLanes <= of.rows; r += kLanes)
      for (int64_t c = 0; c < ld; c += kLanes) {
        const int64_t count = std::min<int64_t>(kLanes, of.columns - c);
        for (int64_t i = 0; i < kLanes; ++i)
          Whole::store(rows + i * kLanes, i < count ? Whole::load(in + r + (c + i) * of.in_col) : Vec{});
        transpose(rows, kLanes, kLanes, kLanes, of.out + r * ld + c, ld);
      }
  }
  for (; r < of.rows; ++r) {
    float* out = of.out + r * ld;
    const T* row = in + r * of.in_row;
    if (of.in_col == 1)
      for_each_vec(of.columns,
                   [&](int64_t i, auto at, int) FK_INLINE { at.store(out + i, at.load(row + i)); });
    else
      for (int64_t c = 0; c < of.columns; ++c) Part{1}.store(out + c, Part{1}.load(row + c * of.in_col));
    std::fill(out + of.columns, out + ld, 0.0f);
  }
}

}  // namespace

void lora_pack(const LoraPack& of) {
  with_type(of.type, [&](auto* in) { pack<std::remove_pointer_t<decltype(in)>>(of); });
}

void lora_down(const LoraDown& of, int64_t block_begin, int64_t block_end) {
  with_type(of.type, [&](auto* x) { down<std::remove_pointer_t<decltype(x)>>(of, block_begin, block_end); });
}

void lora_up(const LoraUp& of, int64_t block_begin, int64_t block_end) {
  with_type(of.type, [&](auto* x) { up<std::remove_pointer_t<decltype(x)>>(of, block_begin, block_end); });
}

void lora_outer(const LoraOuter& of, int64_t block_begin, int64_t block_end) {
  with_type(of.type, [&](auto* x) { outer<std::remove_pointer_t<decltype(x)>>(of, block_begin, block_end); });
}

}  // namespace FK_ISA
}  // namespace foundry
