// Weighted sums of rows over raw pointers: the kernel arguments of combine_experts.
//
// Token t has k slots, each a row of x or -1 for none: y_t = sum over j of weights_tj x_slot. A row is in at most one
// slot, so each slot writes the gradient of its own row.
#pragma once

#include "rows.h"

namespace foundry {

struct CombineExpertsForward {
  const void* x;         // rows of n_cols, x_stride elements apart
  const float* weights;  // [n_tokens, k], or null: all are 1
  const int64_t* slots;  // [n_tokens, k]
  void* y;               // [n_tokens, n_cols]
  int64_t x_stride, n_rows, n_tokens, n_cols, k;
  Dtype type;
};

struct CombineExpertsBackward {
  const void* dy;  // rows of n_cols, dy_stride elements apart
  const void* x;
  const float* weights;
  const int64_t* slots;
  void* dx;         // rows of n_cols, or null; rows that no slot refers to are not written
  float* dweights;  // [n_tokens, k], or null
  int64_t dy_stride, x_stride, n_rows, n_tokens, n_cols, k;
  Dtype type;
};

}  // namespace foundry
