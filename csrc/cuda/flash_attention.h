// Attention on a GPU over raw pointers and a stream. Each launcher returns the error of its launch.
#pragma once

#include <cuda_runtime_api.h>

#include "../common/score.h"

namespace foundry {
namespace cuda {

// Dropout keeps a weight if its 16 bits of Philox are at least the threshold.
struct DroppedWeights {
  const int64_t* seed;   // in the memory of the tensors' device
  uint32_t threshold;    // 0 where dropout is off
  float scale;           // of kept weights
  const int64_t* heads;  // [sequences, H] of batch << 32 | head, or null: a head's own index
};

// Sequence n is the n-th batch element or, if sequences are packed, rows starts[n] to starts[n + 1].
struct AttentionInputs {
  const void *q, *k, *v;
  HeadStrides q_strides, k_strides, v_strides;
  Dtype type;                          // of q, k, v, outputs and gradients
  const int32_t *starts_q, *starts_k;  // or null
  int64_t n_sequences, n_heads;
  int64_t n_queries, n_keys;  // of the longest sequence
  int64_t total_q, total_k;   // of packed tensors
  int64_t group;              // query heads per key-value head
  int head_dim, head_dim_v;   // D, Dv
  FK_SCORE_OPTIONS
  bool batch_invariant;     // tiles and splits do not depend on the rest of the batch
  HeadStrides row_strides;  // of lse and the other per-row numbers
  const uint8_t* mask;      // not 0 where a pair is seen, or null
  PairStrides mask_strides;
  AttentionTiles tiles;
  const void* bias;  // added to scores, or null
  Dtype bias_type;
  PairStrides bias_strides;
  DroppedWeights dropout;
};

struct AttentionForward : AttentionInputs {
  void* out;
  HeadStrides out_strides;
  double* lse;  // or null, as the next; double, because rounding to float would scale all weights of a row
  float *entropy, *max_logit;
};

struct AttentionBackward : AttentionInputs {
  const void *out, *dout;
  HeadStrides out_strides, dout_strides;
  const double* lse;
  const float* dlse;  // or null
  float* delta;       // sum(dout * out) - dlse of each row, computed by the first launch
  // For the tensor core kernels: each row's lse in powers of 2 and its delta, or, if there is a bias, the two parts of
  // lse, the second in powers of 2; or null. Infinite for a row without keys, whose weights are then 0.
  float* numbers;
  void *dq, *dk, *dv;  // each null if not needed
  HeadStrides dq_strides, dk_strides, dv_strides;
  float* dsinks;  // [H], or null
  void* dbias;    // of bias_type, or null
  PairStrides dbias_strides;
  int64_t dbias_sizes[4];
  bool own_dbias;  // each pair has an element of its own, which the dq kernel may write; those of hidden pairs are 0
};

// The GPU properties on which tiles depend: multiprocessors, bytes of shared memory of each, and whether the compute
// capability is 8.x.
struct Gpu {
  int multiprocessors, shared;
  bool is_8x;
};

// How a forward pass with tensor cores splits rows and keys.
struct Splits {
  int pack;      // heads of a group packed into rows: row = query * pack + head in group
  int count;     // parts of the keys
  bool large;    // tiles of 128 rows
  int64_t rows;  // of all sequences and heads
  float* sums;   // if keys are split, the unfinished rows [count, rows, row_floats], else null

  // Dv sums of values, then RowSums, padded to an even number.
  FK_HOST_DEVICE int64_t row_floats(int head_dim_v) const { return head_dim_v + 4; }
  int64_t floats(int head_dim_v) const { return count > 1 ? count * rows * row_floats(head_dim_v) : 0; }
};

Splits plan_forward(const AttentionForward& args, const Gpu& gpu);
cudaError_t attention_forward(const AttentionForward& args, const Splits& splits, cudaStream_t stream);
bool backward_in_tiles(const AttentionBackward& args);  // whether tensor cores compute it; they need `numbers`
cudaError_t attention_backward(const AttentionBackward& args, cudaStream_t stream);
// Only dsinks, from delta and lse. attention_backward computes it too.
cudaError_t attention_dsinks(const AttentionBackward& args, cudaStream_t stream);

}  // namespace cuda
}  // namespace foundry
