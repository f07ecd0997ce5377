// GELU of x + bias over raw pointers: what the CPU and GPU kernels are both given. Each backend adds the bias, in the
// form that its kernels read.
#pragma once

#include "activation.h"
#include "rows.h"

namespace foundry {

struct BiasGeluForwardCall {
  const void* x;
  void* y;  // [rows, n_cols]
  Rows rows;
  RowStrides x_strides;
  int64_t n_cols;
  Activation activation;
  Dtype type;
};

struct BiasGeluBackwardCall {
  const void* dy;
  const void* x;
  void* dx;  // [rows, n_cols] or null
  Rows rows;
  RowStrides dy_strides, x_strides;
  int64_t n_cols;
  Activation activation;
  Dtype type;
};

}  // namespace foundry
