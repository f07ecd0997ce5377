// Attention on the CPU over raw pointers. The caller provides threads and memory; each call handles one task with its
// thread's scratch.
//
// The rows of all query heads of a group are numbered together, row = token * group + head in group, because they read
// the same keys and values.
#pragma once

#include "../common/score.h"
#include "isa.h"
#include "score_program.h"

namespace foundry {

constexpr int kAttentionRows = 64;        // rows of a block, which share one tile of scores
constexpr int kAttentionBlocks = 2;       // blocks of a task, which share one pass over the keys
constexpr int kAttentionKeys = 64;        // keys of a tile
constexpr int kAttentionDecodeRows = 8;   // attention_decode handles tasks with at most this many rows
constexpr int kAttentionDecodeKeys = 64;  // keys of its tiles
constexpr int kAttentionPad = 16;  // head dimensions in scratch are padded to whole registers of any instruction set

inline int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// Sequence n of a batch: its tokens in the tensors.
struct AttentionSequence {
  int64_t batch;  // index of the dense batch dimension
  int64_t q_start, q_len, k_start, k_len;
};

// Paged keys: key j of sequence n, at position p = k_start + j, is in page table[n * stride + p / size]. In HeadStrides
// the page stride takes the place of the batch stride.
struct AttentionPages {
  const int32_t* table;  // or null
  int64_t stride, size;
};

// Dropout keeps a weight if its 16 bits of Philox are at least the threshold.
struct AttentionDropout {
  uint64_t seed;
  uint32_t threshold;    // 0 where dropout is off
  float scale;           // of kept weights
  const int64_t* heads;  // [sequences, H] of batch << 32 | head, or null: a head's own index
  int64_t n_heads;
};

struct AttentionInputs {
  const void *q, *k, *v;
  HeadStrides q_strides, k_strides, v_strides;
  const AttentionSequence* sequences;
  AttentionPages pages;          // of k and v in the forward pass
  int64_t group;                 // query heads per key-value head
  int64_t head_dim, head_dim_v;  // D, Dv
  FK_SCORE_OPTIONS
  // A row's result depends only on the keys that it sees, not on other rows or sequences of the call.
  bool batch_invariant;
  Dtype type;               // of q, k, v and outputs
  bool widens;              // widens bfloat16 to float32 even if the processor multiplies pairs of it
  HeadStrides lse_strides;  // also of the other per-row numbers
  const uint8_t* mask;      // not 0 where a pair is seen, or null
  PairStrides mask_strides;
  AttentionTiles tiles;
  const void* bias;  // added to scores, or null
  Dtype bias_type;
  PairStrides bias_strides;
  AttentionDropout dropout;         // its `heads` are also those of the score function
  const ScorePlan* program;         // the score function, or null
  const ScorePlan* decode_program;  // the same for attention_decode, in the forward pass

  // The position of query 0 of a sequence among its keys.
  int64_t offset(const AttentionSequence& s) const { return bottom_right ? s.k_len - s.q_len : 0; }
  bool masked() const { return mask || tiles.index; }
  bool drops() const { return dropout.threshold > 0; }
  // Whether 64-bit words describe hidden or dropped pairs. Tiles of keys are then aligned.
  bool aligned() const { return masked() || drops(); }
  // Whether the first tile of keys begins at a multiple of kAttentionKeys.
  bool begins_aligned() const { return aligned() || batch_invariant; }
};

struct AttentionForward : AttentionInputs {
  void* out;
  HeadStrides out_strides;
  double* lse;  // double (see AttentionBackward), or null, as the next pointers
  float *entropy, *max_logit;
  // If keys are split over several tasks: unfinished rows [split][row of the task][Dv + RowSums]. Otherwise null.
  float* splits;
};

struct AttentionTask {
  int64_t sequence, kv_head;
  int64_t row_begin, row_end;  // at most kAttentionBlocks * kAttentionRows
  int64_t key_begin, key_end;  // the keys that the task may read
  int64_t split;               // of AttentionForward::splits
};

// Whether attention_decode computes the rows from `row` on of a sequence and key-value head with n_rows rows. It adds
// in another order than the kernel for many rows.
inline bool is_decoded(const AttentionInputs& a, int64_t row, int64_t n_rows) {
  return !a.batch_invariant && row % (kAttentionBlocks * kAttentionRows) == 0 && n_rows - row <= kAttentionDecodeRows;
}

// Scratch for a tile of the bias, as it lies in memory and transposed.
inline int64_t attention_bias_scratch(bool bias) { return bias ? 2 * kAttentionRows * kAttentionKeys : 0; }

// Scratch per thread, in floats.
inline int64_t attention_forward_scratch(int64_t head_dim, int64_t head_dim_v, bool bias) {
  const int64_t d = round_up(head_dim, kAttentionPad), dv = round_up(head_dim_v, kAttentionPad);
  const int64_t tiles = kAttentionBlocks * kAttentionRows * (d + dv) + kAttentionRows * (d > dv ? d : dv) +
                        kAttentionKeys * (2 * kAttentionRows + d + dv + 3 * dv / 2) + attention_bias_scratch(bias);
  const int64_t decode = kAttentionDecodeRows * (d + dv + kAttentionDecodeKeys + kAttentionPad);
  return tiles > decode ? tiles : decode;
}

struct AttentionBackward : AttentionInputs {
  const void* dout;
  HeadStrides dout_strides;
  // Double: rounding to float would scale all weights of a row by up to 2e-7 if lse is near 5, and by 4e-6 near 80. The
  // kernel splits it into two floats.
  const double* lse;
  const float* delta;  // see AttentionDelta
  void *dq, *dk, *dv;  // each null if not needed
  HeadStrides dq_strides, dk_strides, dv_strides;
  float* sums;              // see AttentionBackwardTask
  void* const* score_sums;  // those of `program`'s gradients, which are exclusive (see ScoreGradient), or null
  void* dbias;              // of bias_type, or null
  PairStrides dbias_strides;
  bool own_dbias;  // each pair has its own element, which the tasks write; otherwise AttentionBiasTask computes them

  // dk and dv are summed in place if they are float and their rows fill whole registers.
  bool in_place(int64_t width) const { return type == Dtype::f32 && width % kAttentionPad == 0; }

  // Floats for the sums of a sequence and key-value head, for the gradients that are needed.
  int64_t dq_sums(int64_t rows) const {
    return dq ? round_up(rows, kAttentionRows) * round_up(head_dim, kAttentionPad) : 0;
  }
  int64_t dk_sums(int64_t keys) const {
    return dk && !in_place(head_dim) ? keys * round_up(head_dim, kAttentionPad) : 0;
  }
  int64_t dv_sums(int64_t keys) const {
    return dv && !in_place(head_dim_v) ? keys * round_up(head_dim_v, kAttentionPad) : 0;
  }
};

// A task adds the contribution of its rows and keys to the sums of dq for these rows and of dk and dv for these keys.
// Tasks that share rows or keys run one after another in a fixed order, so there is one copy of the sums and results
// are deterministic. Once a head's sums are written out, the sums of another head reuse their memory; its tasks then
// wait for the last task of the first head.
struct AttentionBackwardTask {
  int64_t sequence, kv_head;
  int64_t row_begin, row_end;  // row_begin is a multiple of kAttentionRows
  int64_t key_begin, key_end;
  // Offset in AttentionBackward::sums of the sums of the sequence and head: dk [k_len, D] and dv [k_len, Dv], if they
  // are summed there. Negative if the task covers all rows and keys; its sums are then in scratch.
  int64_t sums;
  // Same for dq of these rows, [blocks of rows, D, kAttentionRows]. Negative if the task covers all keys of its rows;
  // it then keeps dq of one block at a time in scratch.
  int64_t row_sums;
  int64_t work;                        // pairs of a row and a key
  int64_t next_of_rows, next_of_keys;  // the tasks that wait for this one, of this head or another; negative: none
  bool first_of_rows, first_of_keys;   // first of its head: initialises the sums
  bool last_of_rows, last_of_keys;     // last of its head: writes the sums out
  int64_t work_left;                   // of this task and the longest chain of tasks that wait for it
};

// Computes the elements of dbias that belong to these pairs. A task covers either some rows and keys, or all of those
// that share elements, and one sequence, head or block of rows, or all of them.
struct AttentionBiasTask {
  int64_t sequence_begin, sequence_end, kv_head_begin, kv_head_end, row_begin, row_end, key_begin, key_end;
};

constexpr int64_t kBiasTaskKeys = 256;  // at most, if each key has its own element

// The most elements per key in such a task: rows of a block, tokens of a tile or heads of a group.
inline int64_t attention_bias_sums_width(int64_t group) { return round_up(group, kAttentionRows); }

// delta = sum(dout * out) - dlse of each row; 0 for a row without keys.
struct AttentionDelta {
  const void *out, *dout;
  HeadStrides out_strides, dout_strides, lse_strides;
  const AttentionSequence* sequences;
  int64_t n_heads, head_dim_v;
  const double* lse;
  const float* dlse;  // or null
  Dtype type;
  float* delta;
};

// As attention_forward_scratch; the sums for dk and dv are extra.
inline int64_t attention_backward_scratch(int64_t head_dim, int64_t head_dim_v, bool bias) {
  const int64_t d = round_up(head_dim, kAttentionPad), dv = round_up(head_dim_v, kAttentionPad);
  return kAttentionRows * (3 * d + d / 2 + 2 * dv + dv / 2) +
         kAttentionKeys * (2 * kAttentionRows + kAttentionRows / 2 + d + d / 2 + dv) + attention_bias_scratch(bias);
}

// The sums of a bias task; attention_backward_scratch is extra.
inline int64_t attention_bias_sums(int64_t group) { return kBiasTaskKeys * attention_bias_sums_width(group); }

// Floats per row in AttentionForward::splits.
inline int64_t attention_split_size(int64_t head_dim_v) { return round_up(head_dim_v, kAttentionPad) + kAttentionPad; }

}  // namespace foundry

FK_DECLARE_PER_ISA_AND_AMX(void, attention_forward, const AttentionForward& args, const AttentionTask& task,
                           float* scratch)
FK_DECLARE_PER_ISA_AND_AMX(void, attention_decode, const AttentionForward& args, const AttentionTask& task,
                           float* scratch)
// Combines splits [split, split + num_splits) of the task's rows and writes the results.
FK_DECLARE_PER_ISA_AND_AMX(void, attention_combine, const AttentionForward& args, const AttentionTask& task,
                           int64_t num_splits)
FK_DECLARE_PER_ISA_AND_AMX(void, attention_backward, const AttentionBackward& args, const AttentionBackwardTask& task,
                           float* scratch)
FK_DECLARE_PER_ISA_AND_AMX(void, attention_bias_gradient, const AttentionBackward& args, const AttentionBiasTask& task,
                           float* scratch)
// The gradients of the tensors that a score function reads, added to `sums`: those of the task's pairs. Keys are all.
FK_DECLARE_PER_ISA_AND_AMX(void, attention_score_gradient, const AttentionBackward& args, const AttentionBiasTask& task,
                           void* const* sums, float* scratch)
FK_DECLARE_PER_ISA_AND_AMX(void, attention_delta, const AttentionDelta& args, int64_t sequence, int64_t token_begin,
                           int64_t token_end)
FK_DECLARE_PER_ISA_AND_AMX(float, attention_dsink, const AttentionDelta& args, int64_t n_sequences, int64_t head,
                           float sink)
