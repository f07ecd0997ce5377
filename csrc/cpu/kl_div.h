// Divergences of two distributions on the CPU. The caller starts the threads; each call handles a range of rows.
#pragma once

#include "../common/kl_div.h"
#include "isa.h"

FK_DECLARE_PER_ISA(void, kl_div_rows, const KlDivRows& args, int64_t begin, int64_t end)
