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

// Whether a forward pass needs a counter: an integer that is zero before it, and after it again.
bool forward_counts(const AttentionForward& a, int multiprocessors);
cudaError_t attention_forward(const AttentionForward& a, int multiprocessors, int* counter, cudaStream_t stream);

// How a backward pass is split into blocks: backward_order.cuh.
struct BackwardPlan {
  bool in_order;    // dq is summed in a fixed order
  bool pairs;       // a block takes two tiles of keys
  int head_splits;  // parts of a group's heads
  int row_splits;   // parts of a head's tiles of queries
  int64_t blocks;

  int splits() const { return head_splits * row_splits; }
};
BackwardPlan plan_backward(const AttentionBackward& a, bool deterministic);
// Uninitialised scratch of a backward pass besides its results.
struct BackwardSpace {
  int64_t floats, integers;
};
BackwardSpace backward_space(const AttentionBackward& a, const BackwardPlan& plan);
// Computes all of dq, dk and dv. attention_dsinks computes dsinks from a.delta.
cudaError_t attention_backward(const AttentionBackward& a, const BackwardPlan& plan, float* floats, int* integers,
                               cudaStream_t stream);

}  // namespace hopper
}  // namespace cuda
}  // namespace foundry
