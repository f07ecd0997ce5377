// RoPE, with or without RMSNorm of each head, on a GPU over raw pointers and a stream. Each launcher returns the error
// of its launches. A token whose position is outside the tables reads nothing and becomes NaN.
#pragma once

#include <cuda_runtime_api.h>

#include "../common/rope.h"

namespace foundry {
namespace cuda {

struct QkNormRopeHeads : NormedHeads {
  const void* weight;  // [D] or null
  Dtype weight_type;
};

struct QkNormRopeForward : QkNormRopeCall<QkNormRopeHeads> {
  float eps, weight_offset;
};

struct QkNormRopeGradients : NormedGradients {
  const void* weight;  // [D] or null
  Dtype weight_type;
  void* dw;           // [D] of weight_type, or null
  float* dw_partial;  // [n_blocks, D], or null if dw is null
  int n_blocks;       // from qk_norm_rope_backward_blocks
};

struct QkNormRopeBackward : QkNormRopeCall<QkNormRopeGradients> {
  float weight_offset;
};

cudaError_t rope(const Rope& args, cudaStream_t stream);
cudaError_t qk_norm_rope_forward(const QkNormRopeForward& args, cudaStream_t stream);
cudaError_t qk_norm_rope_backward(const QkNormRopeBackward& args, cudaStream_t stream);

// The number of blocks of the backward pass for n_rows (heads times tokens). The blocks are persistent and loop over
// rows.
int qk_norm_rope_backward_blocks(int64_t n_rows, int multiprocessors);

}  // namespace cuda
}  // namespace foundry
