// Per-row softmax state, how two splits of a row are combined, and how a row is finished.
#pragma once

#include <cmath>
#include <cstring>

#include "flash_attention_mask.h"
#include "flash_attention_tile_io.h"

namespace foundry {
namespace FK_ISA {

// A row's softmax state: its largest logit and, relative to it, the sum of the weights and the sum of weights times
// their logarithms.
struct RowSums {
  float max, sum, entropy;

  // Adds another split of the row. The caller multiplies the two sums of values by `mine` and `theirs`.
  void combine(const RowSums& other, float& mine, float& theirs) {
    const float top = std::max(max, other.max);
    const auto moved = [&](const RowSums& r, float& factor) {
      factor = r.max == kNone ? 0.0f : std::exp(r.max - top);
      return factor > 0.0f ? factor * (r.entropy + (r.max - top) * r.sum) : 0.0f;
    };
    entropy = moved(*this, mine) + moved(other, theirs);
    sum = sum * mine + other.sum * theirs;
    max = top;
  }
};

// Writes a row's lse and statistics. Returns the factor for its sum of values.
inline float finish_row(const AttentionForward& a, const AttentionSequence& s, int64_t head, int64_t row, RowSums r) {
  const int64_t at = row_offset(a.lse_strides, s, head, a.group, row);
  const bool empty = r.sum == 0.0f;  // a row with NaN has no maximum, but a sum
  if (a.max_logit) a.max_logit[at] = r.sum == r.sum ? r.max : r.sum;
  float factor = 1.0f, unused;
  if (a.sinks && !empty) r.combine({a.sinks[head + row % a.group], 1.0f, 0.0f}, factor, unused);
  const double log_sum = empty ? 0.0 : std::log(double(r.sum));
  if (a.lse) a.lse[at] = empty ? kNone : join_lse(r.max, log_sum);
  if (a.entropy) a.entropy[at] = empty ? 0.0f : float(log_sum - r.entropy / r.sum);
  return empty ? 0.0f : factor / r.sum;
}

// Writes a row's output from its sum of values, which it overwrites.
inline void finish_values(const AttentionForward& a, const AttentionSequence& s, int64_t head, int64_t row,
                          RowSums sums, float* values) {
  const float factor = finish_row(a, s, head, row, sums);
  for (int64_t i = 0; i < a.head_dim_v; i += kLanes) Whole::store(values + i, Whole::load(values + i) * factor);
  with_type(a.type, [&](auto* type) {
    narrow(values, a.head_dim_v, static_cast<decltype(type)>(a.out) + row_offset(a.out_strides, s, head, a.group, row));
  });
}

// Writes a task's result for a row: its output, or the unfinished sums if keys are split.
inline void write_row(const AttentionForward& a, const AttentionTask& task, int64_t row, RowSums sums, float* values) {
  if (!a.splits) return finish_values(a, a.sequences[task.sequence], task.kv_head * a.group, row, sums, values);
  const int64_t at = task.split * kAttentionBlocks * kAttentionRows + row - task.row_begin;
  float* split = a.splits + at * attention_split_size(a.head_dim_v);
  const int64_t dv = round_up(a.head_dim_v, kAttentionPad);
  std::copy(values, values + dv, split);
  std::memcpy(split + dv, &sums, sizeof(sums));
}

}  // namespace FK_ISA
}  // namespace foundry
