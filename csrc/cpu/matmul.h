// Products of float32 matrices on the CPU: C = A B, or C += A B. A number of C has the same bits whatever other rows
// and columns there are. The caller starts the threads: each call does one tile of C.
#pragma once

#include <cstdint>

#include "isa.h"

namespace foundry {

// Of each input one of the strides is 1, and of C that between columns.
struct Matmul {
  const float* a;  // [n_rows, depth], its number (i, k) at i * a_row + k * a_step
  int64_t a_row, a_step;
  const float* b;  // [depth, n_cols], (k, j) at k * b_step + j * b_col
  int64_t b_step, b_col;
  float* c;  // [n_rows, n_cols], rows c_row apart
  int64_t c_row;
  int64_t n_rows, n_cols, depth;
  bool add;
};

constexpr int64_t kMatmulRows = 512;    // of a tile, at most
constexpr int64_t kMatmulColumns = 64;  // of B at a time

}  // namespace foundry

FK_DECLARE_PER_ISA(void, matmul_tile, const Matmul& of, int64_t row_begin, int64_t row_end, int64_t col_begin,
                   int64_t col_end)
