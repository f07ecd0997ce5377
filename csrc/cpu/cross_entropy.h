// Cross-entropy on the CPU. Threads are the caller's: each call does a range of rows, whose targets the caller has
// checked.
#pragma once

#include "../common/cross_entropy.h"
#include "isa.h"

FK_DECLARE_PER_ISA(void, cross_entropy_forward, const CrossEntropyForward& args, int64_t begin, int64_t end)
FK_DECLARE_PER_ISA(void, cross_entropy_backward, const CrossEntropyBackward& args, int64_t begin, int64_t end)
