// Gated linear units on the CPU. The caller starts the threads; each call handles a range of tiles.
#pragma once

#include "../common/swiglu.h"
#include "isa.h"
#include "tiles.h"

FK_DECLARE_PER_ISA(void, glu_forward, const GluForward& args, const GluOptions& options, int64_t tile_begin,
                   int64_t tile_end)
FK_DECLARE_PER_ISA(void, glu_backward, const GluBackward& args, const GluOptions& options, int64_t tile_begin,
                   int64_t tile_end)
