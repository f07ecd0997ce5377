// The options of attention as one object.
#pragma once

#include "options.h"

namespace foundry {

// The order is that of AttentionOptions in ops/flash_attention/options.py and, except for `causal`, of the public
// functions. To add an option, add a line here and use it in the kernels. `deterministic` has no effect on the CPU,
// where everything is deterministic.
#define FK_ATTENTION_OPTIONS(OPTION)                          \
  OPTION(OptionalTensor, cu_seqlens_q, not_an_argument)       \
  OPTION(OptionalTensor, cu_seqlens_k, not_an_argument)       \
  OPTION(c10::SymInt, max_seqlen_q, not_an_argument)          \
  OPTION(c10::SymInt, max_seqlen_k, not_an_argument)          \
  OPTION(OptionalTensor, block_table, not_an_argument)        \
  OPTION(OptionalTensor, seqused_k, not_an_argument)          \
  OPTION(OptionalTensor, leftpad_k, not_an_argument)          \
  OPTION(double, scale, optional_positive)                    \
  OPTION(OptionalInt, window_left, first_of_pair)             \
  OPTION(OptionalInt, window_right, second_of_pair)           \
  OPTION(std::optional<double>, softcap, optional_positive)   \
  OPTION(OptionalTensor, alibi_slopes, none)                  \
  OPTION(OptionalTensor, sinks, none)                         \
  OPTION(OptionalTensor, attn_mask, none)                     \
  OPTION(OptionalTensor, mask_tiles, not_an_argument)         \
  OPTION(OptionalTensor, mask_bits, not_an_argument)          \
  OPTION(std::optional<double>, dropout_p, zero)              \
  OPTION(OptionalTensor, dropout_seed, none)                  \
  OPTION(OptionalTensor, dropout_heads, not_an_argument)      \
  OPTION(std::vector<int64_t>, score_mod, none)               \
  OPTION(std::vector<Tensor>, score_tensors, not_an_argument) \
  OPTION(bool, bottom_right, alignment)                       \
  OPTION(bool, deterministic, boolean)                        \
  OPTION(bool, batch_invariant, boolean)

struct AttentionOptions {
  FK_OPTIONS(FK_ATTENTION_OPTIONS)

  bool packed() const { return cu_seqlens_q.has_value(); }  // cu_seqlens mark packed sequences
  bool paged() const { return block_table.has_value(); }    // k and v are then [pages, positions, Hk, D]
};

}  // namespace foundry
