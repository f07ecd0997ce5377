// Cross-entropy on the CPU. The caller starts the threads and checks the targets; each call handles a range of rows.
#pragma once

#include "../common/cross_entropy.h"
#include "isa.h"

FK_DECLARE_PER_ISA(void, cross_entropy_forward, const CrossEntropyForward& args, int64_t begin, int64_t end)
FK_DECLARE_PER_ISA(void, cross_entropy_backward, const CrossEntropyBackward& args, int64_t begin, int64_t end)
