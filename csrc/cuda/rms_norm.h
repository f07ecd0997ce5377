// RMSNorm and LayerNorm on a GPU over raw pointers and a stream. Each launcher returns the error of its launches.
#pragma once

#include <cuda_runtime_api.h>

#include "../common/dropout.h"
#include "../common/rms_norm.h"

namespace foundry {
namespace cuda {

// Kernels are compiled for weight_type equal to x_type or f32. y_type may be x_type, or f32 if the weight is f32.
struct RmsNormForward : RmsNormForwardCall {
  const void* weight;  // [n_cols] or null
  const void* bias;    // [n_cols] of weight_type or null; only if `centered`
  Dtype weight_type;
  float weight_offset;
  Dropout dropout;  // of x, before the residual is added
};

struct RmsNormBackward : RmsNormBackwardCall {
  const void* weight;  // [n_cols] or null
  Dtype weight_type;
  float weight_offset;
  void* dw;           // [n_cols] of weight_type, or null
  float* dw_partial;  // [n_blocks, n_cols], or null if dw is null
  void* db;           // same for the bias; only if `centered`
  float* db_partial;
  int n_blocks;     // from rms_norm_backward_blocks
  Dropout dropout;  // of the forward pass: dx is then the gradient of x before dropout
  void* dresidual;  // [rows, n_cols], the residual's gradient; written if there is dropout and a dx
};

cudaError_t rms_norm_forward(const RmsNormForward& args, cudaStream_t stream);
cudaError_t rms_norm_backward(const RmsNormBackward& args, cudaStream_t stream);

// The number of blocks of the backward pass, which is persistent: each block loops over rows. `args` must be complete
// except for what depends on this number: dw, db, their partial sums and n_blocks.
int rms_norm_backward_blocks(const RmsNormBackward& args, int multiprocessors);

}  // namespace cuda
}  // namespace foundry
