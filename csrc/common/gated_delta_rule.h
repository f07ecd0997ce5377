// The gated delta rule over raw pointers: what the CPU's kernels are given. The formula is in
// foundry_kernels/ops/gated_delta_rule/__init__.py.
#pragma once

#include "flash_attention.h"
#include "rows.h"

namespace foundry {

// A sequence: tokens [first, last) of a batch entry. `chunk` is the index of its first chunk in `states`.
struct DeltaRuleDocument {
  int64_t batch, first, last, chunk;
};

// One number for each head of v and token, or nothing. `channels`: a row of one for each dimension of a key.
struct DeltaRuleNumbers {
  const void* data;  // or null
  HeadStrides strides;
  Dtype type;
  bool channels;
};

// Without decay_log, g is the decay's logarithm; with it, -e^decay_log softplus(g + dt_bias) is.
struct DeltaRuleGates {
  const float* decay_log;  // [heads], or null
  const float* dt_bias;    // [heads] or, with channels, [heads, key_width]; or null
  float beta_limit;        // the step size is beta_limit / (1 + e^-beta); 0: beta
};

struct DeltaRuleInputs {
  const void *q, *k, *v;  // of `type`, with last strides of 1
  HeadStrides q_strides, k_strides, v_strides;
  DeltaRuleNumbers g, beta;
  DeltaRuleGates gates;
  const DeltaRuleDocument* documents;
  int64_t n_heads, group;  // of v; heads of v for each head of q
  int64_t key_width, value_width;
  int64_t chunk;     // tokens, a multiple of kDeltaRuleRows
  int64_t n_chunks;  // of a batch entry, in `states`
  float scale;
  bool l2norm, delta;
  Dtype type;
};

// A task: a head of a document, and some columns of its values and state.
struct DeltaRuleTask {
  int64_t document, head, first_column, n_columns;
};

struct DeltaRuleForward : DeltaRuleInputs {
  const float* initial_state;  // [documents, heads, key_width, value_width], or null
  void* out;
  HeadStrides out_strides;
  float* final_state;  // as initial_state, or null
  float* states;       // [batch, heads, n_chunks, key_width, value_width], before each chunk, or null
};

// Gradients that are not needed are null.
struct DeltaRuleBackward : DeltaRuleInputs {
  const void* dout;
  HeadStrides dout_strides;
  const float* dfinal_state;  // or null
  const float* states;
  void *dq, *dk;  // of a head of v: in float if there are several for a head of q, otherwise of `type`
  HeadStrides dq_strides, dk_strides;
  void* dv;
  HeadStrides dv_strides;
  void *dg, *dbeta;  // [batch, heads, tokens] (dg with channels: of key_width numbers), of the types of g and beta
  int64_t n_tokens;  // of a batch entry
  float* dinitial_state;
  double *ddecay_log, *ddt_bias;  // parts of each document: [documents, heads], with channels dt_bias's times key_width
};

// One token of each sequence.
struct DeltaRuleStep {
  const void *q, *k, *v;  // of `type`, with last strides of 1; token strides are not used
  HeadStrides q_strides, k_strides, v_strides;
  DeltaRuleNumbers g, beta;
  float* state;  // [key_width, value_width] of a head is contiguous
  int64_t state_batch, state_head;
  void* out;  // [batch, heads, value_width]
  int64_t n_heads, group, key_width, value_width;
  float scale;
  bool l2norm;
  Dtype type;
  DeltaRuleGates gates;
};

// Adds the gradients of the heads of v that share a head of q, in order: [n, group, tokens, width] to rows of `type`.
struct DeltaRuleGroups {
  const float* parts;
  int64_t group, n_tokens, width, n_heads;
  void* out;
  HeadStrides out_strides;
  Dtype type;
};

}  // namespace foundry
