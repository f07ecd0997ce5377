// Gated linear units over raw pointers: what the CPU and GPU kernels are both given.
#pragma once

#include "activation.h"
#include "dropout.h"
#include "rows.h"

namespace foundry {

// Options of swiglu: y = g * logistic(alpha * g) * (u + up_offset), with g = min(gate, limit) and u clamped to
// -limit .. limit. They go beside the structs below, so that kernels without them are given nothing more.
struct GluOptions {
  bool interleaved = false;  // `gate` (and `dgate`) has gate in its even and up in its odd columns; `up` is null
  bool changed = false;      // whether any of the rest is not as here
  bool limited = false;
  float alpha = 1.f, limit = 0.f, up_offset = 0.f;
};

// y = activation(gate) * up, dropped out. With dropout rows are those of the output: none are joined.
struct GluForward {
  const void* gate;
  const void* up;
  void* y;  // [rows, n_cols]
  Rows rows;
  RowStrides gate_strides, up_strides;
  int64_t n_cols;
  Activation activation;
  Dtype type;
  Dropout dropout;
};

struct GluBackward {
  const void* dy;
  const void* gate;
  const void* up;
  void* dgate;         // or null
  void* dup;           // or null
  int64_t out_stride;  // between rows of dgate, and of dup: more than n_cols where they share one tensor
  Rows rows;
  RowStrides dy_strides, gate_strides, up_strides;
  int64_t n_cols;
  Activation activation;
  Dtype type;
  Dropout dropout;
};

}  // namespace foundry
