// Cross-entropy over raw pointers: what the CPU's and the GPU's kernels are given.
//
// Of a row x of n_cols logits (y = softcap * tanh(x / softcap) where there is a cap) with target t, class weights w and
// label smoothing e:
//   nll    = lse - y_t,  lse = log of the sum of exp(y)
//   smooth = sum over j of w_j (lse - y_j)
//   loss   = w_t ((1 - e) nll + z_loss lse^2) + e / n_cols smooth
// lse is kept as the sum of two floats, lse + lse_low: so nll and the gradient are exact for a target of probability
// near 1, and for logits so large that a float's steps are coarse there.
#pragma once

#include "rows.h"

namespace foundry {

struct CrossEntropyOptions {
  int64_t ignore_index;
  float label_smoothing, z_loss;
  float softcap;  // 0: none
};

struct CrossEntropyForward {
  const void* logits;
  const int64_t* target;    // [rows], as are the outputs
  const float* weight;      // [n_cols], or null: all are 1
  const float* weight_sum;  // their sum, on the kernel's device; null without weights or if not needed
  float* loss;
  float* lse;      // or null
  float* lse_low;  // or null
  float* z_loss;   // or null
  Rows rows;
  RowStrides logits_strides;
  int64_t n_cols;
  CrossEntropyOptions options;
  Dtype type;
};

struct CrossEntropyBackward {
  const float* dloss;         // [rows], or one value for all rows
  const float* total_weight;  // divides everything unless it is 0; or null
  const void* logits;
  const int64_t* target;
  const float* weight;
  const float* weight_sum;
  const float* lse;
  const float* lse_low;
  void* dlogits;     // [rows, n_cols]
  bool dloss_a_row;  // one dloss per row
  Rows rows;
  RowStrides logits_strides;
  int64_t n_cols;
  // The CPU kernel supports logits of some classes only: first .. first + n_cols - 1 of n_classes. target, weight and
  // weight_sum cover all classes.
  int64_t first, n_classes;
  CrossEntropyOptions options;
  Dtype type;
};

}  // namespace foundry
