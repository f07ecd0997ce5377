// The arguments of the CPU and GPU kernels of rms_norm and layer_norm. Each backend adds weight and bias in the form
// that its kernels read.
#pragma once

#include "rows.h"

namespace foundry {

struct RmsNormForwardCall {
  const void* x;
  const void* residual;  // or null: then h is not written
  void* y;               // [rows, n_cols]
  void* h;               // [rows, n_cols]
  float* rstd;           // [rows] or null
  float* mean;           // same; only if `centered`
  bool centered;         // LayerNorm: subtract the mean, add a bias; nothing is rounded first
  Rows rows;
  RowStrides x_strides, residual_strides;
  int64_t n_cols;
  float eps;
  bool round_before_weight;
  Dtype x_type, y_type;  // y_type is x_type or f32
};

struct RmsNormBackwardCall {
  const void* dy;
  const void* dh;  // the gradient of h, or null
  const void* x;   // the input of the norm
  const float* rstd;
  const float* mean;  // only if `centered`
  bool centered;
  void* dx;  // [rows, n_cols] or null
  Rows rows;
  RowStrides dy_strides, dh_strides, x_strides;
  int64_t n_cols;
  bool round_before_weight;
  Dtype x_type, y_type;
};

}  // namespace foundry
