// What the launches of csrc/torch are told of the GPU that they believe to be on.
#include <torch/library.h>

#include "../../../csrc/torch/cuda_common.h"

namespace {

void pretend_hopper(bool on) { foundry::OnDevice::pretends_hopper = on; }

}  // namespace

TORCH_LIBRARY_FRAGMENT(foundry_kernels_cuda_on_cpu, m) {
  m.def("pretend_hopper(bool on) -> ()");
  m.impl("pretend_hopper", c10::DispatchKey::CompositeExplicitAutograd, &pretend_hopper);
}
