// Divergences of two distributions over raw pointers: what the CPU's kernels are given.
//
// Of a row of n_cols logits x of a student and a of a teacher, q = softmax(y) with y = scale x, or y = cap tanh(scale x
// / cap), and p likewise of a; the gradient of x_j is dy_j / dx_j times that of y_j:
//   forward  KL(p || q) = sum over j of p_j d_j,  d_j = log p_j - log q_j;  its gradient of y_j is q_j - p_j
//   reverse  KL(q || p);  q_j (-d_j - KL(q || p))
//   mixed    teacher_share KL(p || m) + student_share KL(q || m),  m = teacher_share p + student_share q;
//            student_share q_j (log(q_j / m_j) - KL(q || m))
//   variation  1/2 sum over j of |q_j - p_j|;  1/2 q_j (s_j - sum over i of q_i s_i),  s_j the sign of q_j - p_j
#pragma once

#include "rows.h"

namespace foundry {

enum class Divergence { forward, reverse, mixed, variation };

struct KlDivOptions {
  int64_t ignore_index;
  float scale;  // 1 / temperature
  Divergence divergence;
  float teacher_share, student_share;  // of `mixed`; their sum is 1
  float student_cap, teacher_cap;      // over the temperature; 0 without a soft cap
};

// What is requested: losses, gradients or both.
struct KlDivRows {
  const void* logits;
  const void* teacher;
  const int64_t* target;  // [rows]; only read to see what is ignored
  const float* dloss;     // [rows]; null without dlogits
  float* loss;            // [rows], or null
  void* dlogits;          // [rows, n_cols] of the logits' type, or null; may be the logits themselves
  Rows rows;
  RowStrides logits_strides, teacher_strides;
  int64_t n_cols;
  KlDivOptions options;
  Dtype type, teacher_type;
};

}  // namespace foundry
