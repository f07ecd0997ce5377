// Checks, outputs and kernel arguments that the schema and the CPU and CUDA launches share.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <tuple>

#include "../common/combine_experts.h"
#include "common.h"

namespace foundry {

inline void check_combine_experts(const Tensor& x, const OptionalTensor& weights, const Tensor& slots) {
  TORCH_CHECK_VALUE(x.dim() == 2, "x must be [M, D]; got shape ", x.sym_sizes());
  TORCH_CHECK_VALUE(slots.dim() == 2, "slots must be [T, k]; got shape ", slots.sym_sizes());
  TORCH_CHECK_VALUE(!weights.has_value() || weights->sym_sizes() == slots.sym_sizes(), "weights must have shape ",
                    slots.sym_sizes(), ", that of slots; got ", weights->sym_sizes());
}

// The outputs: contiguous, on x's device. The meta device uses them as fakes.
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

// x, or a copy of it, with contiguous rows.
inline Tensor with_rows(const Tensor& x) { return x.size(1) <= 1 || x.stride(1) == 1 ? x : x.contiguous(); }

// `x` has contiguous rows. `weights` is contiguous and float, or undefined. `slots` is contiguous and int64.
inline CombineExpertsForward combine_experts_forward_args(const Tensor& x, const Tensor& weights, const Tensor& slots,
                                                          const Tensor& y) {
  CombineExpertsForward args{};
  args.x = x.const_data_ptr();
  args.weights = weights.defined() ? weights.const_data_ptr<float>() : nullptr;
  args.slots = slots.const_data_ptr<int64_t>();
  args.y = y.mutable_data_ptr();
  args.x_stride = x.stride(0);
  args.n_rows = x.size(0);
  args.n_tokens = slots.size(0);
  args.n_cols = x.size(1);
  args.k = slots.size(1);
  args.type = dtype_of(x);
  return args;
}

// dy and x both have contiguous rows. An empty gradient is not computed. dweights is float.
inline CombineExpertsBackward combine_experts_backward_args(const Tensor& dy, const Tensor& x, const Tensor& weights,
                                                            const Tensor& slots, const Tensor& dx,
                                                            const Tensor& dweights) {
  CombineExpertsBackward args{};
  args.dy = dy.const_data_ptr();
  args.x = x.const_data_ptr();
  args.weights = weights.defined() ? weights.const_data_ptr<float>() : nullptr;
  args.slots = slots.const_data_ptr<int64_t>();
  args.dx = dx.numel() ? dx.mutable_data_ptr() : nullptr;
  args.dweights = dweights.numel() ? dweights.mutable_data_ptr<float>() : nullptr;
  args.dy_stride = dy.stride(0);
  args.x_stride = x.stride(0);
  args.n_rows = x.size(0);
  args.n_tokens = slots.size(0);
  args.n_cols = x.size(1);
  args.k = slots.size(1);
  args.type = dtype_of(x);
  return args;
}

}  // namespace foundry
