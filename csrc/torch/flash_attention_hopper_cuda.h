// Attention of csrc/cuda/hopper on tensors: what its launches need beyond the arguments, and which calls use it.
#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <atomic>
#include <utility>
#include <vector>

#include "../cuda/hopper/attention.h"
#include "cuda_common.h"

namespace foundry {
namespace hopper_attention {

// How many passes these kernels have run in this process.
inline std::atomic<int64_t> forwards{0}, backwards{0};

using NamedTensors = std::vector<std::pair<const char*, Tensor>>;

#if defined(FK_HAVE_HOPPER)

// As check_cuda. If the driver rejects a tensor map, the message names the tensor.
inline void check_maps(cudaError_t error, const char* what, const NamedTensors& tensors) {
  if (error == cudaErrorInvalidValue)
    for (const auto& [name, t] : tensors) {
      if (t.const_data_ptr() != cuda::hopper::refused_map) continue;
      TORCH_CHECK(false, what, ": the driver rejected the tensor map of ", name, " of shape ", t.sizes(),
                  " and strides ", t.strides());
    }
  check_cuda(error, what);
}

// Runs the pass and returns true if these kernels support it.
inline bool forward(const cuda::AttentionForward& a, const OnDevice& device, const Tensor& q,
                    const NamedTensors& tensors) {
  if (!device.is_hopper() || !cuda::hopper::takes(a)) return false;
  const int multiprocessors = device.multiprocessors();
  const bool counts = cuda::hopper::forward_counts(a, multiprocessors);
  int* counter = counts ? device.counter() : nullptr;
  Tensor zero;
  if (counts && !counter) {
    zero = at::zeros({1}, q.options().dtype(at::kInt));
    counter = zero.mutable_data_ptr<int>();
  }
  cuda::hopper::refused_map = nullptr;
  check_maps(cuda::hopper::attention_forward(a, multiprocessors, counter, device.stream()), "attention forward",
             tensors);
  ++forwards;
  return true;
}

inline bool backward(const cuda::AttentionBackward& a, bool deterministic, const OnDevice& device, const Tensor& q,
                     const NamedTensors& tensors) {
  if (!device.is_hopper() || !cuda::hopper::takes(a)) return false;
  const cuda::hopper::BackwardPlan plan = cuda::hopper::plan_backward(a, deterministic);
  const cuda::hopper::BackwardSpace space = cuda::hopper::backward_space(a, plan);
  const Tensor floats = at::empty({space.floats}, q.options().dtype(at::kFloat));
  const Tensor integers = at::empty({space.integers}, q.options().dtype(at::kInt));
  cuda::hopper::refused_map = nullptr;
  cudaError_t error = cuda::hopper::attention_backward(a, plan, floats.mutable_data_ptr<float>(),
                                                       integers.mutable_data_ptr<int>(), device.stream());
  if (error == cudaSuccess && a.dsinks) error = cuda::attention_dsinks(a, device.stream());
  check_maps(error, "attention backward", tensors);
  ++backwards;
  return true;
}

#else

inline bool forward(const cuda::AttentionForward&, const OnDevice&, const Tensor&, const NamedTensors&) {
  return false;
}
inline bool backward(const cuda::AttentionBackward&, bool, const OnDevice&, const Tensor&, const NamedTensors&) {
  return false;
}

#endif

}  // namespace hopper_attention
}  // namespace foundry
