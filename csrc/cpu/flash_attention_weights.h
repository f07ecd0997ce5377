// Turns a tile of scores of the forward pass into weights.
#pragma once

#include "flash_attention_mask.h"
#include "flash_attention_pairs.h"
#include "flash_attention_words.h"

namespace foundry {
namespace FK_ISA {

struct Block : BlockRows {
  float *queries, *out;  // transposed: [D, kAttentionRows], [Dv, kAttentionRows]
  alignas(64) float max[kAttentionRows], sum[kAttentionRows], entropy[kAttentionRows];
  BlockWords words;
  float* program;  // what the rows determine of the score function
};

// How far a later logit may exceed the maximum that weights are relative to before earlier sums are rescaled. With AMX
// the sums are in memory, and rescaling them takes an eighth of a matmul. Weights and their sums are floats, so values
// e^4 times as large are just as precise. Without AMX, and if the maximum is itself an output, the limit is 0.
template <class E>
inline float slack_of(const AttentionForward& a) {
  return kTiles && kPer<E> == 2 && !a.max_logit ? 4.0f : 0.0f;
}

// e^(s unit - at) of scores s. With pairs results are rounded to 16 bits, so the short power of two is enough. With a
// bias unit is 1, and the difference comes first: of large numbers the product with kLog2E overflows, and its rounding
// error is the weight's.
template <class E, bool kBias> struct Weights {
  static constexpr bool kShort = kPer<E> == 2, kScaled = kShort && !kBias;
  Vec unit, at;

  Weights(Vec unit, Vec at) : unit(kScaled ? unit * kLog2E : unit), at(kScaled ? at * kLog2E : at) {}

  // The weight, and its logarithm times kLog.
  Vec operator()(Vec s, Vec& log) const {
    log = s * unit - at;
    if constexpr (kShort && kBias) log *= kLog2E;
    if constexpr (kShort) return exp2<true>(log);
    else return exp(log);
  }
  static constexpr float kLog = kShort ? 0.693147181f : 1.0f;
};

// Turns one tile of scores [n, rows] into weights relative to the largest logit so far. Sets `scale` to the factor for
// the earlier sums. `key` is the first key, counted as in BlockRows. With E bfloat16 the weights of two keys share a
// row. Runs steps of `products` in between.
template <class E, Hidden kHidden, bool kDrops, bool kBias, bool kEntropy>
void softmax_tile(const AttentionForward& a, Block& b, const TileOptions& with, float* scores, int64_t n, int32_t key,
                  float* scale, TileQueue& products) {
  const Vec unit = splat(kBias ? 1.0f : a.scale);  // scale of the values in `scores`
  const Vec slack = splat(slack_of<E>(a));
  for (int v = 0; v < b.vecs; ++v) {
    [[maybe_unused]] const PickedLanes lanes(v);
    float* column = scores + v * kLanes;
    const auto logit = [&](int64_t j) FK_INLINE {
      Vec s = Whole::load(column + j * kAttentionRows);
      if constexpr (kBias) {
        s = bent(a, s);
        if (a.alibi_slopes) s -= alibi(b, v, key + int32_t(j));
        if (with.bias) s += Whole::load(with.bias + j * kAttentionRows + v * kLanes);
      }
      if constexpr (kHidden == Hidden::edge) s = seen(b, v, key + int32_t(j), s, kNone);
      if constexpr (kHidden == Hidden::words) s = lanes.pick(with.seen + j, s, kNone);
      if constexpr (kBias || kHidden != Hidden::nothing) Whole::store(column + j * kAttentionRows, s);
      return s;
    };
    Vec top[4] = {splat(kNone), splat(kNone), splat(kNone), splat(kNone)};  // to hide a latency of four cycles
    int64_t read = 0;
    for (; read + 4 <= n; read += 4)
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) top[i] = larger(logit(read + i), top[i]);
    for (; read < n; ++read) top[0] = larger(logit(read), top[0]);
    const auto row = [&](float* of) { return of + v * kLanes; };
    const Vec before = Whole::load(row(b.max));
    const Vec found = larger(larger(top[0], top[1]), larger(top[2], top[3])) * unit;
    const Vec now = larger(found > before + slack ? found : before, before);
    const Vec at = now == splat(kNone) ? Vec{} : now;  // a row that has seen no key yet
    const Vec moved = before - at, factor = exp(moved);
    const Weights<E, kBias> weights(unit, at);
    Vec sum{}, entropy{};  // of this tile
    const auto weight = [&](int64_t j) FK_INLINE {
      Vec log;
      const Vec p = weights(Whole::load(column + j * kAttentionRows), log);
      sum += p;
      if constexpr (kEntropy) entropy += p > Vec{} ? p * log : Vec{};
      if constexpr (kDrops) return lanes.pick(with.kept + j, p * a.dropout.scale, 0.0f);
      else return p;
    };
    if constexpr (kPer<E> == 1) {
      for (int64_t j = 0; j < n; ++j) Whole::store(column + j * kAttentionRows, weight(j));
    } else {
      const auto pair = [&](int64_t j) FK_INLINE {
        const Vec p = weight(j);
        store_pairs(column + j / 2 * kAttentionRows, p, j + 1 < n ? weight(j + 1) : Vec{});
      };
      int64_t j = 0;
      for (; j + 8 <= n; j += 8) {
#pragma GCC unroll 4
        for (int i = 0; i < 8; i += 2) pair(j + i);
        products.step();
      }
      for (; j < n; j += 2) pair(j);
    }
    const Vec sum_before = Whole::load(row(b.sum));
    Whole::store(row(b.max), now);
    Whole::store(row(b.sum), sum_before * factor + sum);
    if constexpr (kEntropy) {
      const Vec all_before = Whole::load(row(b.entropy)) + moved * sum_before;
      Whole::store(row(b.entropy), entropy * weights.kLog + (factor > Vec{} ? factor * all_before : Vec{}));
    }
    Whole::store(row(scale), factor);
  }
}

}  // namespace FK_ISA
}  // namespace foundry
