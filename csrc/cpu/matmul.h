// Matmuls on the CPU, summed in float32: C = A B, or C += A B, of float32 or of bfloat16, which is widened a panel at a
// time. An element of C has the same bits whatever other rows and columns there are. The caller starts the threads;
// each call computes one tile of C.
#pragma once

#include <cstdint>

#include "../common/rows.h"
#include "isa.h"

namespace foundry {

// One stride of each input is 1, and so is C's stride between columns.
struct Matmul {
  const void* a;  // [n_rows, depth], element (i, k) at i * a_row + k * a_step
  int64_t a_row, a_step;
  const void* b;  // [depth, n_cols], element (k, j) at k * b_step + j * b_col
  int64_t b_step, b_col;
  void* c;  // [n_rows, n_cols], rows c_row apart
  int64_t c_row;
  int64_t n_rows, n_cols, depth;
  bool add;
  Dtype type = Dtype::f32;    // of A and B: f32 or bf16
  Dtype c_type = Dtype::f32;  // f32, or `type`

  bool rounds() const { return c_type != Dtype::f32; }
};

constexpr int64_t kMatmulRows = 512;    // of a tile, at most
constexpr int64_t kMatmulColumns = 64;  // of B at a time

// Scratch, in floats, for a tile of this size: holds sums that are rounded at the end.
inline int64_t matmul_scratch(const Matmul& of, int64_t rows, int64_t columns) {
  return of.rounds() ? rows * ((columns + kMatmulColumns - 1) / kMatmulColumns * kMatmulColumns) : 0;
}

}  // namespace foundry

FK_DECLARE_PER_ISA(void, matmul_tile, const Matmul& of, int64_t row_begin, int64_t row_end, int64_t col_begin,
                   int64_t col_end, float* scratch)
