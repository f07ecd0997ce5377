// The options of decode_block as an object.
#pragma once

#include "options.h"

namespace foundry {

#define FK_BLOCK_OPTIONS(OPTION)                        \
  OPTION(double, eps, not_negative)                     \
  OPTION(double, weight_offset, number)                 \
  OPTION(bool, round_before_weight, boolean)            \
  OPTION(bool, interleaved, boolean)                    \
  OPTION(int64_t, n_heads, positive)                    \
  OPTION(c10::SymInt, start, count)                     \
  OPTION(double, scale, positive)                       \
  OPTION(OptionalInt, window_left, optional_count)      \
  OPTION(c10::string_view, activation, text)            \
  OPTION(OptionalTensor, block_table, optional_indices) \
  OPTION(OptionalTensor, lengths, optional_indices)

struct BlockOptions {
  FK_OPTIONS(FK_BLOCK_OPTIONS)
};

}  // namespace foundry
