// Products of float32 matrices by the blocks of attention's products: a few columns of B, over some of the depth, are
// brought side by side into the first-level cache, and all rows of the tile pass by. Compiled once per instruction set
// (see isa.h).
#include "matmul.h"

#include <algorithm>

#include "flash_attention_gemm.h"
#include "transpose.h"

namespace foundry {
namespace FK_ISA {

namespace {

// Of the depth at a time: so many rows of kMatmulColumns numbers are 32 KB.
constexpr int64_t kDepth = 128;
// Between the steps of A's copy: not a power of two, which would share few places in the cache.
constexpr int64_t kLeft = kMatmulRows + 16;
// Rows at a time where columns are fewer than whole registers.
constexpr int64_t kPartRows = 64;

// out[r][c] = in[c][r] of any sizes.
void transpose_any(const float* in, int64_t ld_in, int64_t rows, int64_t columns, float* out, int64_t ld_out) {
  const int64_t whole_rows = rows / kLanes * kLanes, whole_columns = columns / kLanes * kLanes;
  transpose(in, ld_in, whole_rows, whole_columns, out, ld_out);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = r < whole_rows ? whole_columns : 0; c < columns; ++c) out[c * ld_out + r] = in[r * ld_in + c];
}

void copy_rows(const float* in, int64_t ld_in, int64_t rows, int64_t columns, float* out, int64_t ld_out) {
  for (int64_t r = 0; r < rows; ++r) std::copy_n(in + r * ld_in, columns, out + r * ld_out);
}

// `columns` columns of B from the one at `b` on, [depth, kMatmulColumns], with zeros up to whole registers.
void pack(const Matmul& of, const float* b, int64_t depth, int64_t columns, float* out) {
  if (of.b_col == 1) copy_rows(b, of.b_step, depth, columns, out, kMatmulColumns);
  else transpose_any(b, of.b_col, columns, depth, out, kMatmulColumns);
  if (const int64_t rest = columns % kLanes; rest != 0)
    for (int64_t k = 0; k < depth; ++k) std::fill_n(out + k * kMatmulColumns + columns, kLanes - rest, 0.0f);
}

// c = part, or c += part
void store_part(const float* part, int64_t rows, int64_t columns, float* c, int64_t c_row, bool add) {
  for (int64_t r = 0; r < rows; ++r, part += kMatmulColumns, c += c_row)
    for_each_vec(columns, [&](int64_t i, auto at, int) FK_INLINE {
      const Vec sum = Whole::load(part + i);
      at.store(c + i, add ? at.load(c + i) + sum : sum);
    });
}

}  // namespace

void matmul_tile(const Matmul& of, int64_t row_begin, int64_t row_end, int64_t col_begin, int64_t col_end) {
  const int64_t rows = row_end - row_begin;
  alignas(64) float right[kDepth * kMatmulColumns], left[kDepth * kLeft], part[kPartRows * kMatmulColumns];
  for (int64_t k = 0; k < of.depth; k += kDepth) {
    const int64_t depth = std::min(kDepth, of.depth - k);
    const Start start = k > 0 || of.add ? Start::add : Start::zero;
    Factor<float> a{of.a + row_begin * of.a_row + k * of.a_step, of.a_row, of.a_step};
    if (of.a_step != 1) {  // whose rows are as far apart as pages may be
      copy_rows(a.data, of.a_step, depth, rows, left, kLeft);
      a = {left, 1, kLeft};
    }
    for (int64_t j = col_begin; j < col_end; j += kMatmulColumns) {
      const int64_t columns = std::min(kMatmulColumns, col_end - j), vecs = (columns + kLanes - 1) / kLanes;
      pack(of, of.b + k * of.b_step + j * of.b_col, depth, columns, right);
      float* c = of.c + row_begin * of.c_row + j;
      if (columns == vecs * kLanes) {
        multiply(rows, vecs, a, right, kMatmulColumns, depth, c, of.c_row, start);
        continue;
      }
      for (int64_t first = 0; first < rows; first += kPartRows) {
        const int64_t count = std::min(kPartRows, rows - first);
        multiply<float>(count, vecs, {a.data + first * a.row, a.row, a.step}, right, kMatmulColumns, depth, part,
                        kMatmulColumns, Start::zero);
        store_part(part, count, columns, c + first * of.c_row, of.c_row, start == Start::add);
      }
    }
  }
}

}  // namespace FK_ISA
}  // namespace foundry
