// Log-probabilities on the CPU. The caller starts the threads and checks the targets; each call handles a range of
// rows.
#pragma once

#include "../common/log_probs.h"
#include "isa.h"

FK_DECLARE_PER_ISA(void, log_probs_forward, const LogProbsForward& args, int64_t begin, int64_t end)
FK_DECLARE_PER_ISA(void, log_probs_backward, const LogProbsBackward& args, int64_t begin, int64_t end)
