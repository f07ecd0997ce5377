// Products of groups of rows on a GPU over raw pointers and a stream. Each launcher returns the error of its launch.
//
// The rows of group e end before offs[e], which is on the device alone. Nothing outside of the tensors is read or
// written whatever offs holds. Sizes are less than kMostRows.
#pragma once

#include <cuda_runtime_api.h>

#include "../common/rows.h"

namespace foundry {
namespace cuda {

constexpr int kMostRows = 0x7FFFFFFF - 1024;  // the end of a tile is a number too

// y = x times the matrix of each row's group; rows of no group become zeros.
struct GroupedMm {
  const void* x;        // [n_rows, n_in]
  const void* weight;   // [n_groups, n_in, n_out]
  const int32_t* offs;  // [n_groups]
  void* y;              // [n_rows, n_out], contiguous
  int64_t x_strides[2], weight_strides[3];
  int n_rows, n_groups, n_in, n_out;
  Dtype type;
};

// out = a^T b over the rows of each group.
struct GroupedMmGradient {
  const void *a, *b;    // [n_rows, n_a], [n_rows, n_b]
  const int32_t* offs;  // [n_groups]
  void* out;            // [n_groups, n_a, n_b], contiguous
  int64_t a_strides[2], b_strides[2];
  int n_rows, n_groups, n_a, n_b;
  Dtype type;
};

cudaError_t grouped_mm(const GroupedMm& args, cudaStream_t stream);
cudaError_t grouped_mm_gradient(const GroupedMmGradient& args, cudaStream_t stream);

}  // namespace cuda
}  // namespace foundry
