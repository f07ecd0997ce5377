// Attention's forward pass. Compiled once per instruction set (see isa.h).
#include "flash_attention_bias.h"
#include "flash_attention_pairs.h"
#include "flash_attention_softmax.h"
#include "flash_attention_words.h"
#include "transpose.h"

namespace foundry {
namespace FK_ISA {

namespace {

struct Block : BlockRows {
  float *queries, *out;  // transposed: [D, kAttentionRows], [Dv, kAttentionRows]
  alignas(64) float max[kAttentionRows], sum[kAttentionRows], entropy[kAttentionRows];
  BlockWords words;
};

struct Scratch {
  float *queries, *out, *by_rows, *scores, *keys, *values, *value_pairs, *bias, *bias_rows;

  Scratch(const AttentionForward& a, float* p) {
    const int64_t d = round_up(a.head_dim, kAttentionPad), dv = round_up(a.head_dim_v, kAttentionPad);
    const auto take = [&](int64_t n) { return std::exchange(p, p + n); };
    queries = take(kAttentionBlocks * kAttentionRows * d);
    out = take(kAttentionBlocks * kAttentionRows * dv);
    by_rows = take(kAttentionRows * std::max(d, dv));
    scores = take(kAttentionKeys * kAttentionRows);
    keys = take(kAttentionKeys * d);
    values = take(kAttentionKeys * dv);
    value_pairs = take(kAttentionKeys * dv / 2);
    bias = take(kAttentionKeys * kAttentionRows);
    bias_rows = p;
  }
};

template <class E>
void read_queries(const AttentionForward& a, const AttentionSequence& s, int64_t head, Block& b, float* by_rows) {
  const int64_t lanes = lanes_of<E>(a.head_dim), rows = b.vecs * kLanes;
  for (int64_t i = 0; i < b.count; ++i)
    read_row<E>(a.type, a.q, row_offset(a.q_strides, s, head, a.group, b.row + i), a.head_dim, by_rows + i * lanes,
                lanes);
  std::fill(by_rows + b.count * lanes, by_rows + rows * lanes, 0.0f);
  transpose(by_rows, lanes, rows, lanes, b.queries, kAttentionRows);
}

// One tile of scores [n, rows] becomes weights, relative to the largest logit so far; `scale` is left the factor by
// which that changes what was summed before. The first key is `key`, counted as in BlockRows. Of E bfloat16 the weights
// of two keys share a row.
template <class E, Hidden kHidden, bool kDrops, bool kBias, bool kEntropy>
void softmax_tile(const AttentionForward& a, Block& b, const TileOptions& with, float* scores, int64_t n, int32_t key,
                  float* scale) {
  const Vec unit = splat(kBias ? 1.0f : a.scale);  // of the scores in `scores`
  for (int v = 0; v < b.vecs; ++v) {
    [[maybe_unused]] const PickedLanes lanes(v);
    float* column = scores + v * kLanes;
    Vec top[2] = {splat(kNone), splat(kNone)};
    for (int64_t j = 0; j < n; ++j) {
      Vec s = Whole::load(column + j * kAttentionRows);
      if constexpr (kBias) {
        s = capped(a, s);
        if (a.alibi_slopes) s -= alibi(b, v, key + int32_t(j));
        if (with.bias) s += Whole::load(with.bias + j * kAttentionRows + v * kLanes);
      }
      if constexpr (kHidden == Hidden::edge) s = seen(b, v, key + int32_t(j), s, kNone);
      if constexpr (kHidden == Hidden::words) s = lanes.pick(with.seen + j, s, kNone);
      if constexpr (kBias || kHidden != Hidden::nothing) Whole::store(column + j * kAttentionRows, s);
      top[j & 1] = larger(s, top[j & 1]);
    }
    const auto row = [&](float* of) { return of + v * kLanes; };
    const Vec before = Whole::load(row(b.max)), now = larger(larger(top[0], top[1]) * unit, before);
    const Vec at = now == splat(kNone) ? Vec{} : now;  // a row that has seen no key yet
    const Vec moved = before - at, factor = exp(moved);
    Vec sum{}, entropy{};  // of this tile
    const auto weight = [&](int64_t j) FK_INLINE {
      const Vec t = Whole::load(column + j * kAttentionRows) * unit - at, p = exp(t);
      sum += p;
      if constexpr (kEntropy) entropy += p > Vec{} ? p * t : Vec{};
      if constexpr (kDrops) return lanes.pick(with.kept + j, p * a.dropout.scale, 0.0f);
      else return p;
    };
    if constexpr (kPer<E> == 1) {
      for (int64_t j = 0; j < n; ++j) Whole::store(column + j * kAttentionRows, weight(j));
    } else {
      for (int64_t j = 0; j < n; j += 2) {
        const Vec p = weight(j);
        store_pairs(column + j / 2 * kAttentionRows, p, j + 1 < n ? weight(j + 1) : Vec{});
      }
    }
    const Vec sum_before = Whole::load(row(b.sum));
    Whole::store(row(b.max), now);
    Whole::store(row(b.sum), sum_before * factor + sum);
    if constexpr (kEntropy) {
      const Vec all_before = Whole::load(row(b.entropy)) + moved * sum_before;
      Whole::store(row(b.entropy), entropy + (factor > Vec{} ? factor * all_before : Vec{}));
    }
    Whole::store(row(scale), factor);
  }
}

void write_block(const AttentionForward& a, const AttentionTask& task, const Block& b, float* by_rows) {
  const int64_t dv = round_up(a.head_dim_v, kAttentionPad);
  transpose(b.out, kAttentionRows, dv, b.vecs * kLanes, by_rows, dv);
  for (int64_t i = 0; i < b.count; ++i)
    write_row(a, task, b.row + i, {b.max[i], b.sum[i], b.entropy[i]}, by_rows + i * dv);
}

// Finds out what a block sees of the tile of keys that begins at `tile`; whether it is anything.
bool look(const AttentionForward& a, const AttentionTask& task, Block& b, int64_t tile) {
  const int64_t n = std::min<int64_t>(kAttentionKeys, b.key_end - tile);
  b.words.all = Seen::none;
  return tile >= b.key_begin && n > 0 &&
         b.words.look(a, a.sequences[task.sequence], task.kv_head * a.group, b, tile, n,
                      int32_t(tile - task.key_begin));
}

template <class E>
void forward(const AttentionForward& a, const AttentionTask& task, float* scratch_memory) {
  const Scratch scratch(a, scratch_memory);
  const AttentionSequence& s = a.sequences[task.sequence];
  const int64_t head = task.kv_head * a.group;
  const int64_t lanes = lanes_of<E>(a.head_dim), dv = round_up(a.head_dim_v, kAttentionPad);
  alignas(64) float scale[kAttentionRows];
  Block blocks[kAttentionBlocks];
  int n_blocks = 0;
  int64_t key_begin = task.key_end, key_end = task.key_begin;
  for (int64_t row = task.row_begin; row < task.row_end; row += kAttentionRows, ++n_blocks) {
    Block& b = blocks[n_blocks];
    b.set(a, s, task.sequence, head, row, task.row_end, task.key_begin, task.key_end);
    b.queries = scratch.queries + n_blocks * kAttentionRows * lanes;
    b.out = scratch.out + n_blocks * kAttentionRows * dv;
    std::fill(b.max, b.max + kAttentionRows, kNone);
    std::fill(b.sum, b.sum + kAttentionRows, 0.0f);
    std::fill(b.entropy, b.entropy + kAttentionRows, 0.0f);
    std::fill(b.out, b.out + dv * kAttentionRows, 0.0f);
    if (b.key_begin < b.key_end) read_queries<E>(a, s, head, b, scratch.by_rows);
    if (a.drops()) b.words.dropout.set(a, b, task.sequence, head);
    key_begin = std::min(key_begin, b.key_begin);
    key_end = std::max(key_end, b.key_end);
  }

  const int64_t k_base = key_offset(a.k_strides, s, task.kv_head, 0);
  const int64_t v_base = key_offset(a.v_strides, s, task.kv_head, 0);
  for (int64_t tile = key_begin; tile < key_end; tile += kAttentionKeys) {
    const int64_t n_tile = std::min<int64_t>(kAttentionKeys, key_end - tile);
    if (a.masked()) {
      bool any = false;
      for (Block* b = blocks; b < blocks + n_blocks; ++b) any |= look(a, task, *b, tile);
      if (!any) continue;
    }
    const auto read = [&](const void* data, const HeadStrides& strides, int64_t base, int64_t width, float* memory) {
      if (a.pages.table)
        return read_paged_tile<E>(a, data, strides, task.sequence, task.kv_head, tile, n_tile, width, memory);
      return read_tile<E>(a.type, data, base + tile * strides.token, strides.token, n_tile, width, memory);
    };
    const auto keys = read(a.k, a.k_strides, k_base, a.head_dim, scratch.keys);
    const auto values = pack_pairs(read(a.v, a.v_strides, v_base, a.head_dim_v, scratch.values), n_tile, a.head_dim_v,
                                   scratch.value_pairs);
    for (int i = 0; i < n_blocks; ++i) {
      Block& b = blocks[i];
      int64_t skipped = std::max<int64_t>(0, b.key_begin - tile);
      skipped -= skipped % kPer<E>;  // pairs stay together
      const int64_t begin = tile + skipped, end = std::min(tile + n_tile, b.key_end), n = end - begin;
      if (n <= 0 || (a.masked() && b.words.all == Seen::none)) continue;
      multiply<E>(n, b.vecs, {keys.data + skipped * keys.ld, keys.ld, kPer<E>}, b.queries, kAttentionRows,
                  steps_of<E>(a.head_dim), scratch.scores, kAttentionRows, Start::zero);
      Hidden hidden = begin < b.full_begin || end > b.full_end ? Hidden::edge : Hidden::nothing;
      TileOptions with{b.words.seen, b.words.kept, nullptr, nullptr};
      if (a.aligned()) {
        if (!a.masked()) look(a, task, b, tile);
        hidden = b.words.finish(a, b, tile);
      }
      if (a.bias) read_bias_tile(a, s, head, b, begin, n, scratch.bias_rows, scratch.bias), with.bias = scratch.bias;
      with_hidden(hidden, a.drops(), [&](auto by, auto drops) {
        with_bools(
            [&](auto bias, auto entropy) {
              softmax_tile<E, by.value, drops.value, bias.value, entropy.value>(a, b, with, scratch.scores, n,
                                                                                int32_t(begin - task.key_begin), scale);
            },
            has_bias(a), a.entropy != nullptr);
      });
      multiply<E>(a.head_dim_v, b.vecs, {values.data + skipped / kPer<E> * values.ld, kPer<E>, values.ld},
                  scratch.scores, kAttentionRows, steps_of<E>(n), b.out, kAttentionRows, Start::scaled, scale);
    }
  }
  for (int i = 0; i < n_blocks; ++i) write_block(a, task, blocks[i], scratch.by_rows);
}

}  // namespace

void attention_forward(const AttentionForward& a, const AttentionTask& task, float* scratch) {
  if (is_decoded(a, task.row_begin, a.sequences[task.sequence].q_len * a.group))
    return attention_decode(a, task, scratch);
  if constexpr (kPairs) {
    if (a.type == Dtype::bf16) {
      [[maybe_unused]] const TileRegisters tiles;
      return forward<BFloat16>(a, task, scratch);
    }
  }
  forward<float>(a, task, scratch);
}

void attention_combine(const AttentionForward& a, const AttentionTask& task, int64_t num_splits) {
  const AttentionSequence& s = a.sequences[task.sequence];
  const int64_t head = task.kv_head * a.group, dv = round_up(a.head_dim_v, kAttentionPad);
  const int64_t size = attention_split_size(a.head_dim_v), split_size = kAttentionBlocks * kAttentionRows * size;
  for (int64_t row = task.row_begin; row < task.row_end; ++row) {
    float* total =
        a.splits + task.split * split_size + (row - task.row_begin) * size;  // the first split takes the sums
    RowSums sums;
    std::memcpy(&sums, total + dv, sizeof(sums));
    for (int64_t n = 1; n < num_splits; ++n) {
      const float* split = total + n * split_size;
      RowSums more;
      std::memcpy(&more, split + dv, sizeof(more));
      float mine, theirs;
      sums.combine(more, mine, theirs);
      const Vec x = splat(mine), y = splat(theirs);
      for (int64_t i = 0; i < dv; i += kLanes)
        Whole::store(total + i, Whole::load(total + i) * x + Whole::load(split + i) * y);
    }
    finish_values(a, s, head, row, sums, total);
  }
}

}  // namespace FK_ISA
}  // namespace foundry
