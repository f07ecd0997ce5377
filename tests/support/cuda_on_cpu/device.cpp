// What the launches of csrc/torch are told of the GPU that they believe to be on.
#include <torch/library.h>

#include <utility>

#include "../../../csrc/cuda/hopper/tensor_map.cuh"
#include "../../../csrc/torch/cuda_common.h"

namespace {

// Returns what it was before.
bool pretend_hopper(bool on) { return std::exchange(foundry::OnDevice::pretends_hopper, on); }
void refuse_map_of(const at::Tensor& t) {
  foundry::cuda::hopper::refused_data = t.numel() ? t.const_data_ptr() : nullptr;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(foundry_kernels_cuda_on_cpu, m) {
  m.def("refuse_map_of(Tensor t) -> ()");
  m.impl("refuse_map_of", c10::DispatchKey::CompositeExplicitAutograd, &refuse_map_of);
  m.def("pretend_hopper(bool on) -> bool");
  m.impl("pretend_hopper", c10::DispatchKey::CompositeExplicitAutograd, &pretend_hopper);
}
