// Attention's backward pass. Compiled once per instruction set (see isa.h).
#include "flash_attention_rows.h"

namespace foundry {
namespace FK_ISA {

namespace {

struct Scratch {
  // Queries and gradients of the output, a row after the other and transposed; the gradient of the queries, transposed.
  float *queries, *queries_t, *grads, *grads_t, *dq;
  float *weights, *dscores;  // a tile of each, [keys, rows]
  float *keys, *values, *sums;

  Scratch(const AttentionBackward& a, float* p) {
    const int64_t d = round_up(a.width, kAttentionPad), dv = round_up(a.value_width, kAttentionPad);
    const auto take = [&](int64_t n) { return std::exchange(p, p + n); };
    queries = take(kAttentionRows * d);
    queries_t = take(kAttentionRows * d);
    dq = take(kAttentionRows * d);
    grads = take(kAttentionRows * dv);
    grads_t = take(kAttentionRows * dv);
    weights = take(kAttentionKeys * kAttentionRows);
    dscores = take(kAttentionKeys * kAttentionRows);
    keys = take(kAttentionKeys * d);
    values = take(kAttentionKeys * dv);
    sums = p;
  }
};

struct Block : BlockRows {
  alignas(64) float lse[kAttentionRows], delta[kAttentionRows];  // lse infinite where a row has no keys: weights of 0
};

void read_block(const AttentionBackward& a, const AttentionSequence& s, int64_t head, Block& b, const Scratch& scratch) {
  const int64_t width = round_up(a.width, kAttentionPad), value_width = round_up(a.value_width, kAttentionPad);
  with_type(a.type, [&](auto* type) {
    typedef std::remove_pointer_t<decltype(type)> T;
    for (int64_t i = 0; i < b.count; ++i) {
      const int64_t row = b.row + i;
      widen(static_cast<const T*>(a.q) + row_offset(a.q_strides, s, head, a.group, row), a.width,
            scratch.queries + i * width, width);
      widen(static_cast<const T*>(a.dout) + row_offset(a.dout_strides, s, head, a.group, row), a.value_width,
            scratch.grads + i * value_width, value_width);
      const int64_t at = row_offset(a.lse_strides, s, head, a.group, row);
      b.lse[i] = a.lse[at] == kNone ? -kNone : a.lse[at];
      b.delta[i] = a.delta[at];
    }
  });
  const int64_t rows = b.vecs * kLanes;
  std::fill(b.lse + b.count, b.lse + rows, -kNone);
  std::fill(b.delta + b.count, b.delta + rows, 0.0f);
  std::fill(scratch.queries + b.count * width, scratch.queries + rows * width, 0.0f);
  std::fill(scratch.grads + b.count * value_width, scratch.grads + rows * value_width, 0.0f);
  transpose(scratch.queries, width, rows, width, scratch.queries_t, kAttentionRows);
  transpose(scratch.grads, value_width, rows, value_width, scratch.grads_t, kAttentionRows);
}

// A tile's scores, in `weights`, become weights; its products of gradients and values, in `dscores`, become gradients of
// the scores, but for the factor `scale`.
template <bool kEdge, bool kBias>
void differentiate_tile(const AttentionBackward& a, const Block& b, const Scratch& scratch, int64_t n, int32_t key) {
  const Vec unit = splat(kBias ? 1.0f : a.scale);
  for (int v = 0; v < b.vecs; ++v) {
    const Vec lse = Whole::load(b.lse + v * kLanes), delta = Whole::load(b.delta + v * kLanes);
    for (int64_t j = 0; j < n; ++j) {
      float *weight = scratch.weights + j * kAttentionRows + v * kLanes;
      float *gradient = scratch.dscores + j * kAttentionRows + v * kLanes;
      Vec s = Whole::load(weight), ds = Whole::load(gradient) - delta;
      if constexpr (kBias) {
        s = capped(a, s);
        if (a.softcap > 0.0f) ds *= 1.0f - s * s * (1.0f / (a.softcap * a.softcap));
        if (a.slopes) s -= alibi(b, v, key + int32_t(j));
      }
      Vec p = exp2((s * unit - lse) * kLog2E);
      if constexpr (kEdge) p = seen(b, v, key + int32_t(j), p, 0.0f);
      Whole::store(weight, p);
      Whole::store(gradient, p * ds);
    }
  }
}

// The keys that rows [row_begin, row_end) see: [begin, end).
struct KeyRange {
  int64_t begin, end;

  KeyRange(const AttentionInputs& a, const AttentionTask& task) {
    const AttentionSequence& s = a.sequences[task.sequence];
    const int64_t offset = a.offset(s);
    begin = std::max<int64_t>(0, task.row_begin / a.group + offset - a.left);
    end = std::min(s.k_len, (task.row_end - 1) / a.group + offset + a.right + 1);
    if (task.row_begin >= task.row_end || begin >= end) begin = end = 0;
  }
};

void write_queries(const AttentionBackward& a, const AttentionSequence& s, int64_t head, const Block& b,
                   const Scratch& scratch) {
  const int64_t width = round_up(a.width, kAttentionPad);
  transpose(scratch.dq, kAttentionRows, width, b.vecs * kLanes, scratch.queries, width);
  const Vec scale = splat(a.scale);
  with_type(a.type, [&](auto* type) {
    for (int64_t i = 0; i < b.count; ++i) {
      float* row = scratch.queries + i * width;
      for (int64_t c = 0; c < width; c += kLanes) Whole::store(row + c, Whole::load(row + c) * scale);
      narrow(row, a.width, static_cast<decltype(type)>(a.dq) + row_offset(a.dq_strides, s, head, a.group, b.row + i));
    }
  });
}

}  // namespace

void attention_backward(const AttentionBackward& a, const AttentionTask& task, float* scratch_memory) {
  const Scratch scratch(a, scratch_memory);
  const AttentionSequence& s = a.sequences[task.sequence];
  const int64_t head = task.kv_head * a.group, kv_head = task.kv_head;
  const int64_t width = round_up(a.width, kAttentionPad), value_width = round_up(a.value_width, kAttentionPad);
  const bool need_scores = a.dq || a.dk;
  const KeyRange range(a, task);
  float* dk = a.parts ? a.parts + task.part * a.part_size : scratch.sums;
  float* dv = dk + a.dk_size;
  if (a.dk) std::fill(dk + range.begin * width, dk + range.end * width, 0.0f);
  if (a.dv) std::fill(dv + range.begin * value_width, dv + range.end * value_width, 0.0f);

  const int64_t k_base = key_offset(a.k_strides, s, kv_head, 0);
  const int64_t v_base = key_offset(a.v_strides, s, kv_head, 0);
  Block b;
  for (int64_t row = task.row_begin; row < task.row_end; row += kAttentionRows) {
    b.set(a, s, task.sequence, head, row, task.row_end, 0, s.k_len);
    std::fill(scratch.dq, scratch.dq + width * kAttentionRows, 0.0f);
    if (b.key_begin < b.key_end) read_block(a, s, head, b, scratch);
    for (int64_t begin = b.key_begin; begin < b.key_end; begin += kAttentionKeys) {
      const int64_t n = std::min<int64_t>(kAttentionKeys, b.key_end - begin);
      const Tile keys = read_tile(a.type, a.k, k_base + begin * a.k_strides.token, a.k_strides.token, n, a.width,
                                  scratch.keys);
      multiply(n, b.vecs, {keys.data, keys.ld, 1}, scratch.queries_t, kAttentionRows, a.width, scratch.weights,
               kAttentionRows, Start::zero);
      if (need_scores) {
        const Tile values = read_tile(a.type, a.v, v_base + begin * a.v_strides.token, a.v_strides.token, n,
                                      a.value_width, scratch.values);
        multiply(n, b.vecs, {values.data, values.ld, 1}, scratch.grads_t, kAttentionRows, a.value_width,
                 scratch.dscores, kAttentionRows, Start::zero);
      }
      with_bools(
          [&](auto edge, auto bias) {
            differentiate_tile<edge.value, bias.value>(a, b, scratch, n, int32_t(begin));
          },
          begin < b.full_begin || begin + n > b.full_end, has_bias(a));
      if (a.dv)
        multiply(n, value_width / kLanes, {scratch.weights, kAttentionRows, 1}, scratch.grads, value_width, b.count,
                 dv + begin * value_width, value_width, Start::add);
      if (a.dk)
        multiply(n, width / kLanes, {scratch.dscores, kAttentionRows, 1}, scratch.queries, width, b.count,
                 dk + begin * width, width, Start::add);
      if (a.dq)
        multiply(a.width, b.vecs, {keys.data, 1, keys.ld}, scratch.dscores, kAttentionRows, n, scratch.dq,
                 kAttentionRows, Start::add);
    }
    if (a.dq) write_queries(a, s, head, b, scratch);
  }
  if (!a.parts) attention_backward_keys(a, &task, 1, 0, s.k_len, scratch.sums);
}

void attention_backward_keys(const AttentionBackward& a, const AttentionTask* tasks, int64_t n_tasks, int64_t key_begin,
                             int64_t key_end, float* sums) {
  const AttentionSequence& s = a.sequences[tasks->sequence];
  const auto write = [&](void* gradient, const HeadStrides& strides, int64_t width, int64_t from, float factor) {
    if (!gradient) return;
    const int64_t padded = round_up(width, kAttentionPad);
    for (int64_t key = key_begin; key < key_end; ++key)
      with_type(a.type, [&](auto* type) {
        auto* out = static_cast<decltype(type)>(gradient) + key_offset(strides, s, tasks->kv_head, key);
        for_each_vec(width, [&](int64_t i, auto at, int) FK_INLINE {
          Vec total{};
          for (int64_t t = 0; t < n_tasks; ++t) {
            const KeyRange seen_by(a, tasks[t]);
            if (key >= seen_by.begin && key < seen_by.end)
              total += Whole::load(sums + t * a.part_size + from + key * padded + i);
          }
          at.store(out + i, total * factor);
        });
      });
  };
  write(a.dk, a.dk_strides, a.width, 0, a.scale);
  write(a.dv, a.dv_strides, a.value_width, a.dk_size, 1.0f);
}

void attention_delta(const AttentionDelta& a, int64_t sequence, int64_t token_begin, int64_t token_end) {
  const AttentionSequence& s = a.sequences[sequence];
  for (int64_t row = token_begin * a.heads; row < token_end * a.heads; ++row) {
    const int64_t at = row_offset(a.lse_strides, s, 0, a.heads, row);
    Vec products[4] = {};
    with_type(a.type, [&](auto* type) {
      typedef std::remove_pointer_t<decltype(type)> T;
      const T* out = static_cast<const T*>(a.out) + row_offset(a.out_strides, s, 0, a.heads, row);
      const T* dout = static_cast<const T*>(a.dout) + row_offset(a.dout_strides, s, 0, a.heads, row);
      for_each_vec(a.value_width, [&](int64_t i, auto access, int k) FK_INLINE {
        products[k] += access.load(out + i) * access.load(dout + i);
      });
    });
    const float into_lse = a.dlse ? a.dlse[at] : 0.0f;
    a.delta[at] = a.lse[at] == kNone ? 0.0f : sum(products) - into_lse;
  }
}

float attention_dsink(const AttentionDelta& a, int64_t n_sequences, int64_t head, float sink) {
  double total = 0.0;
  for (int64_t n = 0; n < n_sequences; ++n) {
    const AttentionSequence& s = a.sequences[n];
    for (int64_t t = 0; t < s.q_len; ++t) {
      const int64_t at = row_offset(a.lse_strides, s, head, 1, t);
      if (a.lse[at] != kNone) total -= std::exp(double(sink) - a.lse[at]) * a.delta[at];
    }
  }
  return float(total);
}

}  // namespace FK_ISA
}  // namespace foundry
