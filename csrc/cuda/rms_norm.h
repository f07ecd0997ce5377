// RMSNorm on a GPU over raw pointers and a stream. Each launcher returns the error of its launches.
#pragma once

#include <cuda_runtime_api.h>

#include "../common/rows.h"

namespace foundry {
namespace cuda {

// Memory types that are compiled: weight_type is x_type or f32; y_type is x_type, or f32 where the weight is f32.
struct RmsNormForward {
  const void* x;
  const void* residual;  // or null: then h is not written
  const void* weight;    // [n_cols] or null
  void* y;               // [rows, n_cols]
  void* h;               // [rows, n_cols]
  float* rstd;           // [rows] or null
  Rows rows;
  RowStrides x_strides, residual_strides;
  int64_t n_cols;
  float eps, weight_offset;
  bool round_before_weight;
  Dtype x_type, weight_type, y_type;
};

struct RmsNormBackward {
  const void* dy;
  const void* dh;  // gradient of h from elsewhere, or null
  const void* x;   // what was normalised
  const void* weight;
  const float* rstd;
  void* dx;           // [rows, n_cols] or null
  void* dw;           // [n_cols] of weight_type, or null
  float* dw_partial;  // [n_blocks, n_cols], or null where dw is
  int n_blocks;       // of rms_norm_backward_blocks
  Rows rows;
  RowStrides dy_strides, dh_strides, x_strides;
  int64_t n_cols;
  float weight_offset;
  bool round_before_weight;
  Dtype x_type, weight_type, y_type;
};

cudaError_t rms_norm_forward(const RmsNormForward& args, cudaStream_t stream);
cudaError_t rms_norm_backward(const RmsNormBackward& args, cudaStream_t stream);

// Blocks of the backward pass, which stay and take row after row, on a GPU of so many multiprocessors.
int rms_norm_backward_blocks(int64_t n_rows, int64_t n_cols, int multiprocessors);

}  // namespace cuda
}  // namespace foundry
