// The rows of a block of queries: which keys each sees, what its scores mean, and how a row is finished.
#pragma once

#include <cmath>
#include <limits>

#include "flash_attention_tiles.h"

namespace foundry {
namespace FK_ISA {

constexpr float kLn2 = 0.693147181f;
constexpr float kNone = -std::numeric_limits<float>::infinity();

// Up to kAttentionRows consecutive rows. Keys are counted from `base`, so that 32 bits hold them.
struct BlockRows {
  int64_t row, count;                                               // the first, and how many
  int64_t key_begin, key_end;                                       // those that any row sees
  int64_t full_begin, full_end;                                     // those that every row sees
  int vecs;                                                         // registers that hold the rows
  alignas(64) int32_t first[kAttentionRows], last[kAttentionRows];  // keys that a row sees
  alignas(64) int32_t place[kAttentionRows];                        // a row's own position
  alignas(64) float slope[kAttentionRows];

  // Rows from row_begin on, no further than row_end, and keys [begin, end) of the sequence; `head` is its first.
  void set(const AttentionInputs& a, const AttentionSequence& s, int64_t n, int64_t head, int64_t row_begin,
           int64_t row_end, int64_t begin, int64_t end) {
    row = row_begin;
    count = std::min<int64_t>(kAttentionRows, row_end - row_begin);
    vecs = int((count + kLanes - 1) / kLanes);
    const int64_t offset = a.offset(s);
    const auto place_of = [&](int64_t i) { return (row + std::min(i, count - 1)) / a.group + offset; };
    key_begin = std::max(begin, place_of(0) - a.left);
    key_end = std::min(end, place_of(count) + a.right + 1);
    full_begin = std::max(begin, place_of(count) - a.left);
    full_end = std::min(end, place_of(0) + a.right + 1);
    constexpr int64_t kFar = 1 << 30;
    for (int64_t i = 0; i < vecs * kLanes; ++i) {
      const int64_t at = place_of(i) - begin;
      place[i] = int32_t(std::min(std::max(at, -kFar), kFar));
      first[i] = int32_t(std::min(std::max<int64_t>(at - a.left, 0), kFar));
      last[i] = int32_t(std::min(std::max<int64_t>(at + a.right, -1), kFar));
      slope[i] =
          a.slopes ? a.slopes[n * a.slopes_batch_stride + head + (row + std::min(i, count - 1)) % a.group] : 0.0f;
    }
  }
};

// Whether logits need more than a product with the scale.
inline bool has_bias(const AttentionInputs& a) { return a.softcap > 0.0f || a.slopes; }

// The part of a logit that a lane's score s gives, before ALiBi: softcap * tanh(scale * s / softcap), or scale * s.
inline Vec capped(const AttentionInputs& a, Vec s) {
  return a.softcap > 0.0f ? a.softcap * tanh(s * a.scale * (1.0f / a.softcap)) : s * a.scale;
}

// ALiBi's part of the logits of register v for a key.
inline Vec alibi(const BlockRows& b, int v, int32_t key) {
  VecI place;
  std::memcpy(&place, b.place + v * kLanes, sizeof(place));
  const VecI ahead = key - place, behind = place - key;
  return Whole::load(b.slope + v * kLanes) * __builtin_convertvector(ahead > behind ? ahead : behind, Vec);
}

// x where the rows of register v see the key, `other` elsewhere.
inline Vec seen(const BlockRows& b, int v, int32_t key, Vec x, float other) {
  VecI first, last;
  std::memcpy(&first, b.first + v * kLanes, sizeof(first));
  std::memcpy(&last, b.last + v * kLanes, sizeof(last));
  return (first <= key) & (last >= key) ? x : splat(other);
}

// What is known of a row's softmax: its largest logit and, relative to it, the sum of the weights and of the weights
// times their logarithms.
struct RowSums {
  float max, sum, entropy;

  // Adds another part of the row; sums of values are to be multiplied by `mine` and `theirs`.
  void merge(const RowSums& other, float& mine, float& theirs) {
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

// Writes a row's numbers; returns what its sum of values is to be multiplied by.
inline float finish_row(const AttentionForward& a, const AttentionSequence& s, int64_t head, int64_t row, RowSums r) {
  const int64_t at = row_offset(a.lse_strides, s, head, a.group, row);
  const bool empty = r.sum == 0.0f;  // of NaN there is no maximum, but a sum
  if (a.max_logit) a.max_logit[at] = r.sum == r.sum ? r.max : r.sum;
  float factor = 1.0f, unused;
  if (a.sinks && !empty) r.merge({a.sinks[head + row % a.group], 1.0f, 0.0f}, factor, unused);
  const double log_sum = empty ? 0.0 : std::log(double(r.sum));
  if (a.lse) a.lse[at] = empty ? kNone : float(r.max + log_sum);
  if (a.entropy) a.entropy[at] = empty ? 0.0f : float(log_sum - r.entropy / r.sum);
  return empty ? 0.0f : factor / r.sum;
}

// Writes a row's output from its sum of values, which it overwrites, and its numbers.
inline void finish_values(const AttentionForward& a, const AttentionSequence& s, int64_t head, int64_t row,
                          RowSums sums, float* values) {
  const float factor = finish_row(a, s, head, row, sums);
  for (int64_t i = 0; i < a.value_width; i += kLanes) Whole::store(values + i, Whole::load(values + i) * factor);
  with_type(a.type, [&](auto* type) {
    narrow(values, a.value_width,
           static_cast<decltype(type)>(a.out) + row_offset(a.out_strides, s, head, a.group, row));
  });
}

// What a task has found for a row: its output, or where keys are split the unfinished sums.
inline void write_row(const AttentionForward& a, const AttentionTask& task, int64_t row, RowSums sums, float* values) {
  if (!a.parts) return finish_values(a, a.sequences[task.sequence], task.kv_head * a.group, row, sums, values);
  const int64_t at = task.part * kAttentionBlocks * kAttentionRows + row - task.row_begin;
  float* part = a.parts + at * attention_part_size(a.value_width);
  const int64_t width = round_up(a.value_width, kAttentionPad);
  std::copy(values, values + width, part);
  std::memcpy(part + width, &sums, sizeof(sums));
}

}  // namespace FK_ISA
}  // namespace foundry
