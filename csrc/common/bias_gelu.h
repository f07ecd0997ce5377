// An activation of x + bias with dropout, over raw pointers: the arguments of both the CPU and the GPU kernels. Each
// backend adds the bias in the form that its kernels read.
#pragma once

#include "activation.h"
#include "dropout.h"
#include "rows.h"

namespace foundry {

struct BiasActForwardCall {
  const void* x;
  void* y;  // [rows, n_cols]
  Rows rows;
  RowStrides x_strides;
  int64_t n_cols;
  Activation activation;
  Dtype type;
  Dropout dropout;
};

struct BiasActBackwardCall {
  const void* dy;
  const void* x;
  void* dx;  // [rows, n_cols] or null
  Rows rows;
  RowStrides dy_strides, x_strides;
  int64_t n_cols;
  Activation activation;
  Dtype type;
  Dropout dropout;
};

}  // namespace foundry
