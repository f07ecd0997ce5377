// The sums of the gradients of a score function's tensors on the CPU.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "../cpu/flash_attention_tasks.h"
#include "cpu_common.h"
#include "flash_attention.h"

namespace foundry {
namespace flash_attention_cpu {

// How the gradients of captured tensors are split into tasks and summed. A task adds to sums of its own in a fixed
// order; sums that several tasks have a copy of are added at the end, in the order of the tasks. The split depends on
// shapes alone.
struct ScoreSums {
  static constexpr int64_t kMostCopied = 1 << 21;  // numbers, 16 MiB: beyond, tasks that share elements are one
  static constexpr int64_t kParts = 3;             // sequences, key-value heads, rows

  std::vector<AttentionBiasTask> tasks;
  std::vector<std::vector<int64_t>> copy_of;  // [task][which tensor]
  std::vector<int64_t> numel, copies;
  std::vector<bool> exclusive;  // of tensors, see ScoreGradient

  ScoreSums(const AttentionBackward& a, const std::vector<AttentionSequence>& sequences, int64_t kv_heads,
            const AttentionOptions& options, const Slots& slots) {
    int64_t rows = 0;
    for (const AttentionSequence& s : sequences) rows = std::max(rows, s.q_len * a.group);
    const auto n_sequences = static_cast<int64_t>(sequences.size());
    const int64_t n_heads = kv_heads * a.group;
    const int64_t row_step =
        kTaskRows * a.group;  // whole tokens, and a multiple of the rows that attention_decode takes
    const int64_t most[kParts] = {n_sequences, kv_heads, (rows + row_step - 1) / row_step};
    const int64_t numbers[kParts] = {n_sequences, n_heads, rows / a.group};
    for (int64_t slot : slots) numel.push_back(options.score_tensors[slot].numel()), copies.push_back(1);
    int64_t parts[kParts];
    std::vector<bool> shared[kParts];
    for (int part = 0; part < kParts; ++part) {
      int64_t copied = 0;
      for (size_t i = 0; i < slots.size(); ++i) {
        shared[part].push_back(!has_own(a, options.score_tensors[slots[i]], int(i), part, numbers[part]));
        if (shared[part][i]) copied += numel[i] * copies[i];
      }
      parts[part] = copied * most[part] <= kMostCopied ? std::max<int64_t>(1, most[part]) : 1;
      for (size_t i = 0; i < slots.size(); ++i)
        if (shared[part][i]) copies[i] *= parts[part];
    }
    for (size_t i = 0; i < slots.size(); ++i) {
      int loads = 0;
      bool alone = true;
      for (const ScoreGradient& g : a.program->gradients)
        if (g.sums == int(i)) ++loads, alone = alone && g.load.along >= 0;
      for (int part = 0; part < kParts; ++part) alone = alone && (numbers[part] <= 1 || !shared[part][i]);
      exclusive.push_back(alone && loads == 1);
    }
    int64_t at[kParts];
    for (at[0] = 0; at[0] < parts[0]; ++at[0])
      for (at[1] = 0; at[1] < parts[1]; ++at[1])
        for (at[2] = 0; at[2] < parts[2]; ++at[2]) {
          const auto range = [&](int part, int64_t all, int64_t step) {
            return parts[part] == 1 ? std::pair(int64_t(0), all)
                                    : std::pair(at[part] * step, std::min((at[part] + 1) * step, all));
          };
          const auto sequence = range(0, n_sequences, 1), head = range(1, kv_heads, 1), row = range(2, rows, row_step);
          tasks.push_back({sequence.first, sequence.second, head.first, head.second, row.first, row.second, 0, 0});
          std::vector<int64_t> copy(slots.size(), 0);
          for (size_t i = 0; i < slots.size(); ++i)
            for (int part = 0; part < kParts; ++part)
              if (shared[part][i]) copy[i] = copy[i] * parts[part] + at[part];
          copy_of.push_back(std::move(copy));
        }
  }

  // Whether different sequences, heads or queries (the part) read different elements of tensor i. `n`: how many there
  // are.
  static bool has_own(const AttentionBackward& a, const Tensor& tensor, int i, int part, int64_t n) {
    if (a.dropout.heads && part < 2) return false;  // they have other numbers
    int dim = -1;
    for (const ScoreGradient& g : a.program->gradients) {
      if (g.sums != i) continue;
      if (g.indexed_by[part] < 0 || (dim >= 0 && dim != g.indexed_by[part])) return false;
      dim = g.indexed_by[part];
    }
    return dim >= 0 && tensor.size(dim) >= n;
  }
};

// result = the sum of the copies ``[copies, n]``, in their order.
inline void add_copies(const Tensor& sums, const Tensor& result) {
  const double* from = sums.const_data_ptr<double>();
  const int64_t copies = sums.size(0), n = sums.size(1);
  float* out = result.mutable_data_ptr<float>();
  at::parallel_for(0, n, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t e = begin; e < end; ++e) {
      double sum = 0.0;
      for (int64_t c = 0; c < copies; ++c) sum += from[c * n + e];
      out[e] = static_cast<float>(sum);
    }
  });
}

}  // namespace flash_attention_cpu
}  // namespace foundry
