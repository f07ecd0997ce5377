// Attention's forward pass. Compiled once per instruction set (see isa.h).
#include <optional>

#include "flash_attention_bias.h"
#include "flash_attention_scores.h"
#include "flash_attention_softmax.h"
#include "flash_attention_weights.h"
#include "transpose.h"

namespace foundry {
namespace FK_ISA {

namespace {

struct Scratch {
  float *queries, *out, *by_rows, *scores[2], *keys, *values, *value_pairs, *values_t[2], *bias, *bias_rows;
  ScoreScratch program;

  Scratch(const AttentionForward& a, float* p)
      : program(a.program, p + attention_forward_scratch(a.head_dim, a.head_dim_v, a.bias != nullptr)) {
    const int64_t d = round_up(a.head_dim, kAttentionPad), dv = round_up(a.head_dim_v, kAttentionPad);
    const auto take = [&](int64_t n) { return std::exchange(p, p + n); };
    queries = take(kAttentionBlocks * kAttentionRows * d);
    out = take(kAttentionBlocks * kAttentionRows * dv);
    by_rows = take(kAttentionRows * std::max(d, dv));
    for (float*& tile : scores) tile = take(kAttentionKeys * kAttentionRows);
    keys = take(kAttentionKeys * d);
    values = take(kAttentionKeys * dv);
    value_pairs = take(kAttentionKeys * dv / 2);
    for (float*& tile : values_t) tile = take(kAttentionKeys * dv / 2);
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

void write_block(const AttentionForward& a, const AttentionTask& task, const Block& b, float* by_rows) {
  const int64_t dv = round_up(a.head_dim_v, kAttentionPad);
  transpose(b.out, kAttentionRows, dv, b.vecs * kLanes, by_rows, dv);
  for (int64_t i = 0; i < b.count; ++i)
    write_row(a, task, b.row + i, {b.max[i], b.sum[i], b.entropy[i]}, by_rows + i * dv);
}

// Finds which of the tile's keys, starting at `tile`, the block sees. Returns whether there are any.
bool look(const AttentionForward& a, const AttentionTask& task, Block& b, int64_t tile) {
  const int64_t n = std::min<int64_t>(kAttentionKeys, b.key_end - tile);
  b.words.all = Seen::none;
  return tile >= b.key_begin && n > 0 &&
         b.words.look(a, a.sequences[task.sequence], task.kv_head * a.group, b, tile, n,
                      int32_t(tile - task.key_begin));
}

// The keys of one tile that a block sees, [begin, begin + n), with the factors of its two matmuls and its scores.
template <class E> struct BlockKeys {
  Block* block;
  int64_t tile, begin, n;
  Factor<E> keys, values;
  float* scores;
};

// Computes scores, weights and the sum of values of blocks. With AMX, for whole tiles, the matmuls of one part run
// during the softmax of another.
template <class E> class Parts {
 public:
  Parts(const AttentionForward& a, const AttentionTask& task, const Scratch& scratch)
      : a_(a),
        task_(task),
        scratch_(scratch) {
    if (a.program) finished_ = finished(a);
  }

  // Whether whole parts consist of whole tiles, as `add` needs.
  static bool tiled(const AttentionForward& a) {
    return kTiles && kPer<E> == 2 && !a.aligned() && !a.bias && a.head_dim % kTileBlock == 0 &&
           a.head_dim_v % kTileBlock == 0;
  }

  // Adds a part whose scores are not computed yet.
  void add(BlockKeys<E> part) {
    part.scores = scratch_.scores[index_ ^= 1];
#if defined(__AMX_BF16__)
    if constexpr (kPer<E> == 2) {
      if (tiled(a_) && part.n % kTileBlock == 0 && part.block->vecs % 2 == 0) {
        begin_values();
        queue_.add(product_of_keys(part));
        if (current_.block) softmax(current_), before_ = current_;
        queue_.finish();
        if (before_.block) rescale(before_);
        current_ = part;
        return;
      }
      finish();
    }
#endif
    const Block& b = *part.block;
    multiply<E>(part.n, b.vecs, part.keys, b.queries, kAttentionRows, steps_of<E>(a_.head_dim), part.scores,
                kAttentionRows, Start::zero);
    softmax(part);
    multiply<E>(a_.head_dim_v, b.vecs, part.values, part.scores, kAttentionRows, steps_of<E>(part.n), b.out,
                kAttentionRows, Start::scaled, scale_);
  }

  // Completes the remaining parts.
  void finish() {
#if defined(__AMX_BF16__)
    begin_values();
    if (current_.block) softmax(current_);
    queue_.finish();
    if (current_.block) rescale(current_), before_ = current_;
    begin_values();
    queue_.finish();
    current_ = {};
#endif
  }

 private:
  void softmax(const BlockKeys<E>& part) {
    Block& b = *part.block;
    const AttentionSequence& s = a_.sequences[task_.sequence];
    Hidden hidden = part.begin < b.full_begin || part.begin + part.n > b.full_end ? Hidden::edge : Hidden::nothing;
    TileOptions with{b.words.seen, b.words.kept};
    if (a_.aligned()) {
      if (!a_.masked()) look(a_, task_, b, part.tile);
      hidden = b.words.finish(a_, b, part.tile);
    }
    if (a_.bias) {
      read_bias_tile(a_, s, task_.kv_head * a_.group, b, part.begin, part.n, scratch_.bias_rows, scratch_.bias);
      with.bias = scratch_.bias;
    }
    if (a_.program) {
      finish_logits(a_, b, with.bias, part.scores, part.n, int32_t(part.begin - task_.key_begin), nullptr);
      score_tile(*a_.program, b.program, scratch_.program.tile, part.scores, kAttentionRows, b.count, part.begin,
                 part.n);
      with.bias = nullptr;
    }
    const AttentionForward& a = a_.program ? *finished_ : a_;
    with_hidden(hidden, a_.drops(), [&](auto by, auto drops) {
      with_bools(
          [&](auto bias, auto entropy) {
            softmax_tile<E, by.value, drops.value, bias.value, entropy.value>(
                a, b, with, part.scores, part.n, int32_t(part.begin - task_.key_begin), scale_, queue_);
          },
          has_bias(a) || a_.program, a.entropy != nullptr);
    });
  }

#if defined(__AMX_BF16__)
  // Queues the pending matmul with values.
  void begin_values() {
    if (before_.block) queue_.add(product_of_values(before_));
    before_ = {};
  }

  void rescale(const BlockKeys<E>& part) {
    scale_columns(part.block->out, kAttentionRows, a_.head_dim_v, part.block->vecs, scale_);
  }

  static TileProduct product(Factor<E> left, const float* right, float* out, int64_t rows, int64_t vecs, int64_t depth,
                             bool add) {
    return {reinterpret_cast<const char*>(left.data),
            reinterpret_cast<const char*>(right),
            reinterpret_cast<char*>(out),
            left.row * int64_t(sizeof(E)),
            kAttentionRows * int64_t(sizeof(float)),
            kAttentionRows * int64_t(sizeof(float)),
            int(rows / kTileBlock),
            int(vecs / 2),
            int(depth / kTilePairs),
            add};
  }
  TileProduct product_of_keys(const BlockKeys<E>& part) const {
    return product(part.keys, part.block->queries, part.scores, part.n, part.block->vecs, a_.head_dim / 2, false);
  }
  TileProduct product_of_values(const BlockKeys<E>& part) const {
    return product(part.values, part.scores, part.block->out, a_.head_dim_v, part.block->vecs, part.n / 2, true);
  }
#endif

  const AttentionForward& a_;
  std::optional<AttentionForward> finished_;  // with a score function
  const AttentionTask& task_;
  const Scratch& scratch_;
  TileQueue queue_;
  BlockKeys<E> before_{}, current_{};  // with weights and with scores; their matmuls with values are pending
  int index_ = 0;
  alignas(64) float scale_[kAttentionRows];
};

template <class E>
void forward(const AttentionForward& a, const AttentionTask& task, float* scratch_memory) {
  const Scratch scratch(a, scratch_memory);
  const AttentionSequence& s = a.sequences[task.sequence];
  const int64_t head = task.kv_head * a.group;
  const int64_t lanes = lanes_of<E>(a.head_dim), dv = round_up(a.head_dim_v, kAttentionPad);
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
    if (a.program) {
      b.program = scratch.program.blocks[n_blocks];
      begin_scores(a, *a.program, task.sequence, head, b, b.program);
    }
    key_begin = std::min(key_begin, b.key_begin);
    key_end = std::max(key_end, b.key_end);
  }

  // If only some rows of a block see a key, all keys of its tile are multiplied and the hidden ones masked afterwards.
  const int64_t unit = Parts<E>::tiled(a) ? kTileBlock : kPer<E>;  // pairs stay together
  if (unit > kPer<E> && key_begin < key_end)
    key_end = std::min(task.key_end, key_begin + round_up(key_end - key_begin, unit));
  Parts<E> parts(a, task, scratch);
  const int64_t k_base = key_offset(a.k_strides, s, task.kv_head, 0);
  const int64_t v_base = key_offset(a.v_strides, s, task.kv_head, 0);
  int64_t n_tiles = 0;
  for (int64_t tile = key_begin; tile < key_end; tile += kAttentionKeys, ++n_tiles) {
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
    // AMX needs the pairs of a column side by side. There are two buffers, because matmuls of the previous tile are
    // still pending.
    float* const values_t = scratch.values_t[n_tiles % 2];
    constexpr bool kTransposed = kTiles && kPer<E> == 2;
    if constexpr (kTransposed)
      transpose(scratch.value_pairs, dv, round_up(steps_of<E>(n_tile), kLanes), dv, values_t, kAttentionKeys / 2);
    for (Block* b = blocks; b < blocks + n_blocks; ++b) {
      int64_t skipped = std::max<int64_t>(0, b->key_begin - tile);
      skipped -= skipped % unit;
      const int64_t end = std::min(tile + n_tile, tile + round_up(b->key_end - tile, unit > kPer<E> ? unit : 1));
      const int64_t begin = tile + skipped, n = end - begin;
      if (n <= 0 || (a.masked() && b->words.all == Seen::none)) continue;
      const Factor<E> value_columns =
          kTransposed ? Factor<E>{reinterpret_cast<const E*>(values_t) + skipped, kAttentionKeys, kPer<E>}
                      : Factor<E>{values.data + skipped / kPer<E> * values.ld, kPer<E>, values.ld};
      parts.add({b, tile, begin, n, {keys.data + skipped * keys.ld, keys.ld, kPer<E>}, value_columns, nullptr});
    }
  }
  parts.finish();
  for (int i = 0; i < n_blocks; ++i) write_block(a, task, blocks[i], scratch.by_rows);
}

}  // namespace

void attention_forward(const AttentionForward& a, const AttentionTask& task, float* scratch) {
  if (is_decoded(a, task.row_begin, a.sequences[task.sequence].q_len * a.group))
    return attention_decode(a, task, scratch);
  if constexpr (kPairs) {
    if (a.type == Dtype::bf16 && !a.widens) {
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
        a.splits + task.split * split_size + (row - task.row_begin) * size;  // the first split collects the sums
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
