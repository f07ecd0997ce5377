// The arguments of the CPU and GPU kernels of gated linear units.
#pragma once

#include "activation.h"
#include "dropout.h"
#include "rows.h"

namespace foundry {

// Options of swiglu: y = g * logistic(alpha * g) * (u + up_offset), where g = min(gate, limit) and u is clamped to
// -limit .. limit. They are a separate argument, so that kernels without options take nothing extra.
struct GluOptions {
  bool interleaved = false;  // `gate` (and `dgate`) has gate in even and up in odd columns; `up` is null
  bool changed = false;      // whether any other option differs from its default
  bool limited = false;
  float alpha = 1.f, limit = 0.f, up_offset = 0.f;
};

// y = activation(gate) * up, with dropout. With dropout, rows are those of the output and are not merged.
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
  int64_t out_stride;  // between rows of dgate, and of dup; more than n_cols if they share one tensor
  Rows rows;
  RowStrides dy_strides, gate_strides, up_strides;
  int64_t n_cols;
  Activation activation;
  Dtype type;
  Dropout dropout;
};

}  // namespace foundry
