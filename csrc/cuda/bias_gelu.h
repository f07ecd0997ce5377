// An activation of x + bias on a GPU over raw pointers and a stream. Each launcher returns the error of its launches.
#pragma once

#include <cuda_runtime_api.h>

#include "../common/bias_gelu.h"

namespace foundry {
namespace cuda {

struct BiasActForward : BiasActForwardCall {
  const void* bias;  // [n_cols] or null
  Dtype bias_type;   // that of x, or f32
};

struct BiasActBackward : BiasActBackwardCall {
  const void* bias;
  Dtype bias_type;
  void* dbias;           // [n_cols] of bias_type, or null
  float* dbias_partial;  // [n_row_blocks, n_cols], or null if dbias is null
  int n_row_blocks;      // from bias_act_row_blocks
};

cudaError_t bias_act_forward(const BiasActForward& args, cudaStream_t stream);
cudaError_t bias_act_backward(const BiasActBackward& args, cudaStream_t stream);

// Into how many parts the backward pass splits the rows. `args` must be complete except for what depends on this
// number: dbias, its partial sums and n_row_blocks.
int bias_act_row_blocks(const BiasActBackward& args, int multiprocessors);

}  // namespace cuda
}  // namespace foundry
