// A step of state-space duality on the CPU. The caller provides threads and memory.
#pragma once

#include "../common/ssd.h"
#include "flash_attention.h"
#include "isa.h"

namespace foundry {

// In floats.
inline int64_t ssd_step_scratch(const SsdStep& a) {
  return 4 * round_up(a.width, kAttentionPad) + 2 * round_up(a.state_width, kAttentionPad);
}

}  // namespace foundry

// Heads [begin, end) of [batch, heads].
FK_DECLARE_PER_ISA(void, ssd_step, const SsdStep& args, int64_t begin, int64_t end, float* scratch)
