// The gradients of the tensors that a score function reads. Compiled once per instruction set (see isa.h).
//
// As for a shared bias, a pass of its own recomputes scores and their gradients. It adds to the sums of a task in a
// fixed order.
#include "flash_attention_gradients.h"

namespace foundry {
namespace FK_ISA {

namespace {

template <class E>
void score_gradient(const AttentionBackward& a, const AttentionBiasTask& task, void* const* sums, float* memory) {
  const GradientScratch scratch(a, memory);
  for (int64_t n = task.sequence_begin; n < task.sequence_end; ++n) {
    const AttentionSequence& s = a.sequences[n];
    const int64_t row_end = std::min(task.row_end, s.q_len * a.group);
    for (int64_t kv_head = task.kv_head_begin; kv_head < task.kv_head_end; ++kv_head)
      for (int64_t row = task.row_begin; row < row_end; row += kAttentionRows)
        for_each_gradient_tile<E>(a, n, kv_head, row, row_end, 0, s.k_len, scratch,
                                  [&](const GradientBlock& b, int64_t key, int64_t n_keys) {
                                    add_score_gradients(a, b, scratch, key, n_keys, sums);
                                  });
  }
}

}  // namespace

void attention_score_gradient(const AttentionBackward& a, const AttentionBiasTask& task, void* const* sums,
                              float* scratch) {
  if constexpr (kPairs) {
    if (a.type == Dtype::bf16 && !a.widens) {
      [[maybe_unused]] const TileRegisters tiles;
      return score_gradient<BFloat16>(a, task, sums, scratch);
    }
  }
  score_gradient<float>(a, task, sums, scratch);
}

}  // namespace FK_ISA
}  // namespace foundry
