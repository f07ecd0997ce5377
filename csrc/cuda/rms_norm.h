// RMSNorm and LayerNorm on a GPU over raw pointers and a stream. Each launcher returns the error of its launches.
#pragma once

#include <cuda_runtime_api.h>

#include "../common/dropout.h"
#include "../common/rms_norm.h"

namespace foundry {
namespace cuda {

// Kernels are compiled for a weight_type of x_type or f32, and for a y_type of x_type, or of f32 where the weight is
// f32.
struct RmsNormForward : RmsNormForwardCall {
  const void* weight;  // [n_cols] or null
  const void* bias;    // [n_cols] of weight_type or null; where `centered` only
  Dtype weight_type;
  float weight_offset;
  Dropout dropout;  // of x, before the residual is added to it
};

struct RmsNormBackward : RmsNormBackwardCall {
  const void* weight;  // [n_cols] or null
  Dtype weight_type;
  float weight_offset;
  void* dw;           // [n_cols] of weight_type, or null
  float* dw_partial;  // [n_blocks, n_cols], or null where dw is
  void* db;           // the same for the bias; where `centered` only
  float* db_partial;
  int n_blocks;     // of rms_norm_backward_blocks
  Dropout dropout;  // of the forward pass: dx is then the gradient of what was dropped out and added
  void* dresidual;  // [rows, n_cols], that of the residual; written where there is dropout and a dx
};

cudaError_t rms_norm_forward(const RmsNormForward& args, cudaStream_t stream);
cudaError_t rms_norm_backward(const RmsNormBackward& args, cudaStream_t stream);

// Blocks of the backward pass, which is persistent: each block takes row after row. `args` is complete but for what
// depends on their number: dw, db, their partial sums and n_blocks.
int rms_norm_backward_blocks(const RmsNormBackward& args, int multiprocessors);

}  // namespace cuda
}  // namespace foundry
