// Divergences of two distributions over raw pointers: what the CPU's kernels are given.
//
// Of a row of n_cols logits x of a student and a of a teacher, q = softmax(scale x) and p = softmax(scale a):
//   forward  KL(p || q) = sum over j of p_j d_j,  d_j = log p_j - log q_j;  its gradient of x_j is scale (q_j - p_j)
//   reverse  KL(q || p);  scale q_j (-d_j - KL(q || p))
//   mixed    teacher_share KL(p || m) + student_share KL(q || m),  m = teacher_share p + student_share q;
//            student_share scale q_j (log(q_j / m_j) - KL(q || m))
#pragma once

#include "rows.h"

namespace foundry {

enum class Divergence { forward, reverse, mixed };

struct KlDivOptions {
  int64_t ignore_index;
  float scale;  // 1 / temperature
  Divergence divergence;
  float teacher_share, student_share;  // of `mixed`; their sum is 1
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
