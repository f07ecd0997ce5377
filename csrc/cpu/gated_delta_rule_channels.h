// A decay for each dimension of a key: the tiles of a chunk that depend on it, and the products of its tokens.
//
// A chunk has blocks of kDeltaRuleRows tokens. Within a block, the decay between two tokens is multiplied up for each
// pair. For two blocks, rows of the later one are decayed from its start, and keys of the earlier one up to there, so
// that the products of the two are a matmul. All factors are products of decays.
#pragma once

#include <cfloat>

#include "gated_delta_rule_rows.h"
#include "math.h"
#include "transpose.h"

namespace foundry {
namespace FK_ISA {

// Numbers that are not normal are 0: arithmetic with them would be slow, and they add nothing.
inline Vec flushed(Vec x) { return x < splat(FLT_MIN) ? Vec{} : x; }

// y = a * b
inline void multiply_rows(float* y, const float* a, const float* b, int64_t width) {
  for (int64_t i = 0; i < width; i += kLanes) Whole::store(y + i, Whole::load(a + i) * Whole::load(b + i));
}

// y = a * b, which are decays
inline void multiply_decays(float* y, const float* a, const float* b, int64_t width) {
  for (int64_t i = 0; i < width; i += kLanes) Whole::store(y + i, flushed(Whole::load(a + i) * Whole::load(b + i)));
}

struct DeltaRuleChannels {
  int64_t keys;                      // the padded width of a row
  float* own;                        // [rows, keys]: each token's decay
  float *from_block, *to_block;      // from the block's start, with the first token's decay; to its end
  float *from_start, *to_end;        // of the chunk
  float *q_block, *k_block;          // q and k times from_block
  float *q_start, *k_start, *k_end;  // times from_start, to_end
  float* reached;                    // the decay of earlier blocks' tokens up to a later block
  float* scratch;                    // [2, keys]

  static int64_t floats(int64_t rows, int64_t keys) { return 11 * rows * keys + 2 * keys; }

  DeltaRuleChannels(int64_t rows, int64_t width, float*& memory) : keys(width) {
    for (float** tile : {&own, &from_block, &to_block, &from_start, &to_end, &q_block, &k_block, &q_start, &k_start,
                         &k_end, &reached}) {
      *tile = memory;
      memory += rows * keys;
    }
    scratch = memory;
    memory += 2 * keys;
  }

  // The decay of a whole block.
  const float* of_block(int64_t block) const {
    return from_block + (block * kDeltaRuleRows + kDeltaRuleRows - 1) * keys;
  }

  // From the logarithms in `own`, which are 0 past token n.
  void read(int64_t rows, const float* q, const float* k) {
    for (int64_t i = 0; i < rows * keys; i += kLanes)
      Whole::store(own + i, flushed(exp(smaller(splat(88.7f), Whole::load(own + i)))));
    for (int64_t i = 0; i < rows; ++i) {
      const float* decay = own + i * keys;
      const int64_t at = i * keys;
      if (i % kDeltaRuleRows == 0) std::copy(decay, decay + keys, from_block + at);
      else multiply_decays(from_block + at, from_block + at - keys, decay, keys);
      if (i == 0) std::copy(decay, decay + keys, from_start);
      else multiply_decays(from_start + at, from_start + at - keys, decay, keys);
    }
    for (int64_t i = rows; i-- > 0;) {
      const int64_t at = i * keys;
      const bool last = (i + 1) % kDeltaRuleRows == 0;
      if (last) std::fill(to_block + at, to_block + at + keys, 1.0f);
      else multiply_decays(to_block + at, to_block + at + keys, own + at + keys, keys);
      if (i == rows - 1) std::fill(to_end + at, to_end + at + keys, 1.0f);
      else multiply_decays(to_end + at, to_end + at + keys, own + at + keys, keys);
    }
    multiply_rows(q_block, q, from_block, rows * keys);
    multiply_rows(k_block, k, from_block, rows * keys);
    multiply_rows(q_start, q, from_start, rows * keys);
    multiply_rows(k_start, k, from_start, rows * keys);
    multiply_rows(k_end, k, to_end, rows * keys);
  }

  // weights = L * Q K^T and products = L * K K^T, of tokens j <= i [rows, ld], and 0 above in diagonal blocks.
  // `products` is null if not wanted; `transposed` [keys, ld] is overwritten.
  void multiply_pairs(int64_t rows, int64_t width, const float* q, const float* k, float* transposed, int64_t ld,
                      float* weights, float* products) {
    multiply_rows(reached, k, to_block, rows * keys);
    for (int64_t r = 0; r < rows; r += kDeltaRuleRows)
      transpose(reached + r * keys, keys, kDeltaRuleRows, keys, transposed + r, ld);
    for (int64_t first = 0; first < rows; first += kDeltaRuleRows) {
      if (first > kDeltaRuleRows) {  // the earlier keys pass another block
        const float* passed = of_block(first / kDeltaRuleRows - 1);
        for (int64_t d = 0; d < width; ++d) scale_row(transposed + d * ld, first - kDeltaRuleRows, passed[d]);
      }
      if (first > 0) {
        multiply_in_parts(kDeltaRuleRows, first / kLanes, {q_block + first * keys, keys, 1}, transposed, ld, width,
                          weights + first * ld, ld, Start::zero);
        if (products)
          multiply_in_parts(kDeltaRuleRows, first / kLanes, {k_block + first * keys, keys, 1}, transposed, ld, width,
                            products + first * ld, ld, Start::zero);
      }
      multiply_block_pairs(first, q, k, ld, weights, products);
    }
  }

 private:
  void multiply_block_pairs(int64_t first, const float* q, const float* k, int64_t ld, float* weights,
                            float* products) {
    for (int64_t i = first; i < first + kDeltaRuleRows; ++i) {
      const int64_t end = first + kDeltaRuleRows;
      std::fill(weights + i * ld + first, weights + i * ld + end, 0.0f);
      if (products) std::fill(products + i * ld + first, products + i * ld + end, 0.0f);
      weights[i * ld + i] = dot(q + i * keys, k + i * keys, keys);
    }
    float* decay = scratch;
    for (int64_t j = first; j < first + kDeltaRuleRows; ++j) {
      std::fill(decay, decay + keys, 1.0f);
      const float* key = k + j * keys;
      for (int64_t i = j + 1; i < first + kDeltaRuleRows; ++i) {
        const float *q_row = q + i * keys, *k_row = k + i * keys, *by = own + i * keys;
        Vec of_q[4] = {}, of_k[4] = {};
        int64_t part = 0;
        for (int64_t d = 0; d < keys; d += kLanes, part = (part + 1) % 4) {
          const Vec now = flushed(Whole::load(decay + d) * Whole::load(by + d));
          Whole::store(decay + d, now);
          const Vec decayed = now * Whole::load(key + d);
          of_q[part] += decayed * Whole::load(q_row + d);
          if (products) of_k[part] += decayed * Whole::load(k_row + d);
        }
        weights[i * ld + j] = sum(of_q);
        if (products) products[i * ld + j] = sum(of_k);
      }
    }
  }
};

}  // namespace FK_ISA
}  // namespace foundry
