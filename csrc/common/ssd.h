// A step of state-space duality over raw pointers: what the CPU's kernels are given. The formula is in
// foundry_kernels/ops/ssd/__init__.py.
#pragma once

#include "gated_delta_rule.h"

namespace foundry {

// One token of each sequence. Vectors are of `type`, with last strides of 1; token strides are not used.
struct SsdStep {
  const void *x, *B, *C, *z;  // z may be null
  HeadStrides x_strides, B_strides, C_strides, z_strides;
  DeltaRuleNumbers dt, A, D, dt_bias;  // A, D and dt_bias have one number for each head; D may have a row of them
  bool D_is_row;
  float* state;  // [width, state_width] of a head is contiguous, or its transpose
  int64_t state_batch, state_head;
  bool transposed;
  void* y;  // [batch, heads, width]
  int64_t n_heads, group, width, state_width;
  bool softplus;
  float dt_min, dt_max;
  Dtype type;
};

}  // namespace foundry
