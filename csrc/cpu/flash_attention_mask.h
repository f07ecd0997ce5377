// Which keys the rows of a block see, and how scores become logits (common/score.h).
#pragma once

#include <algorithm>
#include <limits>

#include "flash_attention.h"
#include "math.h"

namespace foundry {
namespace FK_ISA {

constexpr float kNone = -std::numeric_limits<float>::infinity();

// Up to kAttentionRows consecutive rows. Keys are counted from `base`, so that they fit in 32 bits.
struct BlockRows {
  int64_t row, count;                                               // the first, and how many
  int64_t key_begin, key_end;                                       // keys that any row sees
  int64_t full_begin, full_end;                                     // keys that every row sees
  int vecs;                                                         // registers that hold the rows
  alignas(64) int32_t first[kAttentionRows], last[kAttentionRows];  // keys that a row sees
  alignas(64) int32_t q_pos[kAttentionRows];                        // a row's position
  alignas(64) float slope[kAttentionRows];

  // Sets the rows from row_begin on, at most up to row_end, and the keys [begin, end) of the sequence. `head` is the
  // first head.
  void set(const AttentionInputs& a, const AttentionSequence& s, int64_t n, int64_t head, int64_t row_begin,
           int64_t row_end, int64_t begin, int64_t end) {
    row = row_begin;
    count = std::min<int64_t>(kAttentionRows, row_end - row_begin);
    vecs = int((count + kLanes - 1) / kLanes);
    const int64_t offset = a.offset(s);
    const auto q_pos_of = [&](int64_t i) { return (row + std::min(i, count - 1)) / a.group + offset; };
    key_begin = std::max(begin, q_pos_of(0) - a.window_left);
    key_end = std::min(end, q_pos_of(count) + a.window_right + 1);
    if (a.begins_aligned() && key_begin < end) key_begin -= (key_begin - begin) % kAttentionKeys;
    full_begin = std::max(begin, q_pos_of(count) - a.window_left);
    full_end = std::min(end, q_pos_of(0) + a.window_right + 1);
    constexpr int64_t kFar = 1 << 30;
    for (int64_t i = 0; i < vecs * kLanes; ++i) {
      const int64_t at = q_pos_of(i) - begin;
      q_pos[i] = int32_t(std::min(std::max(at, -kFar), kFar));
      first[i] = int32_t(std::min(std::max<int64_t>(at - a.window_left, 0), kFar));
      last[i] = int32_t(std::min(std::max<int64_t>(at + a.window_right, -1), kFar));
      slope[i] = a.alibi_slopes
                     ? a.alibi_slopes[n * a.alibi_slopes_batch_stride + head + (row + std::min(i, count - 1)) % a.group]
                     : 0.0f;
    }
  }
};

// Whether logits are more than the scaled score.
inline bool has_bias(const AttentionInputs& a) { return has_score_options(a) || a.bias; }

// The logit of score s without ALiBi and bias.
inline Vec bent(const AttentionInputs& a, Vec s) {
  return foundry::bent(a, s, [](Vec x) FK_INLINE { return tanh(x); });
}

// ALiBi's term of the logits of register v for a key.
inline Vec alibi(const BlockRows& b, int v, int32_t key) {
  VecI q_pos;
  std::memcpy(&q_pos, b.q_pos + v * kLanes, sizeof(q_pos));
  const VecI rel_pos = key - q_pos, behind = q_pos - key;
  return Whole::load(b.slope + v * kLanes) * __builtin_convertvector(rel_pos > behind ? rel_pos : behind, Vec);
}

// x where the rows of register v see the key, `other` elsewhere.
inline Vec seen(const BlockRows& b, int v, int32_t key, Vec x, float other) {
  VecI first, last;
  std::memcpy(&first, b.first + v * kLanes, sizeof(first));
  std::memcpy(&last, b.last + v * kLanes, sizeof(last));
  return (first <= key) & (last >= key) ? x : splat(other);
}

}  // namespace FK_ISA
}  // namespace foundry
