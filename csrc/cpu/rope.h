// RoPE, alone or behind RMSNorm of each head, on the CPU over raw pointers. Threads are the caller's: each call does a
// range of the B * T tokens (or of chunks of them), all heads of q and of k together.
#pragma once

#include "../common/rope.h"
#include "isa.h"

namespace foundry {

struct QkNormRopeHeads : RopeHeads {
  const float* weight;  // [D], the offset added, or null
  float* rstd;          // [B, H, T] or null
};

struct QkNormRopeForward {
  QkNormRopeHeads heads[2];
  RopeTables tables;
  int64_t n_tokens, all_tokens, width;
  float eps;
  bool round_before_weight, interleaved;
  Dtype type;
};

struct QkNormRopeGradients {
  const void* dy;
  const void* x;
  const float* weight;  // as in forward
  const float* rstd;    // [B, H, T]
  void* dx;             // or null
  float* dw_chunks;     // [chunks, D] or null; a chunk's sum over its heads and tokens
  int64_t n_heads;
  HeadStrides dy_strides, x_strides, dx_strides;
};

struct QkNormRopeBackward {
  QkNormRopeGradients heads[2];
  RopeTables tables;
  int64_t n_tokens, all_tokens, width;
  int64_t chunk_tokens;
  bool round_before_weight, interleaved;
  Dtype type;
};

}  // namespace foundry

FK_DECLARE_PER_ISA(void, rope, const Rope& args, int64_t token_begin, int64_t token_end)
FK_DECLARE_PER_ISA(void, qk_norm_rope_forward, const QkNormRopeForward& args, int64_t token_begin, int64_t token_end)
FK_DECLARE_PER_ISA(void, qk_norm_rope_backward, const QkNormRopeBackward& args, int64_t chunk_begin, int64_t chunk_end)
