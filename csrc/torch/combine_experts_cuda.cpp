// The GPU launches of foundry_kernels::combine_experts_fwd and combine_experts_bwd; see combine_experts.cpp for the
// operators.
#include "../cuda/combine_experts.h"

#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "combine_experts.h"
#include "cuda_common.h"

namespace foundry {
namespace combine_experts_cuda {

Tensor float_weights(const OptionalTensor& weights) {
  return weights.has_value() ? weights->to(at::kFloat).contiguous() : Tensor();
}

Tensor fwd_cuda(const Tensor& x_, const OptionalTensor& weights_, const Tensor& slots_) {
  const Tensor y = empty_combine_experts_fwd(x_, weights_, slots_);
  if (y.numel() == 0) return y;
  const OnDevice device(x_);
  const Tensor x = with_rows(x_), slots = slots_.to(at::kLong).contiguous(), weights = float_weights(weights_);
  const CombineExpertsForward args = combine_experts_forward_args(x, weights, slots, y);
  check_cuda(cuda::combine_experts_forward(args, device.stream()), "combine_experts forward");
  return y;
}

std::tuple<Tensor, Tensor> bwd_cuda(const Tensor& dy_, const Tensor& x_, const OptionalTensor& weights_,
                                    const Tensor& slots_, bool need_dx, bool need_dweights) {
  auto [dx, dweights] = empty_combine_experts_bwd(x_, weights_, slots_, need_dx, need_dweights);
  const OnDevice device(x_);
  if (x_.numel() == 0 || slots_.numel() == 0) return {dx.zero_(), dweights.zero_()};
  if (!need_dx && !need_dweights) return {dx, dweights};
  const Tensor dy = with_rows(dy_), x = with_rows(x_), slots = slots_.to(at::kLong).contiguous();
  const Tensor weights = float_weights(weights_);
  const bool in_float = !need_dweights || dweights.scalar_type() == at::kFloat;
  const Tensor sums = in_float ? dweights : at::empty(dweights.sizes(), dweights.options().dtype(at::kFloat));
  const Tensor named = need_dx ? at::zeros({x.size(0)}, x.options().dtype(at::kByte)) : Tensor();
  const CombineExpertsBackward args = combine_experts_backward_args(dy, x, weights, slots, dx, sums);
  uint8_t* of_rows = need_dx ? named.mutable_data_ptr<uint8_t>() : nullptr;
  check_cuda(cuda::combine_experts_backward(args, of_rows, device.stream()), "combine_experts backward");
  if (!in_float) dweights.copy_(sums);
  return {dx, dweights};
}

}  // namespace combine_experts_cuda

TORCH_LIBRARY_IMPL(FK_LIBRARY, FK_CUDA_KEY, m) {
  m.impl("combine_experts_fwd", &combine_experts_cuda::fwd_cuda);
  m.impl("combine_experts_bwd", &combine_experts_cuda::bwd_cuda);
}

}  // namespace foundry
