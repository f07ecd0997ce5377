// The GPU launches of foundry_kernels::glu_fwd and glu_bwd; see swiglu.cpp for the operators.
#include "../cuda/swiglu.h"

#include <torch/library.h>

#include "cuda_common.h"
#include "swiglu.h"

namespace foundry {
namespace swiglu_cuda {

Tensor fwd_cuda(const Tensor& gate_, const OptionalTensor& up_, c10::string_view activation,
                const GatedOptions& given) {
  const Activation kind = activation_of(activation);
  const GluOptions options = glu_options(given, up_, kind);
  const Tensor y = empty_glu_fwd(gate_, up_, given);
  if (y.numel() == 0) return y;
  const OnDevice device(gate_);
  auto [gate, up] = glu_halves(gate_, up_, given.interleaved);
  const GluForward args = glu_forward_args(gate, up, y, kind, given);
  check_cuda(cuda::glu_forward(args, options, device.stream()), "gated linear unit forward");
  return y;
}

std::tuple<Tensor, Tensor> bwd_cuda(const Tensor& dy_, const Tensor& gate_, const OptionalTensor& up_,
                                    c10::string_view activation, bool need_dgate, bool need_dup,
                                    const GatedOptions& given) {
  const Activation kind = activation_of(activation);
  const GluOptions options = glu_options(given, up_, kind);
  const auto [dgate, dup] = empty_glu_bwd(gate_, up_, need_dgate, need_dup, given);
  if (dgate.numel() == 0 && dup.numel() == 0) return {dgate, dup};
  const OnDevice device(gate_);
  Tensor dy = dy_;
  auto [gate, up] = glu_halves(gate_, up_, given.interleaved);
  const auto [into_gate, into_up] =
      glu_halves(dgate, up_.has_value() ? OptionalTensor(dup) : std::nullopt, given.interleaved);
  const GluBackward args = glu_backward_args(dy, gate, up, into_gate, into_up, kind, !up_.has_value(), given);
  check_cuda(cuda::glu_backward(args, options, device.stream()), "gated linear unit backward");
  return {dgate, dup};
}

}  // namespace swiglu_cuda

TORCH_LIBRARY_IMPL(FK_LIBRARY, FK_CUDA_KEY, m) {
  m.impl("glu_fwd", flat_kernel<&swiglu_cuda::fwd_cuda>);
  m.impl("glu_bwd", flat_kernel<&swiglu_cuda::bwd_cuda>);
}

}  // namespace foundry
