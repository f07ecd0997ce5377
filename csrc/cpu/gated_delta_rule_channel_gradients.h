// Gradients through the products of a chunk's tokens with a decay for each dimension of a key: see
// gated_delta_rule_channels.h.
#pragma once

#include "gated_delta_rule_channels.h"

namespace foundry {
namespace FK_ISA {

// What the pairs of a chunk's tokens give; all tiles [rows, keys] are added to.
struct DeltaRulePairGradients {
  const DeltaRuleChannels& c;
  int64_t rows, ld;
  const float *q, *k;
  const float *dweights, *dproducts;  // [rows, ld], 0 above the diagonal in diagonal blocks; products may be null
  float *dq, *dk, *dg;                // of each token's logarithm
  float *of_rows, *of_columns;        // [rows, keys]: overwritten
  float* keys_reached;                // [rows, keys]: overwritten
  float *sum_q, *sum_k;               // [kDeltaRuleRows, keys]: overwritten
  float* across;                      // [rows / kDeltaRuleRows, keys]: overwritten

  // Only the decays that span a token are added up for its g: a difference of sums over all would cancel.
  void run() {
    const int64_t keys = c.keys;
    std::fill(of_rows, of_rows + rows * keys, 0.0f);
    std::fill(of_columns, of_columns + rows * keys, 0.0f);
    std::fill(across, across + rows / kDeltaRuleRows * keys, 0.0f);
    std::copy(c.to_block, c.to_block + rows * keys, c.reached);
    multiply_rows(keys_reached, k, c.to_block, rows * keys);
    for (int64_t first = 0; first < rows; first += kDeltaRuleRows) {
      for (int64_t i = 0; i + kDeltaRuleRows < first; ++i) {  // the earlier keys pass another block
        const float* passed = c.of_block(first / kDeltaRuleRows - 1);
        multiply_decays(c.reached + i * keys, c.reached + i * keys, passed, keys);
        multiply_rows(keys_reached + i * keys, keys_reached + i * keys, passed, keys);
      }
      if (first > 0) of_earlier_blocks(first);
      for (int64_t d = 0; d < keys; d += kLanes) of_block(first, d);
    }
    for (int64_t first = 0; first < rows; first += kDeltaRuleRows) {
      float *before = sum_q, *after = sum_k;
      std::copy(across + first / kDeltaRuleRows * keys, across + (first / kDeltaRuleRows + 1) * keys, before);
      std::fill(after, after + keys, 0.0f);
      for (int64_t i = first; i < first + kDeltaRuleRows; ++i)
        for (int64_t d = i * keys, e = 0; e < keys; d += kLanes, e += kLanes) {
          const Vec total = Whole::load(before + e);
          Whole::store(dg + d, Whole::load(dg + d) + total);
          Whole::store(before + e, total + Whole::load(of_columns + d));
        }
      for (int64_t i = first + kDeltaRuleRows; i-- > first;)
        for (int64_t d = i * keys, e = 0; e < keys; d += kLanes, e += kLanes) {
          const Vec total = Whole::load(after + e) + Whole::load(of_rows + d);
          Whole::store(after + e, total);
          Whole::store(dg + d, Whole::load(dg + d) + total);
        }
    }
  }

 private:
  // The pairs of the tokens of a block and of all before it.
  void of_earlier_blocks(int64_t first) {
    const int64_t keys = c.keys, vecs = keys / kLanes, tile = kDeltaRuleRows * keys;
    const float *q_rows = c.q_block + first * keys, *k_rows = c.k_block + first * keys;
    const float* by = c.from_block + first * keys;
    for (int64_t j = 0; j < first; j += kDeltaRuleRows) {
      const Start start = j == 0 ? Start::zero : Start::add;
      multiply_in_parts(kDeltaRuleRows, vecs, {dweights + first * ld + j, ld, 1}, keys_reached + j * keys, keys,
                        kDeltaRuleRows, sum_q, keys, start);
      if (dproducts)
        multiply_in_parts(kDeltaRuleRows, vecs, {dproducts + first * ld + j, ld, 1}, keys_reached + j * keys, keys,
                          kDeltaRuleRows, sum_k, keys, start);
      if (j + kDeltaRuleRows == first) break;
      float* spans = across + (j / kDeltaRuleRows + 1) * keys;  // the block after j lies between
      for (int64_t d = 0; d < keys; d += kLanes) {
        Vec total = Whole::load(spans + d);
        for (int64_t i = d; i < tile; i += keys) {
          total += Whole::load(q_rows + i) * Whole::load(sum_q + i);
          if (dproducts) total += Whole::load(k_rows + i) * Whole::load(sum_k + i);
        }
        Whole::store(spans + d, total);
      }
    }
    for (int64_t i = 0; i < tile; i += kLanes) {
      const Vec decay = Whole::load(by + i), of_q = Whole::load(sum_q + i);
      Vec both = Whole::load(q_rows + i) * of_q;
      Whole::store(dq + first * keys + i, Whole::load(dq + first * keys + i) + of_q * decay);
      if (dproducts) {
        const Vec of_k = Whole::load(sum_k + i);
        both += Whole::load(k_rows + i) * of_k;
        Whole::store(dk + first * keys + i, Whole::load(dk + first * keys + i) + of_k * decay);
      }
      Whole::store(of_rows + first * keys + i, both);
    }
    for (int64_t j = 0; j < first; j += kDeltaRuleRows) {
      multiply_in_parts(kDeltaRuleRows, vecs, {dweights + first * ld + j, 1, ld}, q_rows, keys, kDeltaRuleRows, sum_q,
                        keys, Start::zero);
      if (dproducts)
        multiply_in_parts(kDeltaRuleRows, vecs, {dproducts + first * ld + j, 1, ld}, k_rows, keys, kDeltaRuleRows,
                          sum_q, keys, Start::add);
      for (int64_t i = 0; i < tile; i += kLanes) {
        const int64_t at = j * keys + i;
        const Vec found = Whole::load(sum_q + i);
        Whole::store(dk + at, Whole::load(dk + at) + found * Whole::load(c.reached + at));
        Whole::store(of_columns + at, Whole::load(of_columns + at) + found * Whole::load(keys_reached + at));
      }
    }
  }

  // The pairs within a block, in dimensions d .. d + kLanes - 1.
  void of_block(int64_t first, int64_t d) {
    const int64_t keys = c.keys;
    const auto row = [&](const float* tile, int64_t i) FK_INLINE { return Whole::load(tile + (first + i) * keys + d); };
    const auto add = [&](float* tile, int64_t i, Vec x) FK_INLINE {
      float* p = tile + (first + i) * keys + d;
      Whole::store(p, Whole::load(p) + x);
    };
    Vec decays[kDeltaRuleRows], q_rows[kDeltaRuleRows], k_rows[kDeltaRuleRows], both[kDeltaRuleRows];
    for (int i = 0; i < kDeltaRuleRows; ++i) decays[i] = row(c.own, i), q_rows[i] = row(q, i), k_rows[i] = row(k, i);
    for (int j = 0; j < kDeltaRuleRows; ++j) {
      const float* of_q = dweights + (first + j) * ld + first + j;
      const float* of_k = dproducts ? dproducts + (first + j) * ld + first + j : nullptr;
      const Vec own = splat(*of_q);
      add(dq, j, own * k_rows[j]);
      Vec of_key = own * q_rows[j], decay = splat(1.0f);
      for (int i = j + 1; i < kDeltaRuleRows; ++i) {
        decay = flushed(decay * decays[i]);
        const Vec dweight = splat(of_q[(i - j) * ld]), decayed = decay * k_rows[j];
        Vec found = dweight * q_rows[i];
        add(dq, i, dweight * decayed);
        if (of_k) {
          const Vec dproduct = splat(of_k[(i - j) * ld]);
          found += dproduct * k_rows[i];
          add(dk, i, dproduct * decayed);
        }
        found *= decay;
        of_key += found;
        both[i] = found * k_rows[j];
      }
      add(dk, j, of_key);
      Vec spanning = Vec{};
      for (int i = kDeltaRuleRows - 1; i > j; --i) {
        spanning += both[i];
        add(dg, i, spanning);
      }
    }
  }
};

}  // namespace FK_ISA
}  // namespace foundry
