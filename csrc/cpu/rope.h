// RoPE, with or without RMSNorm of each head, on the CPU over raw pointers. The caller starts the threads; each call
// handles a range of the B * T tokens (or of chunks of them) for all heads of q and k.
#pragma once

#include "../common/rope.h"
#include "isa.h"

namespace foundry {

struct QkNormRopeHeads : NormedHeads {
  const float* weight;  // [D], the offset added, or null
};

struct QkNormRopeForward : QkNormRopeCall<QkNormRopeHeads> {
  float eps;
};

struct QkNormRopeGradients : NormedGradients {
  const float* weight;  // as in forward
  float* dw_chunks;     // [chunks, D] or null; a chunk's sum over its heads and tokens
};

struct QkNormRopeBackward : QkNormRopeCall<QkNormRopeGradients> {
  int64_t chunk_tokens;
};

}  // namespace foundry

FK_DECLARE_PER_ISA(void, rope, const Rope& args, int64_t token_begin, int64_t token_end)
FK_DECLARE_PER_ISA(void, qk_norm_rope_forward, const QkNormRopeForward& args, int64_t token_begin, int64_t token_end)
FK_DECLARE_PER_ISA(void, qk_norm_rope_backward, const QkNormRopeBackward& args, int64_t chunk_begin, int64_t chunk_end)
