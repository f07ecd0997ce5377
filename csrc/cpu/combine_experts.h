// Weighted sums of rows on the CPU. The caller starts the threads; each call handles a range of tokens or slots.
#pragma once

#include "../common/combine_experts.h"
#include "isa.h"

FK_DECLARE_PER_ISA(void, combine_experts_forward, const CombineExpertsForward& args, int64_t token_begin,
                   int64_t token_end)
FK_DECLARE_PER_ISA(void, combine_experts_backward, const CombineExpertsBackward& args, int64_t slot_begin,
                   int64_t slot_end)
