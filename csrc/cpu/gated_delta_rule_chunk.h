// A chunk of tokens of one head: its tiles in scratch, and what the forward and the backward pass both compute.
//
// Decays are multiplied and no logarithms are added: a strong decay takes no digits from the mild ones after it, as
// their difference from a large sum of logarithms would.
#pragma once

#include <optional>

#include "gated_delta_rule_channels.h"
#include "gated_delta_rule_gates.h"

namespace foundry {
namespace FK_ISA {

// Tokens that the triangular system is solved for at a time. The tokens before them are subtracted by matmuls.
constexpr int kSolveRows = 8;

// C [rows, vecs] = A B for a lower triangular A [rows, rows], in steps of kDeltaRuleRows; nothing above its diagonal
// blocks is read.
inline void multiply_lower(int64_t rows, int64_t vecs, const float* a, int64_t lda, const float* b, int64_t ldb,
                           float* c, int64_t ldc, Start start) {
  for (int64_t i = 0; i < rows; i += kDeltaRuleRows)
    multiply_in_parts(kDeltaRuleRows, vecs, {a + i * lda, lda, 1}, b, ldb, i + kDeltaRuleRows, c + i * ldc, ldc, start);
}

// C = A^T B, likewise.
inline void multiply_lower_transposed(int64_t rows, int64_t vecs, const float* a, int64_t lda, const float* b,
                                      int64_t ldb, float* c, int64_t ldc, Start start) {
  for (int64_t i = 0; i < rows; i += kDeltaRuleRows)
    multiply_backward(kDeltaRuleRows, vecs, a + i * lda + i, lda, b + i * ldb, ldb, rows - i, c + i * ldc, ldc, start);
}

// The lower triangle of C [rows, rows] = A [rows, depth] B [depth, rows], and what is above it in diagonal blocks.
inline void multiply_to_lower(int64_t rows, const float* a, int64_t lda, int64_t depth, const float* b, int64_t ldb,
                              float* c, int64_t ldc) {
  for (int64_t i = 0; i < rows; i += kDeltaRuleRows)
    multiply_in_parts(kDeltaRuleRows, (i + kDeltaRuleRows) / kLanes, {a + i * lda, lda, 1}, b, ldb, depth, c + i * ldc,
                      ldc, Start::zero);
}

// Replaces x, right-hand sides [rows, vecs], by the solution of (1 - N) x = rhs, or (1 - N^T) x = rhs, where N is
// strictly lower triangular.
template <bool kTransposed>
inline void solve(int64_t rows, int64_t vecs, const float* n, int64_t ldn, float* x, int64_t ldx) {
  for (int64_t step = 0; step < rows; step += kSolveRows) {
    const int64_t at = kTransposed ? rows - kSolveRows - step : step;
    if (step > 0) {
      if constexpr (kTransposed) {
        const int64_t below = at + kSolveRows;
        multiply_backward(kSolveRows, vecs, n + below * ldn + at, ldn, x + below * ldx, ldx, step, x + at * ldx, ldx,
                          Start::add);
      } else {
        multiply_in_parts(kSolveRows, vecs, {n + at * ldn, ldn, 1}, x, ldx, step, x + at * ldx, ldx, Start::add);
      }
    }
    const float* own = n + at * ldn + at;
    for (int64_t v = 0; v < vecs * kLanes; v += kLanes) {
      float* column = x + at * ldx + v;
      Vec rest[kSolveRows];
#pragma GCC unroll 8
      for (int i = 0; i < kSolveRows; ++i) rest[i] = Whole::load(column + i * ldx);
#pragma GCC unroll 8
      for (int j = 0; j < kSolveRows; ++j) {
        const int known = kTransposed ? kSolveRows - 1 - j : j;
#pragma GCC unroll 8
        for (int i = 0; i < kSolveRows; ++i)
          if (kTransposed ? i < known : i > known)
            rest[i] += splat(kTransposed ? own[known * ldn + i] : own[i * ldn + known]) * rest[known];
      }
#pragma GCC unroll 8
      for (int i = 0; i < kSolveRows; ++i) Whole::store(column + i * ldx, rest[i]);
    }
  }
}

struct DeltaRuleChunk {
  const DeltaRuleInputs& in;
  const DeltaRuleTask& task;
  DeltaRuleSizes size;
  int64_t key_vecs, value_vecs;
  DeltaRuleGate gate;

  float *q, *k, *k_transposed;  // [rows, keys], q times the scale; [keys, rows]
  float *v, *corrections;       // [rows, values]; V' of the formula
  float* decays;                // L, 0 above the diagonal
  float* products;              // L * K K^T below the diagonal
  float* system;                // -beta L * K K^T below it
  float* weights;               // L * Q K^T
  float *from_start, *to_end;   // [rows]: the decay from the chunk's start, and that to its end; 1 with `channels`
  float* step;                  // beta
  float *q_factor, *k_factor;   // what l2norm multiplied by

  std::optional<DeltaRuleChannels> channels;  // a decay for each dimension of a key
  // The queries and keys that read the state before the chunk, and the keys that write to the one after it, before
  // from_start and to_end multiply: q and k, which they overwrite in the end, or tiles of `channels`.
  float *q_start, *k_start, *k_end;

  int64_t n = 0, rows = 0;  // tokens, and tokens with padding: all tiles have zeros there

  DeltaRuleChunk(const DeltaRuleInputs& inputs, const DeltaRuleTask& of, float*& scratch)
      : in(inputs),
        task(of),
        size(inputs, of.n_columns),
        key_vecs(size.keys / kLanes),
        value_vecs(size.values / kLanes),
        gate(inputs.gates, of.head, inputs.g.channels ? inputs.key_width : 1) {
    const int64_t c = size.rows;
    const auto take = [&](int64_t floats) { return (scratch += floats) - floats; };
    q = take(c * size.keys);
    k = take(c * size.keys);
    k_transposed = take(c * size.keys);
    v = take(c * size.values);
    corrections = take(c * size.values);
    decays = take(c * c);
    products = take(c * c);
    system = take(c * c);
    weights = take(c * c);
    from_start = take(c);
    to_end = take(c);
    step = take(c);
    q_factor = take(c);
    k_factor = take(c);
    scratch += 3 * c;
    q_start = q;
    k_start = k_end = k;
    if (!in.g.channels) return;
    channels.emplace(c, size.keys, scratch);
    q_start = channels->q_start;
    k_start = channels->k_start;
    k_end = channels->k_end;
  }

  float decay() const { return from_start[n - 1]; }  // of the whole chunk, without `channels`
  // Of each dimension.
  const float* decays_of_chunk() const { return channels->from_start + (n - 1) * size.keys; }

  // Replaces the state, or its gradient, by decay * state + A B, with `factor` as scratch.
  void decay_and_add(float* state, Factor<float> a, const float* b, int64_t ldb, float* factor) const {
    if (channels) {
      for (int64_t d = 0; d < in.key_width; ++d) scale_row(state + d * size.values, size.values, decays_of_chunk()[d]);
      multiply_in_parts(in.key_width, value_vecs, a, b, ldb, rows, state, size.values, Start::add);
      return;
    }
    std::fill(factor, factor + size.values, decay());
    multiply_in_parts(in.key_width, value_vecs, a, b, ldb, rows, state, size.values, Start::scaled, factor);
  }

  // Reads tokens [first, first + count).
  void read(const DeltaRuleDocument& document, int64_t first, int64_t count) {
    n = count;
    rows = round_up(count, kDeltaRuleRows);
    const int64_t b = document.batch, h = task.head / in.group;
    read_rows(in.type, in.q, offset_of(in.q_strides, b, h, first), in.q_strides.token, n, in.key_width, q, rows,
              size.keys);
    read_rows(in.type, in.k, offset_of(in.k_strides, b, h, first), in.k_strides.token, n, in.key_width, k, rows,
              size.keys);
    read_rows(in.type, in.v, offset_of(in.v_strides, b, task.head, first) + task.first_column, in.v_strides.token, n,
              task.n_columns, v, rows, size.values);
    for (int64_t i = 0; i < n; ++i) {
      if (in.l2norm) {
        q_factor[i] = l2_normalize(q + i * size.keys, in.key_width);
        k_factor[i] = l2_normalize(k + i * size.keys, in.key_width);
      }
      scale_row(q + i * size.keys, in.key_width, in.scale);
      step[i] = in.beta.data ? read_number(in.beta, offset_of(in.beta.strides, b, task.head, first + i)) : 1.0f;
      if (gate.of_beta()) step[i] = gate.beta(step[i]);
    }
    std::fill(step + n, step + rows, 0.0f);
    if (channels) {
      read_rows(in.g.type, in.g.data, offset_of(in.g.strides, b, task.head, first), in.g.strides.token, n, in.key_width,
                channels->own, rows, size.keys);
      if (gate.of_g())
        for (int64_t i = 0; i < n; ++i) gate.open_row(channels->own + i * size.keys, in.key_width);
      channels->read(rows, q, k);
      std::fill(from_start, from_start + rows, 1.0f);
      std::fill(to_end, to_end + rows, 1.0f);
      channels->multiply_pairs(rows, in.key_width, q, k, k_transposed, size.rows, weights,
                               in.delta ? products : nullptr);
      if (in.delta) compute_system();
      return;
    }
    read_decays(b, first);
    for (int64_t r = 0; r < rows; r += kDeltaRuleRows)
      transpose(k + r * size.keys, size.keys, kDeltaRuleRows, size.keys, k_transposed + r, size.rows);
    compute_products();
  }

  // The corrections, from the state before the chunk; null for zeros. Padding stays 0.
  void compute_corrections(const float* state) {
    if (state && in.delta)
      multiply_in_parts(rows, value_vecs, {k_start, size.keys, 1}, state, size.values, in.key_width, corrections,
                        size.values, Start::zero);
    for (int64_t i = 0; i < rows; ++i) {
      const float *value = v + i * size.values, by = step[i], decayed = from_start[i];
      float* row = corrections + i * size.values;
      const bool reads = state && in.delta;
      for (int64_t c = 0; c < size.values; c += kLanes) {
        const Vec x = Whole::load(value + c);
        Whole::store(row + c, (reads ? x - Whole::load(row + c) * decayed : x) * by);
      }
    }
    if (in.delta) solve<false>(rows, value_vecs, system, size.rows, corrections, size.values);
  }

 private:
  // As of registers.
  static float flushed(float x) { return x < FLT_MIN ? 0.0f : x; }

  // The products that channels decay.
  void compute_system() {
    const int64_t ld = size.rows;
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < round_up(i + 1, kDeltaRuleRows); j += kLanes)
        Whole::store(system + i * ld + j, Whole::load(products + i * ld + j) * -step[i]);
  }

  void read_decays(int64_t b, int64_t first) {
    const int64_t ld = size.rows;
    float total = 1.0f;
    for (int64_t i = 0; i < rows; ++i) {
      float* row = decays + i * ld;
      const int64_t edge = round_up(i + 1, kDeltaRuleRows);
      if (i >= n) {
        std::fill(row, row + edge, 0.0f);
        from_start[i] = to_end[i] = 0.0f;
        continue;
      }
      float by = 1.0f;
      if (in.g.data) {
        const float g = read_number(in.g, offset_of(in.g.strides, b, task.head, first + i));
        by = std::exp(gate.of_g() ? gate.g(g) : g);
      }
      from_start[i] = total = flushed(total * by);
      for (int64_t j = 0; j < i; j += kLanes) {
        const Vec x = Whole::load(row - ld + j) * by;
        Whole::store(row + j, x < splat(FLT_MIN) ? Vec{} : x);
      }
      row[i] = 1.0f;
      std::fill(row + i + 1, row + edge, 0.0f);
    }
    std::copy(decays + (n - 1) * ld, decays + (n - 1) * ld + n, to_end);
  }

  void compute_products() {
    const int64_t ld = size.rows;
    multiply_to_lower(rows, q, size.keys, in.key_width, k_transposed, ld, weights, ld);
    if (in.delta) multiply_to_lower(rows, k, size.keys, in.key_width, k_transposed, ld, products, ld);
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t edge = round_up(i + 1, kDeltaRuleRows);
      const float* of_row = decays + i * ld;
      for (int64_t j = 0; j < edge; j += kLanes) {
        const Vec decayed = Whole::load(of_row + j);
        Whole::store(weights + i * ld + j, Whole::load(weights + i * ld + j) * decayed);
        if (!in.delta) continue;
        const Vec product = Whole::load(products + i * ld + j) * decayed;
        Whole::store(products + i * ld + j, product);
        Whole::store(system + i * ld + j, product * -step[i]);
      }
      // Not by the decays of 0 alone: 0 times infinity is NaN.
      std::fill(weights + i * ld + i + 1, weights + i * ld + edge, 0.0f);
      if (!in.delta) continue;
      std::fill(products + i * ld + i, products + i * ld + edge, 0.0f);
      std::fill(system + i * ld + i, system + i * ld + edge, 0.0f);
    }
  }
};

}  // namespace FK_ISA
}  // namespace foundry
