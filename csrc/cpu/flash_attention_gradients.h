// The weights of a tile and the gradients of its scores, from which the gradients of queries, keys, values and bias
// follow.
#pragma once

#include "flash_attention_bias.h"
#include "flash_attention_dot.h"
#include "flash_attention_pairs.h"
#include "flash_attention_scores.h"
#include "flash_attention_softmax.h"
#include "flash_attention_words.h"
#include "transpose.h"

namespace foundry {
namespace FK_ISA {

struct GradientScratch {
  // Queries and output gradients: row-major, transposed, and in pairs of rows. For decoded rows the transposed buffers
  // hold floats in multiply_keys' order. dq is the transposed gradient of the queries.
  float *queries, *queries_t, *query_pairs, *dout, *dout_t, *dout_pairs, *dq;
  float *weights, *dscores;  // one tile each, [keys, rows]; with bfloat16 the gradients are in pairs of keys
  BFloat16* dscores_rows;    // with pairs: the same gradients, one row per key
  float *keys, *key_pairs, *values;
  float *bias, *bias_rows;  // if there is a bias: a tile, and the same in memory order or its gradient
  ScoreScratch program;
  float* sums;

  GradientScratch(const AttentionBackward& a, float* p)
      : program(a.program, p + attention_backward_scratch(a.head_dim, a.head_dim_v, a.bias != nullptr)) {
    const int64_t d = round_up(a.head_dim, kAttentionPad), dv = round_up(a.head_dim_v, kAttentionPad);
    const auto take = [&](int64_t n) { return std::exchange(p, p + n); };
    queries = take(kAttentionRows * d);
    queries_t = take(kAttentionRows * d);
    query_pairs = take(kAttentionRows * d / 2);
    dq = take(kAttentionRows * d);
    dout = take(kAttentionRows * dv);
    dout_t = take(kAttentionRows * dv);
    dout_pairs = take(kAttentionRows * dv / 2);
    weights = take(kAttentionKeys * kAttentionRows);
    dscores = take(kAttentionKeys * kAttentionRows);
    dscores_rows = reinterpret_cast<BFloat16*>(take(kAttentionKeys * kAttentionRows / 2));
    keys = take(kAttentionKeys * d);
    key_pairs = take(kAttentionKeys * d / 2);
    values = take(kAttentionKeys * dv);
    bias = take(a.bias ? kAttentionKeys * kAttentionRows : 0);
    bias_rows = take(a.bias ? kAttentionKeys * kAttentionRows : 0);
    sums = p + score_scratch(a.program);
  }
};

struct GradientBlock : BlockRows {
  // lse in two parts: its float (infinite for a row without keys, whose weights are then 0) and the remainder.
  alignas(64) float lse[kAttentionRows], lse_rest[kAttentionRows], delta[kAttentionRows];
  BlockWords words;
};

template <class E>
void read_block(const AttentionBackward& a, const AttentionSequence& s, int64_t head, GradientBlock& b, bool decoded,
                const GradientScratch& scratch) {
  const int64_t rows = b.vecs * kLanes;
  const auto read = [&](const void* data, const HeadStrides& strides, int64_t width, float* out, float* transposed) {
    const int64_t lanes = lanes_of<E>(width);
    for (int64_t i = 0; i < b.count; ++i)
      read_row<E>(a.type, data, row_offset(strides, s, head, a.group, b.row + i), width, out + i * lanes, lanes);
    std::fill(out + b.count * lanes, out + rows * lanes, 0.0f);
    if (!decoded) return transpose(out, lanes, rows, lanes, transposed, kAttentionRows);
    const int64_t ld = round_up(width, kAttentionPad);
    std::fill(transposed, transposed + kAttentionDecodeRows * ld, 0.0f);
    for (int64_t i = 0; i < b.count; ++i)
      read_row<float>(a.type, data, row_offset(strides, s, head, a.group, b.row + i), width, transposed + i * ld, ld);
    with_type(a.type, [&](auto* type) {
      order_queries<std::remove_pointer_t<decltype(type)>>(transposed, b.count, width, ld);
    });
  };
  read(a.q, a.q_strides, a.head_dim, scratch.queries, scratch.queries_t);
  read(a.dout, a.dout_strides, a.head_dim_v, scratch.dout, scratch.dout_t);
  for (int64_t i = 0; i < b.count; ++i) {
    const int64_t at = row_offset(a.lse_strides, s, head, a.group, b.row + i);
    const bool empty = a.lse[at] == kNone;
    const SplitLse lse(empty ? -kNone : a.lse[at]);
    b.lse[i] = lse.lse, b.lse_rest[i] = lse.rest;
    b.delta[i] = a.delta[at];
  }
  std::fill(b.lse + b.count, b.lse + rows, -kNone);
  std::fill(b.lse_rest + b.count, b.lse_rest + rows, 0.0f);
  std::fill(b.delta + b.count, b.delta + rows, 0.0f);
}

// out [n, rows] = a tile's rows times those of the block, which read_block has left in `rows`.
template <class E>
void multiply_tile(const GradientBlock& b, Tile<E> tile, int64_t n, int64_t width, const float* rows, float* out) {
  multiply<E>(n, b.vecs, {tile.data, tile.ld, kPer<E>}, rows, kAttentionRows, steps_of<E>(width), out, kAttentionRows,
              Start::zero);
}

// Same for decoded rows, with the matmul that computed their lse. Reads the rows in memory from `offset` on.
inline void multiply_decoded(const AttentionBackward& a, const GradientBlock& b, const void* data, int64_t offset,
                             int64_t stride, int64_t n, int64_t width, const float* rows, float* out) {
  constexpr int64_t ld = kAttentionKeys + kSums;
  float products[kAttentionDecodeRows * ld];
  with_type(a.type, [&](auto* type) {
    const auto* first = static_cast<decltype(type)>(const_cast<void*>(data)) + offset;
    const Stream<std::remove_pointer_t<decltype(type)>> stream{first, stride, first};
    multiply_keys<kAttentionDecodeRows>(rows, round_up(width, kAttentionPad), width, stream, n, products, ld);
  });
  for (int64_t j = 0; j < n; ++j)
    for (int64_t r = 0; r < b.vecs * kLanes; ++r)
      out[j * kAttentionRows + r] = r < b.count ? products[r * ld + j] : 0.0f;
}

// Turns a tile's scores, in `weights`, into weights, and its matmul of output gradients and values, in `dscores`, into
// score gradients without the factor `scale`. With E bfloat16 each takes half the memory; weights stay one row per key.
// How logits follow from the numbers of a tile: by the scale; as common/score.h defines; or they are there already.
enum class Logits { scaled, biased, finished };

template <class E, Hidden kHidden, bool kDrops, Logits kLogits>
void differentiate_tile(const AttentionBackward& a, const GradientBlock& b, const GradientScratch& scratch,
                        const TileOptions& with, int64_t n, int32_t key) {
  constexpr bool kBias = kLogits == Logits::biased;
  const Vec unit = splat(kLogits == Logits::scaled ? a.scale : 1.0f);
  for (int v = 0; v < b.vecs; ++v) {
    const Vec lse = Whole::load(b.lse + v * kLanes), lse_rest = Whole::load(b.lse_rest + v * kLanes);
    const Vec delta = Whole::load(b.delta + v * kLanes);
    float *weights = scratch.weights + v * kLanes, *gradients = scratch.dscores + v * kLanes;
    [[maybe_unused]] const PickedLanes lanes(v);
    const auto differentiate = [&](int64_t j, Vec& p, Vec& ds) FK_INLINE {
      Vec s = Whole::load(weights + j * kAttentionRows);
      ds = Whole::load(gradients + j * kAttentionRows);
      if constexpr (kDrops) ds = lanes.pick(with.kept + j, ds * a.dropout.scale, 0.0f);
      ds -= delta;
      [[maybe_unused]] Vec slope{};
      if constexpr (kBias) {
        s = bent(a, s);
        if (FK_BENDS(a)) slope = bent_slope(a, s);
        if (a.alibi_slopes) s -= alibi(b, v, key + int32_t(j));
        if (with.bias) s += Whole::load(with.bias + j * kAttentionRows + v * kLanes);
      }
      p = exp((s * unit - lse) - lse_rest);
      if constexpr (kHidden == Hidden::edge) p = seen(b, v, key + int32_t(j), p, 0.0f);
      if constexpr (kHidden == Hidden::words) p = lanes.pick(with.seen + j, p, 0.0f);
      ds *= p;
      if constexpr (kBias) {
        if (with.dbias) Whole::store(with.dbias + j * kAttentionRows + v * kLanes, ds);
        if (FK_BENDS(a)) ds *= slope;
      }
      if constexpr (kLogits == Logits::finished) {
        const auto at = [&](auto* tile) { return tile + j * kAttentionRows + v * kLanes; };
        if (with.dresult) Whole::store(at(with.dresult), ds);
        // What no gradient reaches adds none, whatever the derivative is.
        if (with.slope) ds = ds == Vec{} ? ds : ds * Whole::load(at(with.slope));
        if (with.dbias) Whole::store(at(with.dbias), ds);
        if (with.bend) ds *= Whole::load(at(with.bend));
      }
      if constexpr (kDrops) p = lanes.pick(with.kept + j, p * a.dropout.scale, 0.0f);
    };
    if constexpr (kPer<E> == 1) {
      for (int64_t j = 0; j < n; ++j) {
        Vec p, ds;
        differentiate(j, p, ds);
        Whole::store(weights + j * kAttentionRows, p);
        Whole::store(gradients + j * kAttentionRows, ds);
      }
    } else {  // in place: everything overwritten has been read, now or for earlier registers
      E* rows = reinterpret_cast<E*>(scratch.weights) + v * kLanes;
      for (int64_t j = 0; j < n; j += 2) {
        Vec p[2] = {}, ds[2] = {};
        differentiate(j, p[0], ds[0]);
        if (j + 1 < n) differentiate(j + 1, p[1], ds[1]);
        E* dscores_row = scratch.dscores_rows + j * kAttentionRows + v * kLanes;
        store_pairs(nullptr, p[0], p[1], rows + j * 2 * kAttentionRows, rows + (j + 1) * 2 * kAttentionRows);
        store_pairs(gradients + j / 2 * kAttentionRows, ds[0], ds[1], dscores_row, dscores_row + kAttentionRows);
      }
    }
  }
}

// The tiles of keys and values from which a block's gradients are computed.
template <class E> struct KeyTiles {
  const AttentionBackward& a;
  const AttentionSequence& s;
  int64_t k_base, v_base;

  KeyTiles(const AttentionBackward& a, const AttentionSequence& s, int64_t kv_head)
      : a(a),
        s(s),
        k_base(key_offset(a.k_strides, s, kv_head, 0)),
        v_base(key_offset(a.v_strides, s, kv_head, 0)) {}

  Tile<E> keys(int64_t key, int64_t n, float* scratch) const {
    return read_tile<E>(a.type, a.k, k_base + key * a.k_strides.token, a.k_strides.token, n, a.head_dim, scratch);
  }
  Tile<E> values(int64_t key, int64_t n, float* scratch) const {
    return read_tile<E>(a.type, a.v, v_base + key * a.v_strides.token, a.v_strides.token, n, a.head_dim_v, scratch);
  }

  // Multiplies them by a block's queries and output gradients; `tile` is that of `keys` or `values`.
  void multiply_keys_of(const GradientBlock& b, bool decoded, int64_t key, int64_t n, Tile<E> tile,
                        const GradientScratch& scratch) const {
    if (!decoded) return multiply_tile<E>(b, tile, n, a.head_dim, scratch.queries_t, scratch.weights);
    multiply_decoded(a, b, a.k, k_base + key * a.k_strides.token, a.k_strides.token, n, a.head_dim, scratch.queries_t,
                     scratch.weights);
  }
  void multiply_values_of(const GradientBlock& b, bool decoded, int64_t key, int64_t n, Tile<E> tile,
                          const GradientScratch& scratch) const {
    if (!decoded) return multiply_tile<E>(b, tile, n, a.head_dim_v, scratch.dout_t, scratch.dscores);
    multiply_decoded(a, b, a.v, v_base + key * a.v_strides.token, a.v_strides.token, n, a.head_dim_v, scratch.dout_t,
                     scratch.dscores);
  }
};

// Whether the block sees any of the keys [key, key + n). `counted` is the first, counted as in BlockRows.
inline bool looks_at(const AttentionBackward& a, const AttentionSequence& s, int64_t head, GradientBlock& b,
                     int64_t key, int64_t n, int32_t counted) {
  return !a.masked() || b.words.look(a, s, head, b, key, n, counted);
}

// Turns the matmul of queries and keys, in scratch.weights, and that of output gradients and values, in
// scratch.dscores, into weights and score gradients. The bias gradient goes to scratch.bias_rows if needed. Call
// looks_at first.
template <class E>
void differentiate(const AttentionBackward& a, const AttentionSequence& s, int64_t head, GradientBlock& b,
                   const GradientScratch& scratch, int64_t key, int64_t n, int32_t counted, bool dbias) {
  Hidden hidden = key < b.full_begin || key + n > b.full_end ? Hidden::edge : Hidden::nothing;
  TileOptions with{b.words.seen, b.words.kept};
  if (a.aligned()) {
    if (!a.masked()) b.words.look(a, s, head, b, key, n, counted);
    hidden = b.words.finish(a, b, key);
  }
  if (a.bias) {
    read_bias_tile(a, s, head, b, key, n, scratch.bias_rows, scratch.bias);
    with.bias = scratch.bias;
    if (dbias) with.dbias = scratch.bias_rows;
  }
  if (const ScorePlan* program = a.program) {
    const ScoreScratch& of = scratch.program;
    with.bend = FK_BENDS(a) ? of.tiles[0] : nullptr;
    finish_logits(a, b, with.bias, scratch.weights, n, counted, of.tiles[0]);
    score_tile(*program, of.blocks[0], of.tile, scratch.weights, kAttentionRows, b.count, key, n);
    if (program->slope >= 0) with.slope = of.tile + program->registers[program->slope].offset;
    if (!program->gradients.empty()) with.dresult = of.tiles[1];
  }
  with_hidden(hidden, a.drops(), [&](auto by, auto drops) {
    if (a.program)
      return differentiate_tile<E, by.value, drops.value, Logits::finished>(a, b, scratch, with, n, counted);
    with_bools(
        [&](auto bias) {
          constexpr Logits kLogits = bias.value ? Logits::biased : Logits::scaled;
          differentiate_tile<E, by.value, drops.value, kLogits>(a, b, scratch, with, n, counted);
        },
        has_bias(a));
  });
}

// Adds the gradients of the tensors that the score function reads, after `differentiate`.
inline void add_score_gradients(const AttentionBackward& a, const GradientBlock& b, const GradientScratch& scratch,
                                int64_t key, int64_t n, void* const* sums) {
  const ScoreScratch& of = scratch.program;
  score_gradients(*a.program, of.blocks[0], of.tile, of.tiles[1], of.tiles[2], b.count, key, n, sums);
}

// Visits the tiles of a block of rows, from `row` on and before row_end, with keys [key_begin, key_end): calls
// f(block, key, n) once weights and score gradients are in scratch, and the bias gradient if there is a bias.
template <class E, class F>
void for_each_gradient_tile(const AttentionBackward& a, int64_t sequence, int64_t kv_head, int64_t row, int64_t row_end,
                            int64_t key_begin, int64_t key_end, const GradientScratch& scratch, F&& f) {
  const AttentionSequence& s = a.sequences[sequence];
  const int64_t head = kv_head * a.group;
  const KeyTiles<E> tiles(a, s, kv_head);
  GradientBlock b;
  b.set(a, s, sequence, head, row, row_end, key_begin, key_end);
  if (b.key_begin >= b.key_end) return;
  if (a.drops()) b.words.dropout.set(a, b, sequence, head);
  if (a.program) begin_scores(a, *a.program, sequence, head, b, scratch.program.blocks[0]);
  const bool decoded = is_decoded(a, row, s.q_len * a.group);
  read_block<E>(a, s, head, b, decoded, scratch);
  for (int64_t key = b.key_begin; key < b.key_end; key += kAttentionKeys) {
    const int64_t n = std::min<int64_t>(kAttentionKeys, b.key_end - key);
    const auto counted = int32_t(key - key_begin);
    if (!looks_at(a, s, head, b, key, n, counted)) continue;
    tiles.multiply_keys_of(b, decoded, key, n, tiles.keys(key, n, scratch.keys), scratch);
    tiles.multiply_values_of(b, decoded, key, n, tiles.values(key, n, scratch.values), scratch);
    differentiate<E>(a, s, head, b, scratch, key, n, counted, a.dbias != nullptr);
    f(b, key, n);
  }
}

}  // namespace FK_ISA
}  // namespace foundry
