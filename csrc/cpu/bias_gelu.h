// An activation of x + bias on the CPU. The caller starts the threads; each call handles a range of tiles or of chunks
// of rows.
#pragma once

#include "../common/bias_gelu.h"
#include "isa.h"
#include "tiles.h"

namespace foundry {

struct BiasActForward : BiasActForwardCall {
  const float* bias;  // [n_cols], split for bfloat16 (see vec2.h), or null
};

struct BiasActBackward : BiasActBackwardCall {
  const float* bias;    // as in forward
  float* dbias_chunks;  // [chunks, n_cols] or null; a chunk's sum over its rows
  int64_t chunk_rows;
};

}  // namespace foundry

FK_DECLARE_PER_ISA(void, bias_act_forward, const BiasActForward& args, int64_t tile_begin, int64_t tile_end)
FK_DECLARE_PER_ISA(void, bias_act_backward, const BiasActBackward& args, int64_t chunk_begin, int64_t chunk_end)
