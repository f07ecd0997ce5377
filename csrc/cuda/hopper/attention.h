// Attention on compute capability 9.0 with wgmma and TMA: which calls it supports, and its launches.
#pragma once

#include "../flash_attention.h"

namespace foundry {
namespace cuda {
namespace hopper {

// Whether these kernels support the call; flash_attention_*.cu handle the others. Depends only on the call and, for
// batch-invariant calls, not on other sequences of the batch.
bool takes(const AttentionForward& a);
bool takes(const AttentionBackward& a);

// If a launch of this thread returned cudaErrorInvalidValue: the data of the tensor whose map the driver rejected, or
// null.
inline thread_local const void* refused_map = nullptr;

// How many integers, initially zero, a forward pass needs: 0 or 1.
int64_t forward_counters(const AttentionForward& a, int multiprocessors);
cudaError_t attention_forward(const AttentionForward& a, int multiprocessors, int* counters, cudaStream_t stream);

// Scratch of a backward pass besides its results: uninitialised floats, and integers that are zero.
struct BackwardSpace {
  int64_t floats, integers;
};
BackwardSpace backward_space(const AttentionBackward& a, bool deterministic);
// Computes all of dq, dk and dv. attention_dsinks computes dsinks from a.delta.
cudaError_t attention_backward(const AttentionBackward& a, bool deterministic, int multiprocessors, float* floats,
                               int* integers, cudaStream_t stream);

}  // namespace hopper
}  // namespace cuda
}  // namespace foundry
