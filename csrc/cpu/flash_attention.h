// Attention on the CPU over raw pointers. Threads and memory are the caller's: each call does one task with the scratch
// of its thread.
//
// A query head's rows and those of the other heads of its group are numbered together, row = token * group + head in
// group: all of them read the same keys and values.
#pragma once

#include "../common/flash_attention.h"
#include "isa.h"

namespace foundry {

constexpr int kAttentionRows = 64;        // rows of a block, which share one tile of scores
constexpr int kAttentionBlocks = 2;       // blocks of a task, which share one reading of the keys
constexpr int kAttentionKeys = 64;        // keys of a tile
constexpr int kAttentionDecodeRows = 8;   // a task of no more than these is done by attention_decode
constexpr int kAttentionDecodeKeys = 64;  // keys of its tiles
constexpr int kAttentionPad = 16;  // head dimensions in scratch are padded to whole registers of any instruction set

inline int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// Sequence n of a batch: its tokens in the tensors.
struct AttentionSequence {
  int64_t batch;  // index of the dense batch dimension
  int64_t q_start, q_len, k_start, k_len;
};

// Where the keys of sequences are that lie in pages: key j of sequence n, at the position p = k_start + j, is in page
// table[n * stride + p / size]. A page's stride takes the place of that of a batch in HeadStrides.
struct AttentionPages {
  const int32_t* table;  // or null
  int64_t stride, size;
};

// Which weights are kept: those whose 16 bits of Philox are at least the threshold.
struct AttentionDropout {
  uint64_t seed;
  uint32_t threshold;    // 0 where dropout is off
  float scale;           // of what is kept
  const int64_t* heads;  // [sequences, H] of batch << 32 | head, or null for a head's own place
  int64_t n_heads;
};

struct AttentionInputs {
  const void *q, *k, *v;
  HeadStrides q_strides, k_strides, v_strides;
  const AttentionSequence* sequences;
  AttentionPages pages;          // of k and v in the forward pass
  int64_t group;                 // query heads a key-value head
  int64_t head_dim, head_dim_v;  // D, Dv
  float scale;
  float softcap;                      // 0 for none
  const float* alibi_slopes;          // [H] or [B, H], or null
  int64_t alibi_slopes_batch_stride;  // 0 or H
  const float* sinks;                 // [H] or null
  int64_t window_left, window_right;  // kUnbounded for none
  bool bottom_right;
  // What a row gets depends on the keys that it sees alone: not on the other rows of the call, nor on other sequences.
  bool batch_invariant;
  Dtype type;               // of q, k, v and outputs
  bool widens;              // bfloat16 to float32, also where the processor multiplies pairs of it
  HeadStrides lse_strides;  // also of the other numbers a row
  const uint8_t* mask;      // not 0 where a pair is seen, or null
  PairStrides mask_strides;
  AttentionTiles tiles;
  const void* bias;  // added to scores, or null
  Dtype bias_type;
  PairStrides bias_strides;
  AttentionDropout dropout;

  // The position that query 0 of a sequence has among its keys.
  int64_t offset(const AttentionSequence& s) const { return bottom_right ? s.k_len - s.q_len : 0; }
  bool masked() const { return mask || tiles.index; }
  bool drops() const { return dropout.threshold > 0; }
  // Whether words of 64 keys say what is hidden or dropped.
  bool aligned() const { return masked() || drops(); }
  // Whether the first tile of keys begins at a multiple of kAttentionKeys.
  bool begins_aligned() const { return aligned() || batch_invariant; }
};

struct AttentionForward : AttentionInputs {
  void* out;
  HeadStrides out_strides;
  double* lse;  // or null, as the next: in double, see AttentionBackward
  float *entropy, *max_logit;
  // Where keys are split over several tasks: their unfinished rows, [split][row of the task][Dv + RowSums]; else null.
  float* splits;
};

struct AttentionTask {
  int64_t sequence, kv_head;
  int64_t row_begin, row_end;  // at most kAttentionBlocks * kAttentionRows
  int64_t key_begin, key_end;  // the keys that it may look at
  int64_t split;               // of AttentionForward::splits
};

// Whether the forward pass does the rows from `row` on, of n_rows of a sequence and key-value head, by
// attention_decode, which adds in another order than the kernel of many rows.
inline bool is_decoded(const AttentionInputs& a, int64_t row, int64_t n_rows) {
  return !a.batch_invariant && row % (kAttentionBlocks * kAttentionRows) == 0 && n_rows - row <= kAttentionDecodeRows;
}

// A tile of the bias, as it lies in memory and transposed.
inline int64_t attention_bias_scratch(bool bias) { return bias ? 2 * kAttentionRows * kAttentionKeys : 0; }

// Floats of scratch that a thread needs.
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
  // In double: rounded to float it would change all weights of a row alike, by up to 2e-7 where it is near 5 and by
  // 4e-6 near 80. The kernel makes two floats of it.
  const double* lse;
  const float* delta;  // see AttentionDelta
  void *dq, *dk, *dv;  // each null where no gradient is wanted
  HeadStrides dq_strides, dk_strides, dv_strides;
  float* sums;  // see AttentionBackwardTask
  void* dbias;  // of bias_type, or null
  PairStrides dbias_strides;
  bool own_dbias;  // each pair has an element of its own, which the tasks write; else tasks of its own make it

  // dk and dv are summed in place where they are float and their rows whole registers.
  bool in_place(int64_t width) const { return type == Dtype::f32 && width % kAttentionPad == 0; }

  // Floats that the sums of a sequence and key-value head take, for what is wanted.
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

// A task adds what its rows and keys give to the sums for dq of these rows and to those for dk and dv of these keys.
// Tasks of the same rows follow one another, and so do tasks of the same keys: there is one copy of the sums, and the
// order in which they are added is fixed. Where a head's sums of some rows or keys are written out, those of another
// head take their place: the lines go on there.
struct AttentionBackwardTask {
  int64_t sequence, kv_head;
  int64_t row_begin, row_end;  // row_begin is a multiple of kAttentionRows
  int64_t key_begin, key_end;
  // Where in AttentionBackward::sums those of the sequence and head begin: dk, [k_len, D], and dv, [k_len, Dv], as far
  // as they have any. Negative for a task that does all rows and keys, and has them in its scratch.
  int64_t sums;
  // The same of dq of these rows, [blocks of rows, D, kAttentionRows]. Negative for a task that does all keys of its
  // rows: it has dq of one block at a time in its scratch.
  int64_t row_sums;
  int64_t work;                        // products of a row and a key
  int64_t next_of_rows, next_of_keys;  // the tasks that wait for this one, of this head or another; negative for none
  bool first_of_rows, first_of_keys;   // of the head: it begins the sums
  bool last_of_rows, last_of_keys;     // of the head: it writes them out
  int64_t work_left;                   // of this task and the longest line of those that wait for it
};

// A task that sums the elements of dbias that these pairs have a part in, and no others: those of some rows and keys,
// or of all of what shares them. It has one sequence, head or block of rows, or all.
struct AttentionBiasTask {
  int64_t sequence_begin, sequence_end, kv_head_begin, kv_head_end, row_begin, row_end, key_begin, key_end;
};

constexpr int64_t kBiasTaskKeys = 256;  // of a task at most, where keys have elements of their own

// Elements of a key that such a task has at most: rows of a block, tokens of a tile or heads of a group.
inline int64_t attention_bias_sums_width(int64_t group) { return round_up(group, kAttentionRows); }

// delta = sum(dout * out) - dlse of each row, 0 for a row without keys.
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

// As attention_forward_scratch, besides the sums for dk and dv.
inline int64_t attention_backward_scratch(int64_t head_dim, int64_t head_dim_v, bool bias) {
  const int64_t d = round_up(head_dim, kAttentionPad), dv = round_up(head_dim_v, kAttentionPad);
  return kAttentionRows * (3 * d + d / 2 + 2 * dv + dv / 2) +
         kAttentionKeys * (2 * kAttentionRows + kAttentionRows / 2 + d + d / 2 + dv) + attention_bias_scratch(bias);
}

// The sums of a task for the bias, besides attention_backward_scratch.
inline int64_t attention_bias_sums(int64_t group) { return kBiasTaskKeys * attention_bias_sums_width(group); }

// Floats of one row in AttentionForward::splits.
inline int64_t attention_split_size(int64_t head_dim_v) { return round_up(head_dim_v, kAttentionPad) + kAttentionPad; }

}  // namespace foundry

FK_DECLARE_PER_ISA_AND_AMX(void, attention_forward, const AttentionForward& args, const AttentionTask& task,
                           float* scratch)
FK_DECLARE_PER_ISA_AND_AMX(void, attention_decode, const AttentionForward& args, const AttentionTask& task,
                           float* scratch)
// Combines splits [split, split + num_splits) of the rows of `task` and finishes them.
FK_DECLARE_PER_ISA_AND_AMX(void, attention_combine, const AttentionForward& args, const AttentionTask& task,
                           int64_t num_splits)
FK_DECLARE_PER_ISA_AND_AMX(void, attention_backward, const AttentionBackward& args, const AttentionBackwardTask& task,
                           float* scratch)
FK_DECLARE_PER_ISA_AND_AMX(void, attention_bias_gradient, const AttentionBackward& args, const AttentionBiasTask& task,
                           float* scratch)
FK_DECLARE_PER_ISA_AND_AMX(void, attention_delta, const AttentionDelta& args, int64_t sequence, int64_t token_begin,
                           int64_t token_end)
FK_DECLARE_PER_ISA_AND_AMX(float, attention_dsink, const AttentionDelta& args, int64_t n_sequences, int64_t head,
                           float sink)
