// The gradient of a bias that queries, heads, keys or sequences share. Compiled once per instruction set (see isa.h).
//
// A task owns some of its elements and visits all pairs that share them, in a fixed order. It recomputes scores and
// their gradients as the backward pass does.
#include "flash_attention_gradients.h"

namespace foundry {
namespace FK_ISA {

namespace {

// The sums of a task's elements, [keys, ld]. A key has one element per row, token or head, or one in all.
struct BiasSums {
  const AttentionBackward& a;
  const AttentionBiasTask& task;
  bool own_heads, own_queries, own_keys;
  bool by_rows;  // one element per row
  int64_t count, ld, keys;
  float* data;

  BiasSums(const AttentionBackward& a, const AttentionBiasTask& task, float* memory)
      : a(a),
        task(task),
        own_heads(a.dbias_strides.head != 0),
        own_queries(a.dbias_strides.query != 0),
        own_keys(a.dbias_strides.key != 0),
        by_rows(own_queries && (own_heads || a.group == 1)),
        count(by_rows       ? task.row_end - task.row_begin
              : own_queries ? (task.row_end - task.row_begin) / a.group
              : own_heads   ? a.group
                            : 1),
        ld(attention_bias_sums_width(a.group)),
        keys(round_up(own_keys ? task.key_end - task.key_begin : 1, kAttentionKeys)),
        data(memory) {
    std::fill(data, data + keys * ld, 0.0f);
  }

  // The index of a row's element among those of a key.
  int64_t place(int64_t row) const {
    if (by_rows) return row - task.row_begin;
    if (own_queries) return row / a.group - task.row_begin / a.group;
    return own_heads ? row % a.group : 0;
  }

  // Adds a tile of n keys, [n, kAttentionRows]; `key` is the first.
  void add(const GradientBlock& b, float* tile, int64_t key, int64_t n) {
    if (!own_keys) {
      for (int64_t j = 1; j < n; ++j)
        for (int64_t r = 0; r < b.vecs * kLanes; r += kLanes)
          Whole::store(tile + r, Whole::load(tile + r) + Whole::load(tile + j * kAttentionRows + r));
      n = 1;
    }
    float* sums = data + (own_keys ? key - task.key_begin : 0) * ld;
    if (by_rows) {
      for (int64_t j = 0; j < n; ++j)
        for (int64_t r = 0; r < b.vecs * kLanes; r += kLanes)
          Whole::store(sums + j * ld + r, Whole::load(sums + j * ld + r) + Whole::load(tile + j * kAttentionRows + r));
      return;
    }
    // The contributions of a tile are summed first: rounding errors then grow with the number of tiles, not of rows.
    for (int64_t j = 0; j < n; ++j) {
      const float* row = tile + j * kAttentionRows;
      if (count == 1 && !own_queries) {
        Vec sum[4] = {};
        for (int v = 0; v < b.vecs; ++v) sum[v % 4] += Whole::load(row + v * kLanes);
        sums[j * ld] += foundry::FK_ISA::sum(sum);
      } else if (own_queries) {
        for (int64_t r = 0; r < b.count;) {
          const int64_t begin = r, end = std::min(b.count, r + a.group - (b.row + r) % a.group);
          float sum = 0.0f;
          for (; r < end; ++r) sum += row[r];
          sums[j * ld + place(b.row + begin)] += sum;
        }
      } else {
        for (int64_t h = 0; h < std::min(a.group, b.count); ++h) {
          float sum = 0.0f;
          for (int64_t r = h; r < b.count; r += a.group) sum += row[r];
          sums[j * ld + place(b.row + h)] += sum;
        }
      }
    }
  }

  // Writes the sums through the buffer `tile`.
  void write(float* tile) const {
    const PairStrides& strides = a.dbias_strides;
    for (int64_t i = 0; i < count; i += kAttentionRows)
      for (int64_t key = 0; key < keys; key += kAttentionKeys) {
        const int64_t n_rows = std::min<int64_t>(kAttentionRows, count - i);
        transpose(data + key * ld + i, ld, kAttentionKeys, round_up(n_rows, kLanes), tile, kAttentionKeys);
        const int64_t n = own_keys ? std::min<int64_t>(kAttentionKeys, task.key_end - task.key_begin - key) : 1;
        for (int64_t r = 0; r < n_rows; ++r) {
          const int64_t first = task.kv_head_begin * a.group, row = task.row_begin + i + r;
          const int64_t head = by_rows ? first + row % a.group : own_queries ? first : first + i + r;
          const int64_t query = by_rows ? row / a.group : task.row_begin / a.group + i + r;
          write_bias_row(a, task.sequence_begin * strides.batch + head * strides.head + query * strides.query,
                         task.key_begin + key, tile + r * kAttentionKeys, n);
        }
      }
  }
};

template <class E>
void bias_gradient(const AttentionBackward& a, const AttentionBiasTask& task, float* memory) {
  const GradientScratch scratch(a, memory);
  BiasSums sums(a, task, scratch.sums);
  for (int64_t n = task.sequence_begin; n < task.sequence_end; ++n)
    for (int64_t kv_head = task.kv_head_begin; kv_head < task.kv_head_end; ++kv_head)
      for (int64_t row = task.row_begin; row < task.row_end; row += kAttentionRows)
        for_each_gradient_tile<E>(
            a, n, kv_head, row, task.row_end, task.key_begin, task.key_end, scratch,
            [&](const GradientBlock& b, int64_t key, int64_t n_keys) { sums.add(b, scratch.bias_rows, key, n_keys); });
  sums.write(scratch.bias_rows);
}

}  // namespace

void attention_bias_gradient(const AttentionBackward& a, const AttentionBiasTask& task, float* scratch) {
  if constexpr (kPairs) {
    if (a.type == Dtype::bf16 && !a.widens) {
      [[maybe_unused]] const TileRegisters tiles;
      return bias_gradient<BFloat16>(a, task, scratch);
    }
  }
  bias_gradient<float>(a, task, scratch);
}

}  // namespace FK_ISA
}  // namespace foundry
