// Attention on compute capability 9.0, by its matrix units (wgmma) and its copies (TMA): what it takes, and its
// launches.
#pragma once

#include "../flash_attention.h"

namespace foundry {
namespace cuda {
namespace hopper {

// Whether these kernels take the call; what they do not take goes to those of flash_attention_*.cu. By the call alone:
// under batch_invariant by nothing that other sequences of the batch change.
bool takes(const AttentionForward& a);
bool takes(const AttentionBackward& a);

// Where a launch of this thread returned cudaErrorInvalidValue: the data of the tensor whose map the driver refused, or
// null.
inline thread_local const void* refused_map = nullptr;

// Integers that a forward pass needs, zeros: 0 or 1.
int64_t forward_counters(const AttentionForward& a, int multiprocessors);
cudaError_t attention_forward(const AttentionForward& a, int multiprocessors, int* counters, cudaStream_t stream);

// What a backward pass needs beside its results: floats, of any values, and integers, zeros.
struct BackwardSpace {
  int64_t floats, integers;
};
BackwardSpace backward_space(const AttentionBackward& a, bool deterministic);
// dq, dk and dv, all of them; not dsinks, which attention_dsinks makes from a.delta.
cudaError_t attention_backward(const AttentionBackward& a, bool deterministic, int multiprocessors, float* floats,
                               int* integers, cudaStream_t stream);

}  // namespace hopper
}  // namespace cuda
}  // namespace foundry
