// What the operator's schema and the CPU side share: checks and outputs.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <tuple>

#include "common.h"

namespace foundry {

inline void check_combine_experts(const Tensor& x, const OptionalTensor& weights, const Tensor& slots) {
  TORCH_CHECK_VALUE(x.dim() == 2, "x must be [M, D]; got shape ", x.sym_sizes());
  TORCH_CHECK_VALUE(slots.dim() == 2, "slots must be [T, k]; got shape ", slots.sym_sizes());
  TORCH_CHECK_VALUE(!weights.has_value() || weights->sym_sizes() == slots.sym_sizes(), "weights must have shape ",
                    slots.sym_sizes(), ", that of slots; got ", weights->sym_sizes());
}

// Outputs, on x's device, contiguous; they are also the fakes of the meta device.
inline Tensor empty_combine_experts_fwd(const Tensor& x, const OptionalTensor& weights, const Tensor& slots) {
  check_combine_experts(x, weights, slots);
  return at::empty_symint({slots.sym_size(0), x.sym_size(1)}, x.options());
}

inline std::tuple<Tensor, Tensor> empty_combine_experts_bwd(const Tensor& x, const OptionalTensor& weights,
                                                            const Tensor& slots, bool need_dx, bool need_dweights) {
  check_combine_experts(x, weights, slots);
  TORCH_CHECK_VALUE(!need_dweights || weights.has_value(), "there are no weights to give a gradient for");
  return {need_dx ? at::empty_symint(x.sym_sizes(), x.options()) : absent(x, x.scalar_type()),
          need_dweights ? at::empty_symint(weights->sym_sizes(), weights->options()) : absent(x, x.scalar_type())};
}

}  // namespace foundry
