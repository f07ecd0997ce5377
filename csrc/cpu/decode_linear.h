// Matmuls of few rows with transposed matrices on the CPU, as in decoding. Their time is that of reading the matrices.
// A row has the same bits whatever the other rows are. The caller starts the threads; each call handles a range of
// column blocks of the result.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../common/rows.h"
#include "isa.h"

namespace foundry {

constexpr int kDecodeLinearRows = 8;      // at most
constexpr int kDecodeLinearMatrices = 4;  // at most
constexpr int64_t kDecodeLinearBlock = 64;

// A weight [n_rows, width]: its rows become columns of the result.
struct DecodeLinearMatrix {
  const void* data;
  int64_t stride;
  int64_t n_rows;
  int64_t blocks() const { return (n_rows + kDecodeLinearBlock - 1) / kDecodeLinearBlock; }
};

// y[row] is x[row] times the rows of all matrices, one matrix after the other.
struct DecodeLinear {
  const void* x;                  // [n_rows, width], contiguous
  void* y;                        // [n_rows], n_cols apart
  int64_t n_rows, width, n_cols;  // one call supports at most kDecodeLinearRows
  DecodeLinearMatrix matrices[kDecodeLinearMatrices];
  int n_matrices;
  Dtype type;
  bool widens;  // widens bfloat16 to float32 even if the processor multiplies pairs of it

  // The same matmul restricted to the rows of one call, from `first` on.
  DecodeLinear few_rows(int64_t first) const {
    const int64_t size = type == Dtype::f32 ? 4 : 2;
    DecodeLinear part = *this;
    part.x = static_cast<const char*>(x) + first * width * size;
    part.y = static_cast<char*>(y) + first * n_cols * size;
    part.n_rows = std::min<int64_t>(kDecodeLinearRows, n_rows - first);
    return part;
  }
};

}  // namespace foundry

// Block numbers run through all matrices. The last block of a matrix may be narrower.
FK_DECLARE_PER_ISA(void, decode_linear, const DecodeLinear& args, int64_t block_begin, int64_t block_end)
