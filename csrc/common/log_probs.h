// Log-probabilities over raw pointers: what the CPU's kernels are given.
//
// Of a row x of n_cols logits, y = logit_scale x (softcap tanh(y / softcap) where there is a cap), with target t:
//   lse = log of the sum of exp(y),  log_prob = y_t - lse,  entropy = lse - sum over j of p_j y_j,  p_j = exp(y_j -
//   lse)
// lse is kept as the sum of two floats, as for cross-entropy.
//
// stats are 1 if no logit is larger than the target's and none before it as large, else 0; the mean of y; and the log
// of the sum of p_j^2. They have no gradient.
//
// The gradient of y_j is, with the row's numbers g, c and b (the gradient of log_prob; that of lse less entropy times
// that of entropy; and minus that of entropy),
//   [j = t] g + p_j (c - g + b (y_j - lse))
#pragma once

#include "rows.h"

namespace foundry {

struct LogProbsOptions {
  int64_t ignore_index;
  float logit_scale;
  float softcap;  // 0: none
};

struct LogProbsForward {
  const void* logits;
  const int64_t* target;  // [rows], as are the outputs
  float* log_probs;
  float* entropy;  // or null
  float* lse;      // or null
  float* lse_low;  // or null
  float* stats;    // [rows, 3], or null
  Rows rows;
  RowStrides logits_strides;
  int64_t n_cols;
  LogProbsOptions options;
  Dtype type;
};

struct LogProbsBackward {
  const float* g;  // [rows]
  const float* c;  // or null: 0
  const float* b;  // or null: 0
  const void* logits;
  const int64_t* target;
  const float* lse;
  const float* lse_low;
  void* dlogits;  // [rows, n_cols]; may be the logits themselves
  Rows rows;
  RowStrides logits_strides;
  int64_t n_cols;
  int64_t first;  // the class of the first column; target covers all classes
  LogProbsOptions options;
  Dtype type;
};

}  // namespace foundry
