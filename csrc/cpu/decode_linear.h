// Products of few rows with transposed matrices on the CPU, as in decoding: reading the matrices is all the work. A row
// gets the same bits with any others. The caller starts the threads: each call does a range of blocks of columns of the
// result.
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

// y[row] holds the products of x[row] with the rows of all matrices, one matrix after the other.
struct DecodeLinear {
  const void* x;                  // [n_rows, width], dense
  void* y;                        // [n_rows], n_cols apart
  int64_t n_rows, width, n_cols;  // a call takes at most kDecodeLinearRows
  DecodeLinearMatrix matrices[kDecodeLinearMatrices];
  int n_matrices;
  Dtype type;
  bool widens;  // bfloat16 to float32, also where the processor multiplies pairs of it

  // The same of rows that one call takes, from `first` on.
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

// Blocks are numbered through all matrices; the last block of a matrix may be narrower.
FK_DECLARE_PER_ISA(void, decode_linear, const DecodeLinear& args, int64_t block_begin, int64_t block_end)
