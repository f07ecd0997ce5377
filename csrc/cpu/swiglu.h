// Gated linear units on the CPU. The caller starts the threads: each call does a range of tiles.
#pragma once

#include "../common/swiglu.h"
#include "isa.h"

namespace foundry {

// Rows are cut into tiles of this many columns (the last one may be shorter), numbered through all rows.
constexpr int64_t kGluTile = 8192;
inline int64_t glu_tiles_a_row(int64_t n_cols) { return (n_cols + kGluTile - 1) / kGluTile; }

}  // namespace foundry

FK_DECLARE_PER_ISA(void, glu_forward, const GluForward& args, int64_t tile_begin, int64_t tile_end)
FK_DECLARE_PER_ISA(void, glu_backward, const GluBackward& args, int64_t tile_begin, int64_t tile_end)
