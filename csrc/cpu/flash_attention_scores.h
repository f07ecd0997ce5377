// Score functions on the tiles of attention.
#pragma once

#include <optional>

#include "flash_attention_mask.h"
#include "score_program.h"

namespace foundry {
namespace FK_ISA {

// Computes what the block's rows determine.
inline void begin_scores(const AttentionInputs& a, const ScorePlan& plan, int64_t sequence, int64_t head,
                         const BlockRows& b, float* memory) {
  const int64_t* heads = a.dropout.heads ? a.dropout.heads + sequence * a.dropout.n_heads : nullptr;
  score_block(plan, {sequence, head, a.group, b.row, b.count, heads}, memory);
}

// The arguments once scores are logits.
template <class Arguments> inline Arguments finished(Arguments a) {
  a.scale = 1.0f;
  a.softcap = 0.0f;
  a.alibi_slopes = nullptr;
  a.bias = nullptr;
  return a;
}

// Turns a tile's products [n, kAttentionRows] into the logits that a score function takes. `key` is the first, counted
// as in BlockRows. `bend` receives the slope of the soft cap if there is one.
inline void finish_logits(const AttentionInputs& a, const BlockRows& b, const float* bias, float* scores, int64_t n,
                          int32_t key, float* bend) {
  for (int64_t j = 0; j < n; ++j)
    for (int v = 0; v < b.vecs; ++v) {
      const int64_t at = j * kAttentionRows + v * kLanes;
      Vec s = bent(a, Whole::load(scores + at));
      if (bend && FK_BENDS(a)) Whole::store(bend + at, bent_slope(a, s));
      if (a.alibi_slopes) s -= alibi(b, v, key + int32_t(j));
      if (bias) s += Whole::load(bias + at);
      Whole::store(scores + at, s);
    }
}

}  // namespace FK_ISA
}  // namespace foundry
