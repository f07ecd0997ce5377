// Attention's backward pass. Compiled once per instruction set (see isa.h).
#include "flash_attention_gradients.h"

namespace foundry {
namespace FK_ISA {

namespace {

void write_queries(const AttentionBackward& a, const AttentionSequence& s, int64_t head, const GradientBlock& b,
                   const float* dq, const GradientScratch& scratch) {
  const int64_t d = round_up(a.head_dim, kAttentionPad);
  transpose(dq, kAttentionRows, d, b.vecs * kLanes, scratch.queries, d);
  const Vec scale = splat(a.scale);
  with_type(a.type, [&](auto* type) {
    for (int64_t i = 0; i < b.count; ++i) {
      float* row = scratch.queries + i * d;
      for (int64_t c = 0; c < d; c += kLanes) Whole::store(row + c, Whole::load(row + c) * scale);
      narrow(row, a.head_dim,
             static_cast<decltype(type)>(a.dq) + row_offset(a.dq_strides, s, head, a.group, b.row + i));
    }
  });
}

// Where dk or dv of a sequence and head is summed: key k is at data + k * ld.
struct KeySums {
  float* data;
  int64_t ld;

  KeySums(const AttentionBackward& a, void* gradient, int64_t width, int64_t offset, int64_t stride, float* memory)
      : data(memory),
        ld(round_up(width, kAttentionPad)) {
    if (gradient && a.in_place(width)) data = static_cast<float*>(gradient) + offset, ld = stride;
  }
};

void write_keys(const AttentionBackward& a, const AttentionBackwardTask& task, const KeySums& dk, const KeySums& dv) {
  const AttentionSequence& s = a.sequences[task.sequence];
  const auto write = [&](void* gradient, const HeadStrides& strides, int64_t width, const KeySums& sums, float factor) {
    if (!gradient || (factor == 1.0f && a.in_place(width))) return;
    with_type(a.type, [&](auto* type) {
      for (int64_t key = task.key_begin; key < task.key_end; ++key) {
        const float* from = sums.data + key * sums.ld;
        auto* out = static_cast<decltype(type)>(gradient) + key_offset(strides, s, task.kv_head, key);
        for_each_vec(width, [&](int64_t i, auto at, int) FK_INLINE { at.store(out + i, at.load(from + i) * factor); });
      }
    });
  };
  write(a.dk, a.dk_strides, a.head_dim, dk, a.scale);
  write(a.dv, a.dv_strides, a.head_dim_v, dv, 1.0f);
}

// Prefetches [part / parts, (part + 1) / parts) of what the rows from `row` on read first. A task reads them once, and
// it has too few keys to hide that latency.
void prefetch_rows(const AttentionBackward& a, const AttentionBackwardTask& task, int64_t row, const float* dq,
                   int64_t part, int64_t parts) {
  const AttentionSequence& s = a.sequences[task.sequence];
  const int64_t size = a.type == Dtype::f32 ? 4 : 2, rows = std::min<int64_t>(kAttentionRows, task.row_end - row);
  const auto fetch = [](const void* data, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(data) + i, 0, 2);
  };
  for (int64_t i = part * rows / parts; i < (part + 1) * rows / parts; ++i) {
    const auto fetch_row = [&](const void* data, const HeadStrides& strides, int64_t width) {
      const int64_t offset = row_offset(strides, s, task.kv_head * a.group, a.group, row + i);
      fetch(static_cast<const char*>(data) + offset * size, width * size);
    };
    fetch_row(a.q, a.q_strides, a.head_dim);
    fetch_row(a.dout, a.dout_strides, a.head_dim_v);
  }
  if (!dq) return;
  const int64_t floats = round_up(a.head_dim, kAttentionPad) * kAttentionRows, from = part * floats / parts;
  fetch(dq + from, ((part + 1) * floats / parts - from) * int64_t(sizeof(float)));
}

template <class E>
void backward(const AttentionBackward& a, const AttentionBackwardTask& task, float* scratch_memory) {
  const GradientScratch scratch(a, scratch_memory);
  const AttentionSequence& s = a.sequences[task.sequence];
  const int64_t head = task.kv_head * a.group, kv_head = task.kv_head, n_rows = s.q_len * a.group;
  const int64_t padded_d = round_up(a.head_dim, kAttentionPad), padded_dv = round_up(a.head_dim_v, kAttentionPad);
  const int64_t lanes = lanes_of<E>(a.head_dim), value_lanes = lanes_of<E>(a.head_dim_v);
  const bool need_scores = a.dq || a.dk || a.own_dbias || a.score_sums, shared = task.sums >= 0;
  float* key_sums = shared ? a.sums + task.sums : scratch.sums;
  float* dq_sums = task.row_sums >= 0 ? a.sums + task.row_sums : nullptr;
  const KeySums dk(a, a.dk, a.head_dim, key_offset(a.dk_strides, s, kv_head, 0), a.dk_strides.token, key_sums);
  const KeySums dv(a, a.dv, a.head_dim_v, key_offset(a.dv_strides, s, kv_head, 0), a.dv_strides.token,
                   key_sums + a.dk_sums(s.k_len));
  if (task.first_of_keys)
    for (int64_t key = task.key_begin; key < task.key_end; ++key) {
      if (a.dk) std::fill_n(dk.data + key * dk.ld, padded_d, 0.0f);
      if (a.dv) std::fill_n(dv.data + key * dv.ld, padded_dv, 0.0f);
    }

  const KeyTiles<E> tiles(a, s, kv_head);
  // The tiles of weights and of score gradients as left factors of matmuls along the queries.
  const Factor<E> weights{reinterpret_cast<const E*>(scratch.weights), kAttentionRows * kPer<E>, kPer<E>};
  const Factor<E> dscores{
      kPer<E> == 1 ? reinterpret_cast<const E*>(scratch.dscores) : reinterpret_cast<const E*>(scratch.dscores_rows),
      kAttentionRows, kPer<E>};
  const auto right = [](Tile<E> tile) { return reinterpret_cast<const float*>(tile.data); };
  const auto as_tile = [](const float* rows, int64_t n) {
    return Tile<E>{reinterpret_cast<const E*>(rows), n * kPer<E>};
  };
  // Adds to a tile's sums of keys or values. On x86-64 without AVX-512 only half a block's rows are summed at a time:
  // rounding errors grow with the number of terms, and MKL's errors are smaller there too. It costs 1 to 2 % of the
  // backward pass. With AVX-512, MKL's errors match those of whole blocks, and it would cost 5 %.
#if defined(__x86_64__) && !defined(__AVX512F__)
  constexpr int64_t kSummedRows = kAttentionRows / 2;
#else
  constexpr int64_t kSummedRows = kAttentionRows;
#endif
  const auto add_rows = [&](int64_t count, int64_t n, int64_t vecs, Factor<E> left, Tile<E> rows, float* sums,
                            int64_t ld) {
    for (int64_t first = 0; first < count; first += kSummedRows, left.data += kSummedRows * left.step)
      multiply<E>(n, vecs, left, right(rows) + first * rows.ld, rows.ld / kPer<E>,
                  steps_of<E>(std::min(kSummedRows, count - first)), sums, ld, Start::add);
  };
  GradientBlock b;
  for (int64_t row = task.row_begin; row < task.row_end; row += kAttentionRows) {
    b.set(a, s, task.sequence, head, row, task.row_end, task.key_begin, task.key_end);
    float* dq = dq_sums ? dq_sums + (row - task.row_begin) * padded_d : scratch.dq;
    if (a.dq && task.first_of_rows) std::fill_n(dq, padded_d * kAttentionRows, 0.0f);
    Tile<E> queries{}, dout{};
    if (a.drops()) b.words.dropout.set(a, b, task.sequence, head);
    if (a.program) begin_scores(a, *a.program, task.sequence, head, b, scratch.program.blocks[0]);
    const bool decoded = is_decoded(a, row, n_rows);
    if (b.key_begin < b.key_end) {
      read_block<E>(a, s, head, b, decoded, scratch);
      queries = pack_pairs(as_tile(scratch.queries, lanes), b.count, a.head_dim, scratch.query_pairs);
      dout = pack_pairs(as_tile(scratch.dout, value_lanes), b.count, a.head_dim_v, scratch.dout_pairs);
    }
    for (int64_t begin = b.key_begin; begin < b.key_end; begin += kAttentionKeys) {
      const int64_t n = std::min<int64_t>(kAttentionKeys, b.key_end - begin);
      if (const int64_t next = row + kAttentionRows; shared && next < task.row_end)
        prefetch_rows(a, task, next, dq_sums ? dq_sums + (next - task.row_begin) * padded_d : nullptr,
                      (begin - b.key_begin) / kAttentionKeys,
                      (b.key_end - b.key_begin + kAttentionKeys - 1) / kAttentionKeys);
      const auto first_key = int32_t(begin - task.key_begin);
      if (!looks_at(a, s, head, b, begin, n, first_key)) continue;
      const auto keys = tiles.keys(begin, n, scratch.keys);
      tiles.multiply_keys_of(b, decoded, begin, n, keys, scratch);
      if (need_scores) {
        const auto values = tiles.values(begin, n, scratch.values);
        tiles.multiply_values_of(b, decoded, begin, n, values, scratch);
      }
      differentiate<E>(a, s, head, b, scratch, begin, n, first_key, a.own_dbias);
      if (a.score_sums) add_score_gradients(a, b, scratch, begin, n, a.score_sums);
      if (a.own_dbias) write_bias_tile(a, s, head, b, begin, n, scratch.bias_rows, scratch.bias);
      if (a.dv) add_rows(b.count, n, padded_dv / kLanes, weights, dout, dv.data + begin * dv.ld, dv.ld);
      if (a.dk) add_rows(b.count, n, padded_d / kLanes, dscores, queries, dk.data + begin * dk.ld, dk.ld);
      if (a.dq) {
        const auto key_pairs = pack_pairs(keys, n, a.head_dim, scratch.key_pairs);
        multiply<E>(a.head_dim, b.vecs, {key_pairs.data, kPer<E>, key_pairs.ld}, scratch.dscores, kAttentionRows,
                    steps_of<E>(n), dq, kAttentionRows, Start::add);
      }
    }
    if (a.dq && task.last_of_rows) write_queries(a, s, head, b, dq, scratch);
  }
  if (task.last_of_keys) write_keys(a, task, dk, dv);
}

}  // namespace

void attention_backward(const AttentionBackward& a, const AttentionBackwardTask& task, float* scratch) {
  if constexpr (kPairs) {
    if (a.type == Dtype::bf16 && !a.widens) {
      [[maybe_unused]] const TileRegisters tiles;
      return backward<BFloat16>(a, task, scratch);
    }
  }
  backward<float>(a, task, scratch);
}

void attention_delta(const AttentionDelta& a, int64_t sequence, int64_t token_begin, int64_t token_end) {
  const AttentionSequence& s = a.sequences[sequence];
  for (int64_t row = token_begin * a.n_heads; row < token_end * a.n_heads; ++row) {
    const int64_t at = row_offset(a.lse_strides, s, 0, a.n_heads, row);
    // Summed as multiply_keys does: if all weight is on one key, delta equals the value that it is subtracted from.
    Vec products{};
    with_type(a.type, [&](auto* type) {
      typedef std::remove_pointer_t<decltype(type)> T;
      const T* out = static_cast<const T*>(a.out) + row_offset(a.out_strides, s, 0, a.n_heads, row);
      const T* dout = static_cast<const T*>(a.dout) + row_offset(a.dout_strides, s, 0, a.n_heads, row);
      int64_t i = 0;
      if constexpr (kReadSplit<T>)
        for (; i + kSplitStep <= a.head_dim_v; i += kSplitStep) {
          const Vec2 x = Whole2<true>::load(out + i), y = Whole2<true>::load(dout + i);
          products += x.a * y.a;
          products += x.b * y.b;
        }
      for (; i + kLanes <= a.head_dim_v; i += kLanes) products += Whole::load(out + i) * Whole::load(dout + i);
      if (const Part at{int(a.head_dim_v - i)}; at.count > 0) products += at.load(out + i) * at.load(dout + i);
    });
    const float into_lse = a.dlse ? a.dlse[at] : 0.0f;
    a.delta[at] = a.lse[at] == kNone ? 0.0f : sum_of(products) - into_lse;
  }
}

float attention_dsink(const AttentionDelta& a, int64_t n_sequences, int64_t head, float sink) {
  double total = 0.0;
  for (int64_t n = 0; n < n_sequences; ++n) {
    const AttentionSequence& s = a.sequences[n];
    for (int64_t t = 0; t < s.q_len; ++t) {
      const int64_t at = row_offset(a.lse_strides, s, head, 1, t);
      if (a.lse[at] == kNone) continue;
      const SplitLse lse(a.lse[at]);
      total -= std::exp((double(sink) - lse.lse) - lse.rest) * a.delta[at];
    }
  }
  return float(total);
}

}  // namespace FK_ISA
}  // namespace foundry
