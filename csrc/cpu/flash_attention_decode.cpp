// Attention's forward pass with few query rows, as in decoding. Its time is that of reading keys and values, so they
// are read straight from memory, with the head dimension along the lanes. Compiled once per instruction set (see
// isa.h).
#include "flash_attention_bias.h"
#include "flash_attention_dot.h"
#include "flash_attention_scores.h"
#include "flash_attention_softmax.h"
#include "flash_attention_words.h"
#include "transpose.h"

namespace foundry {
namespace FK_ISA {

namespace {

// Whether columns of values are read split, as multiply_keys reads keys, kVecs registers at a time.
template <class T, int kVecs> constexpr bool kSplitColumns = kReadSplit<T> && kVecs > 1;

// out[row] = out[row] * scale[row] + sum over keys of weights[row][key] values[key], for kVecs registers.
template <int kRows, int kVecs, class Access, class T>
inline void add_values(const float* weights, int64_t ld, ScatteredStream<T> values, int64_t n, const float* scale,
                       float* out, int64_t ld_out, int64_t column, Access at) {
  Vec acc[kRows][kVecs];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 16
    for (int v = 0; v < kVecs; ++v) acc[r][v] = Vec{};
  for (int64_t key = 0; key < n; ++key) {
    Vec right[kVecs];
    const T* row = values.row(key) + column;
    constexpr int kStep = kSplitColumns<T, kVecs> ? 2 : 1;
#pragma GCC unroll 16
    for (int v = 0; v < kVecs; v += kStep) {
      if constexpr (kStep == 2) {
        const Vec2 both = Whole2<true>::load(row + v * kLanes);
        right[v] = both.a, right[v + 1] = both.b;
      } else {
        right[v] = at.load(row + v * kLanes);
      }
      values.prefetch(key, column + v * kLanes);
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const Vec left = splat(weights[r * ld + key]);
#pragma GCC unroll 16
      for (int v = 0; v < kVecs; ++v) acc[r][v] += left * right[v];
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 16
    for (int v = 0; v < kVecs; ++v) {
      float* p = out + r * ld_out + column + v * kLanes;
      Whole::store(p, Whole::load(p) * scale[r] + acc[r][v]);
    }
}

// Same for columns [first, head_dim_v), kVecs registers at a time while that many are left.
template <int kRows, int kVecs, class T>
void add_all_values(const float* weights, int64_t ld, ScatteredStream<T> values, int64_t n, const float* scale,
                    float* out, int64_t ld_out, int64_t first, int64_t head_dim_v) {
  int64_t i = first;
  for (; i + kVecs * kLanes <= head_dim_v; i += kVecs * kLanes)
    add_values<kRows, kVecs>(weights, ld, values, n, scale, out, ld_out, i, Whole{});
  if constexpr (kVecs > 1) add_all_values<kRows, kVecs / 2>(weights, ld, values, n, scale, out, ld_out, i, head_dim_v);
  else if (i < head_dim_v)
    add_values<kRows, 1>(weights, ld, values, n, scale, out, ld_out, i, Part{int(head_dim_v - i)});
}

struct DecodeRows : BlockRows {
  RowSums sums[kAttentionDecodeRows];
  float scale[kAttentionDecodeRows];
  BlockWords words;
};

// Per-row inputs of a tile besides scores.
struct RowOptions {
  uint64_t seen, kept;
  const float* bias;  // or null
};

// x in the lanes of keys [j, j + kLanes) whose bit in the row's word is set, `other` elsewhere.
inline Vec pick_keys(uint64_t word, int64_t j, Vec x, float other) {
  uint64_t bits[1] = {word >> j};
  return PickedLanes(0).pick(bits, x, other);
}

// Calls f(p, numbers of the keys, j) for the registers of a row of n scores from p on.
template <class F> inline FK_INLINE void each_register(float* scores, int64_t n, F&& f) {
  Vec index;
  for (int i = 0; i < kLanes; ++i) index[i] = float(i);
  for (int64_t j = 0; j < n; j += kLanes, index += float(kLanes)) f(scores + j, index, j);
}

// The logits of a register of products without the bias. `index` and `q_pos` count from the tile's first key.
inline Vec row_logit(const AttentionForward& a, const DecodeRows& b, int row, Vec s, Vec index, Vec q_pos) {
  if (has_bias(a)) s = bent(a, s);
  if (a.alibi_slopes) s -= b.slope[row] * (index > q_pos ? index - q_pos : q_pos - index);
  return s;
}

// Turns a row's scores of keys [key, key + n) into weights, as softmax_tile of the other kernel does.
template <bool kOptions>
void softmax_row(const AttentionForward& a, DecodeRows& b, int row, const RowOptions& with, float* scores, int64_t n,
                 int32_t key) {
  const Vec q_pos = splat(float(b.q_pos[row] - key)), first = splat(float(b.first[row] - key)),
            last = splat(float(b.last[row] - key));
  const auto each = [&](auto&& f) FK_INLINE { each_register(scores, n, f); };
  const Vec end = splat(float(n));
  const float unit = has_bias(a) ? 1.0f : a.scale;  // scale of the values in `scores`
  Vec top = splat(kNone);
  each([&](float* p, Vec index, [[maybe_unused]] int64_t j) FK_INLINE {
    Vec s = row_logit(a, b, row, Whole::load(p), index, q_pos);
    if constexpr (kOptions) {
      if (with.bias) s += Whole::load(with.bias + j);
      s = pick_keys(with.seen, j, s, kNone);
    }
    s = (index >= first) & (index <= last) & (index < end) ? s : splat(kNone);
    Whole::store(p, s);
    top = larger(s, top);
  });
  RowSums& r = b.sums[row];
  float found[kLanes];
  Whole::store(found, top);
  const float now = std::max(r.max, *std::max_element(found, found + kLanes) * unit), at = now == kNone ? 0.0f : now;
  Vec sum[4] = {}, entropy[4] = {};
  each([&](float* p, Vec, [[maybe_unused]] int64_t j) FK_INLINE {
    const Vec t = Whole::load(p) * unit - at, weight = exp(t);
    sum[0] += weight;
    entropy[0] += weight > Vec{} ? weight * t : Vec{};
    if constexpr (kOptions) {
      if (a.drops()) return Whole::store(p, pick_keys(with.kept, j, weight * a.dropout.scale, 0.0f));
    }
    Whole::store(p, weight);
  });
  float unused;
  r.combine({now, foundry::FK_ISA::sum(sum), foundry::FK_ISA::sum(entropy)}, b.scale[row], unused);
}

// Turns the scores of all rows into weights if there are masks, a bias or dropout. With masks, call
// DecodeRows::words.look first.
void softmax_rows(const AttentionForward& a, const AttentionTask& task, DecodeRows& b, float* scores, int64_t ld,
                  int64_t tile, int64_t n) {
  constexpr int64_t kRoom = kAttentionDecodeKeys + kLanes;
  const AttentionSequence& s = a.sequences[task.sequence];
  const int64_t head = task.kv_head * a.group;
  float bias[kAttentionDecodeRows * kRoom];
  if (a.bias) read_bias_rows(a, s, head, b, tile, n, bias, kRoom);
  if (a.drops()) {
    kept_rows(a.dropout, a.group, b, b.words.dropout, tile, b.words.kept);
    transpose_bits(b.words.kept);
  }
  for (int r = 0; r < b.count; ++r) {
    const uint64_t seen = a.masked() && b.words.all == Seen::some ? b.words.seen[r] : ~uint64_t(0);
    const RowOptions with{seen, b.words.kept[r], a.bias ? bias + r * kRoom : nullptr};
    softmax_row<true>(a, b, r, with, scores + r * ld, n, int32_t(tile - task.key_begin));
  }
}

// Replaces the products of all rows by what a score function makes of them.
void apply_program(const AttentionForward& a, const AttentionTask& task, const DecodeRows& b,
                   const ScoreScratch& scratch, float* scores, int64_t ld, int64_t tile, int64_t n) {
  constexpr int64_t kRoom = kAttentionDecodeKeys + kLanes;
  float bias[kAttentionDecodeRows * kRoom];
  if (a.bias) read_bias_rows(a, a.sequences[task.sequence], task.kv_head * a.group, b, tile, n, bias, kRoom);
  for (int r = 0; r < b.count; ++r) {
    const Vec q_pos = splat(float(b.q_pos[r] - int32_t(tile - task.key_begin)));
    const float scale = has_bias(a) ? 1.0f : a.scale;
    each_register(scores + r * ld, n, [&](float* p, Vec index, int64_t j) FK_INLINE {
      Vec s = row_logit(a, b, r, Whole::load(p), index, q_pos) * scale;
      if (a.bias) s += Whole::load(bias + r * kRoom + j);
      Whole::store(p, s);
    });
  }
  score_tile(*a.decode_program, scratch.blocks[0], scratch.tile, scores, ld, b.count, tile, n);
}

// The addresses of a tile's keys or values.
template <class T> struct TileRows {
  const T* at[kAttentionDecodeKeys + kSums];

  // Finds those of [key, key + n), n > 0. The entries after them repeat the last one, so that prefetching may read
  // them.
  void find(const AttentionForward& a, const AttentionTask& task, const void* memory, const HeadStrides& strides,
            int64_t key, int64_t n) {
    const T* data = static_cast<const T*>(memory);
    const auto add = [&](int64_t first, int64_t count, int64_t offset) {
      for (int64_t i = 0; i < count; ++i) at[first + i] = data + offset + i * strides.token;
    };
    if (a.pages.table) for_each_page(a, strides, task.sequence, task.kv_head, key, n, add);
    else add(0, n, key_offset(strides, a.sequences[task.sequence], task.kv_head, key));
    std::fill(at + n, at + kAttentionDecodeKeys + kSums, at[n - 1]);
  }
};

template <int kRows, class T>
void attend(const AttentionForward& a, const AttentionTask& task, DecodeRows& b, const ScoreScratch& program,
            const float* queries, float* out, float* scores) {
  constexpr int kVecs = std::min(8, kSums / kRows);
  constexpr int64_t ld = kAttentionDecodeKeys + kSums;
  const AttentionSequence& s = a.sequences[task.sequence];
  const int64_t dv = round_up(a.head_dim_v, kAttentionPad);
  TileRows<T> rows_of_keys[2], values, *keys = rows_of_keys, *next = rows_of_keys + 1;
  int64_t tile_of_next = -1;
  std::optional<AttentionForward> with_logits;
  if (a.program) with_logits = finished(a);
  const AttentionForward& after = a.program ? *with_logits : a;  // the options of softmax_row
  for (int64_t tile = b.key_begin; tile < b.key_end; tile += kAttentionDecodeKeys) {
    const int64_t n = std::min<int64_t>(kAttentionDecodeKeys, b.key_end - tile);
    const auto first_key = int32_t(tile - task.key_begin);
    if (a.masked() && !b.words.look(a, s, task.kv_head * a.group, b, tile, n, first_key)) continue;
    const int64_t next_tile = tile + kAttentionDecodeKeys < b.key_end ? tile + kAttentionDecodeKeys : tile;
    if (tile_of_next == tile) std::swap(keys, next);
    else keys->find(a, task, a.k, a.k_strides, tile, n);
    values.find(a, task, a.v, a.v_strides, tile, n);
    next->find(a, task, a.k, a.k_strides, next_tile, std::min<int64_t>(kAttentionDecodeKeys, b.key_end - next_tile));
    tile_of_next = next_tile;
    multiply_keys<kRows>(queries, round_up(a.head_dim, kAttentionPad), a.head_dim,
                         ScatteredStream<T>{keys->at, values.at}, n, scores, ld);
    if (a.program) apply_program(a, task, b, program, scores, ld, tile, n);
    if (after.bias || a.aligned()) softmax_rows(after, task, b, scores, ld, tile, n);
    else
      for (int r = 0; r < b.count; ++r) softmax_row<false>(after, b, r, {}, scores + r * ld, n, first_key);
    for (int r = int(b.count); r < kRows; ++r) std::fill(scores + r * ld, scores + r * ld + n, 0.0f);
    add_all_values<kRows, kVecs>(scores, ld, ScatteredStream<T>{values.at, next->at}, n, b.scale, out, dv, 0,
                                 a.head_dim_v);
  }
  if constexpr (kSplitColumns<T, kVecs>)
    for (int64_t r = 0; r < b.count; ++r) put_in_order(out + r * dv, a.head_dim_v);
}

}  // namespace

void attention_decode(const AttentionForward& a, const AttentionTask& task, float* scratch) {
  const AttentionSequence& s = a.sequences[task.sequence];
  const int64_t head = task.kv_head * a.group;
  const int64_t d = round_up(a.head_dim, kAttentionPad), dv = round_up(a.head_dim_v, kAttentionPad);
  float *queries = scratch, *out = queries + kAttentionDecodeRows * d, *scores = out + kAttentionDecodeRows * dv;
  const ScoreScratch program(a.decode_program,
                             scratch + attention_forward_scratch(a.head_dim, a.head_dim_v, a.bias != nullptr));
  DecodeRows b;
  b.set(a, s, task.sequence, head, task.row_begin, task.row_end, task.key_begin, task.key_end);
  if (a.drops()) b.words.dropout.set(a, b, task.sequence, head);
  if (a.program) begin_scores(a, *a.decode_program, task.sequence, head, b, program.blocks[0]);
  std::fill(queries, scores, 0.0f);
  std::fill(b.scale, b.scale + kAttentionDecodeRows, 0.0f);
  std::fill(b.sums, b.sums + kAttentionDecodeRows, RowSums{kNone, 0.0f, 0.0f});
  with_type(a.type, [&](auto* type) {
    typedef std::remove_pointer_t<decltype(type)> T;
    for (int64_t i = 0; i < b.count; ++i)
      read_row<float>(a.type, a.q, row_offset(a.q_strides, s, head, a.group, b.row + i), a.head_dim, queries + i * d,
                      d);
    order_queries<T>(queries, b.count, a.head_dim, d);
    if (b.count > 4) attend<8, T>(a, task, b, program, queries, out, scores);
    else if (b.count > 2) attend<4, T>(a, task, b, program, queries, out, scores);
    else if (b.count > 1) attend<2, T>(a, task, b, program, queries, out, scores);
    else attend<1, T>(a, task, b, program, queries, out, scores);
  });
  for (int64_t i = 0; i < b.count; ++i) write_row(a, task, b.row + i, b.sums[i], out + i * dv);
}

}  // namespace FK_ISA
}  // namespace foundry
