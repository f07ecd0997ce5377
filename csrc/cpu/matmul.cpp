// Matmuls that use the register blocks of attention's matmuls. A panel of B (a few columns, part of the depth) is
// copied into the L1 cache, and all rows of the tile are multiplied by it. The copy widens bfloat16 to float32.
// Compiled once per instruction set (see isa.h).
#include "matmul.h"

#include <algorithm>
#include <type_traits>

#include "flash_attention_gemm.h"
#include "transpose.h"

namespace foundry {
namespace FK_ISA {

namespace {

// Depth of a panel: kDepth rows of kMatmulColumns numbers are 32 KB.
constexpr int64_t kDepth = 128;
// Strides of A's copy between steps and between rows. Powers of two would map to few cache sets.
constexpr int64_t kLeftStep = kMatmulRows + 16, kLeftRow = kDepth + 16;
constexpr int64_t kLeft = std::max(kDepth * kLeftStep, kMatmulRows* kLeftRow);
// Rows at a time if the columns do not fill whole registers.
constexpr int64_t kPartRows = 64;

// out[r][c] = in[c][r] of any sizes.
void transpose_any(const float* in, int64_t ld_in, int64_t rows, int64_t columns, float* out, int64_t ld_out) {
  const int64_t whole_rows = rows / kLanes * kLanes, whole_columns = columns / kLanes * kLanes;
  transpose(in, ld_in, whole_rows, whole_columns, out, ld_out);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = r < whole_rows ? whole_columns : 0; c < columns; ++c) out[c * ld_out + r] = in[r * ld_in + c];
}

template <class T>
void copy_rows(const T* in, int64_t ld_in, int64_t rows, int64_t columns, float* out, int64_t ld_out) {
  for (int64_t r = 0; r < rows; ++r, in += ld_in, out += ld_out)
    for_each_vec(columns,
                 [&](int64_t i, auto at, int) FK_INLINE { at.store(out + i, at.load(in + i)); });
}

// Some rows of A over part of the depth: in place, or a copy in `left`. Rows that are not contiguous are copied,
// because they may be whole pages apart.
template <class T>
Factor<float> left_factor(const Matmul& of, int64_t row, int64_t rows, int64_t k, int64_t depth, float* left) {
  const T* a = static_cast<const T*>(of.a) + row * of.a_row + k * of.a_step;
  if (of.a_step != 1) {
    copy_rows(a, of.a_step, depth, rows, left, kLeftStep);
    return {left, 1, kLeftStep};
  }
  if constexpr (std::is_same_v<T, float>) return {a, of.a_row, 1};
  copy_rows(a, of.a_row, rows, depth, left, kLeftRow);
  return {left, kLeftRow, 1};
}

// `columns` columns of B starting at `b`, [depth, kMatmulColumns], zero-padded to whole registers.
template <class T>
void pack(const Matmul& of, const T* b, int64_t depth, int64_t columns, float* out) {
  if (of.b_col == 1) {
    copy_rows(b, of.b_step, depth, columns, out, kMatmulColumns);
  } else if constexpr (std::is_same_v<T, float>) {
    transpose_any(b, of.b_col, columns, depth, out, kMatmulColumns);
  } else {
    alignas(64) float rows[kMatmulColumns * kLeftRow];
    copy_rows(b, of.b_col, columns, depth, rows, kLeftRow);
    transpose_any(rows, kLeftRow, columns, depth, out, kMatmulColumns);
  }
  if (const int64_t rest = columns % kLanes; rest != 0)
    for (int64_t k = 0; k < depth; ++k) std::fill_n(out + k * kMatmulColumns + columns, kLanes - rest, 0.0f);
}

// c = sums, or c += sums
template <class T>
void store_sums(const float* sums, int64_t ld, int64_t rows, int64_t columns, T* c, int64_t c_row, bool add) {
  for (int64_t r = 0; r < rows; ++r, sums += ld, c += c_row)
    for_each_vec(columns, [&](int64_t i, auto at, int) FK_INLINE {
      const Vec sum = at.load(sums + i);
      at.store(c + i, add ? at.load(c + i) + sum : sum);
    });
}

// A and B have type T; C is float32 or T. With kRounds the sums are in `scratch`, as wide as whole panels, until they
// are rounded.
template <class T, bool kRounds>
void tile_of(const Matmul& of, int64_t row_begin, int64_t row_end, int64_t col_begin, int64_t col_end, float* scratch) {
  typedef std::conditional_t<kRounds, T, float> Out;
  const int64_t rows = row_end - row_begin, n_cols = col_end - col_begin;
  Out* const out = static_cast<Out*>(of.c) + row_begin * of.c_row + col_begin;
  float* sums = scratch;
  int64_t ld = (n_cols + kMatmulColumns - 1) / kMatmulColumns * kMatmulColumns;
  if constexpr (!kRounds) sums = out, ld = of.c_row;
  alignas(64) float right[kDepth * kMatmulColumns], left[kLeft], part[kPartRows * kMatmulColumns];
  for (int64_t k = 0; k < of.depth; k += kDepth) {
    const int64_t depth = std::min(kDepth, of.depth - k);
    const Start start = k > 0 || (of.add && !kRounds) ? Start::add : Start::zero;
    const Factor<float> a = left_factor<T>(of, row_begin, rows, k, depth, left);
    for (int64_t j = 0; j < n_cols; j += kMatmulColumns) {
      const int64_t columns = std::min(kMatmulColumns, n_cols - j), vecs = (columns + kLanes - 1) / kLanes;
      pack(of, static_cast<const T*>(of.b) + k * of.b_step + (col_begin + j) * of.b_col, depth, columns, right);
      if (kRounds || columns == vecs * kLanes) {
        multiply(rows, vecs, a, right, kMatmulColumns, depth, sums + j, ld, start);
        continue;
      }
      for (int64_t first = 0; first < rows; first += kPartRows) {
        const int64_t count = std::min(kPartRows, rows - first);
        multiply<float>(count, vecs, {a.data + first * a.row, a.row, a.step}, right, kMatmulColumns, depth, part,
                        kMatmulColumns, Start::zero);
        store_sums(part, kMatmulColumns, count, columns, sums + first * ld + j, ld, start == Start::add);
      }
    }
  }
  if constexpr (kRounds) store_sums(sums, ld, rows, n_cols, out, of.c_row, of.add);
}

}  // namespace

void matmul_tile(const Matmul& of, int64_t row_begin, int64_t row_end, int64_t col_begin, int64_t col_end,
                 float* scratch) {
  const auto tile = of.type == Dtype::f32 ? tile_of<float, false>
                    : of.rounds()         ? tile_of<BFloat16, true>
                                          : tile_of<BFloat16, false>;
  tile(of, row_begin, row_end, col_begin, col_end, scratch);
}

}  // namespace FK_ISA
}  // namespace foundry
