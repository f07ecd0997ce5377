// Grouped matmuls on a GPU over raw pointers and a stream. Each launcher returns the error of its launch.
//
// Group e ends before row offs[e]. offs is only on the device, so it is not checked, but no access leaves the tensors
// for any offs. Sizes are less than kMostRows.
#pragma once

#include <cuda_runtime_api.h>

#include "../common/rows.h"

namespace foundry {
namespace cuda {

constexpr int kMostRows = 0x7FFFFFFF - 1024;  // leaves room for the end of the last tile

// y = x times the matrix of each row's group. Rows in no group become zero.
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
