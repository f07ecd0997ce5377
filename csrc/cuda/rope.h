// RoPE, alone or behind RMSNorm of each head, on a GPU over raw pointers and a stream. Each launcher returns the error
// of its launches. A token whose position has no row in the tables reads none and gets NaN.
#pragma once

#include <cuda_runtime_api.h>

#include "../common/rope.h"

namespace foundry {
namespace cuda {

struct QkNormRopeHeads : RopeHeads {
  const void* weight;  // [D] or null
  Dtype weight_type;
  float* rstd;  // [B, H, T] or null
};

struct QkNormRopeForward {
  QkNormRopeHeads heads[2];
  RopeTables tables;
  int64_t n_tokens, all_tokens, width;
  float eps, weight_offset;
  bool round_before_weight, interleaved;
  Dtype type;
};

struct QkNormRopeGradients {
  const void* dy;
  const void* x;
  const void* weight;  // [D] or null
  Dtype weight_type;
  const float* rstd;  // [B, H, T]
  void* dx;           // or null
  void* dw;           // [D] of weight_type, or null
  float* dw_partial;  // [n_blocks, D], or null where dw is
  int n_blocks;       // of qk_norm_rope_backward_blocks
  int64_t n_heads;    // 0 where neither dx nor dw is wanted
  HeadStrides dy_strides, x_strides, dx_strides;
};

struct QkNormRopeBackward {
  QkNormRopeGradients heads[2];
  RopeTables tables;
  int64_t n_tokens, all_tokens, width;
  float weight_offset;
  bool round_before_weight, interleaved;
  Dtype type;
};

cudaError_t rope(const Rope& args, cudaStream_t stream);
cudaError_t qk_norm_rope_forward(const QkNormRopeForward& args, cudaStream_t stream);
cudaError_t qk_norm_rope_backward(const QkNormRopeBackward& args, cudaStream_t stream);

// Blocks of the backward pass for so many heads of tokens, which stay and take one after another.
int qk_norm_rope_backward_blocks(int64_t n_rows, int multiprocessors);

}  // namespace cuda
}  // namespace foundry
