// The sequences of an attention call on the CPU, from its options.
#pragma once

#include <algorithm>
#include <vector>

#include "../cpu/flash_attention.h"
#include "cpu_common.h"
#include "flash_attention.h"

namespace foundry {
namespace flash_attention_cpu {

// Sequences from cu_seqlens. Reads them as int64 and checks that they lie within the tensors.
inline std::vector<AttentionSequence> packed_sequences(const Tensor& q, const Tensor& k, const Tensor& cu_seqlens_q,
                                                       const Tensor& cu_seqlens_k) {
  const auto read = [](const char* name, const Tensor& cu_seqlens, int64_t total) {
    const Tensor t = cu_seqlens.to(at::kLong).contiguous();
    std::vector<int64_t> values(t.const_data_ptr<int64_t>(), t.const_data_ptr<int64_t>() + t.numel());
    TORCH_CHECK_VALUE(std::is_sorted(values.begin(), values.end()) && values.front() == 0 && values.back() == total,
                      name, " must start at 0, never decrease and end at the ", total, " packed tokens");
    return values;
  };
  const auto starts_q = read("cu_seqlens_q", cu_seqlens_q, q.size(0)),
             starts_k = read("cu_seqlens_k", cu_seqlens_k, k.size(0));
  std::vector<AttentionSequence> sequences;
  for (size_t n = 0; n + 1 < starts_q.size(); ++n)
    sequences.push_back({0, starts_q[n], starts_q[n + 1] - starts_q[n], starts_k[n], starts_k[n + 1] - starts_k[n]});
  return sequences;
}

// Sequences with paged keys; k_start is the first position attended to. Checks that all page indices are in range.
inline std::vector<AttentionSequence> paged_sequences(const Tensor& q, const Tensor& k, const AttentionOptions& options,
                                                      const AttentionPages& pages, int64_t max_blocks) {
  const auto read = [](const Tensor& t) {
    const Tensor values = t.to(at::kLong).contiguous();
    return std::vector<int64_t>(values.const_data_ptr<int64_t>(), values.const_data_ptr<int64_t>() + values.numel());
  };
  const auto starts_q = read(*options.cu_seqlens_q), ends = read(*options.seqused_k);
  const auto begins = options.leftpad_k.has_value() ? read(*options.leftpad_k) : std::vector<int64_t>(ends.size(), 0);
  TORCH_CHECK_VALUE(
      std::is_sorted(starts_q.begin(), starts_q.end()) && starts_q.front() == 0 && starts_q.back() == q.size(0),
      "cu_seqlens_q must start at 0, never decrease and end at the ", q.size(0), " packed tokens");
  std::vector<AttentionSequence> sequences;
  for (size_t n = 0; n < ends.size(); ++n) {
    const int64_t begin = begins[n], end = ends[n];
    TORCH_CHECK_VALUE(end >= 0 && end <= max_blocks * pages.size, "seqused_k must be in 0 .. ", max_blocks * pages.size,
                      ", what block_table's pages hold; got ", end, " for sequence ", n);
    TORCH_CHECK_VALUE(begin >= 0 && begin <= end, "leftpad_k must be in 0 .. seqused_k=", end, "; got ", begin,
                      " for sequence ", n);
    for (int64_t i = begin / pages.size; i * pages.size < end; ++i) {
      const int64_t page = pages.table[int64_t(n) * pages.stride + i];
      TORCH_CHECK_VALUE(page >= 0 && page < k.size(0), "block_table must be in 0 .. ", k.size(0) - 1, "; got ", page,
                        " for page ", i, " of sequence ", n);
    }
    sequences.push_back({0, starts_q[n], starts_q[n + 1] - starts_q[n], begin, end - begin});
  }
  return sequences;
}

inline std::vector<AttentionSequence> sequences_of(const Tensor& q, const Tensor& k, const AttentionOptions& options) {
  if (options.packed()) return packed_sequences(q, k, *options.cu_seqlens_q, *options.cu_seqlens_k);
  std::vector<AttentionSequence> sequences;
  for (int64_t b = 0; b < q.size(0); ++b) sequences.push_back({b, 0, q.size(2), 0, k.size(2)});
  return sequences;
}

}  // namespace flash_attention_cpu
}  // namespace foundry
