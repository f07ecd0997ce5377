// The gated delta rule on the CPU. The caller provides threads and memory; each call handles one task with its
// thread's scratch.
#pragma once

#include "../common/gated_delta_rule.h"
#include "flash_attention.h"
#include "isa.h"

namespace foundry {

constexpr int64_t kDeltaRuleRows = 16;     // tokens of a tile are padded to a multiple of this
constexpr int64_t kDeltaRuleColumns = 64;  // a task has a multiple of these columns of the values, or all of them

// Sizes of the padded tiles of a chunk.
struct DeltaRuleSizes {
  int64_t rows, keys, values;
  bool channels;
  DeltaRuleSizes(const DeltaRuleInputs& in, int64_t n_columns)
      : rows(in.chunk),
        keys(round_up(in.key_width, kAttentionPad)),
        values(round_up(n_columns, kAttentionPad)),
        channels(in.g.channels) {}
  int64_t shared() const {
    return rows * (3 * keys + 2 * values + 4 * rows + 8) + (channels ? 11 * rows * keys + 2 * keys : 0);
  }
};

// Scratch of a task, in floats.
inline int64_t gated_delta_rule_forward_scratch(const DeltaRuleInputs& in, int64_t n_columns) {
  const DeltaRuleSizes s(in, n_columns);
  return s.shared() + s.rows * s.values + s.keys * s.values + s.values;
}
inline int64_t gated_delta_rule_backward_scratch(const DeltaRuleInputs& in) {
  const DeltaRuleSizes s(in, in.value_width);
  const int64_t of_channels =
      s.channels ? 6 * s.rows * s.keys + (2 * kDeltaRuleRows + s.rows / kDeltaRuleRows) * s.keys : 0;
  return s.shared() + s.rows * (3 * s.keys + 3 * s.values + 3 * s.rows + 8) + 3 * s.keys * s.values + s.values +
         of_channels;
}
inline int64_t gated_delta_rule_step_scratch(const DeltaRuleStep& in) {
  return 3 * round_up(in.key_width, kAttentionPad) + 2 * round_up(in.value_width, kDeltaRuleColumns);
}

}  // namespace foundry

FK_DECLARE_PER_ISA(void, gated_delta_rule_forward, const DeltaRuleForward& args, const DeltaRuleTask& task,
                   float* scratch)
FK_DECLARE_PER_ISA(void, gated_delta_rule_backward, const DeltaRuleBackward& args, const DeltaRuleTask& task,
                   float* scratch)
// Rows [begin, end) of [heads of q, tokens].
FK_DECLARE_PER_ISA(void, gated_delta_rule_sum_groups, const DeltaRuleGroups& args, int64_t begin, int64_t end)
// Heads [begin, end) of [batch, heads of v].
FK_DECLARE_PER_ISA(void, gated_delta_rule_step, const DeltaRuleStep& args, int64_t begin, int64_t end, float* scratch)
