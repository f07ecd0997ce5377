// What the CPU and CUDA sides of the operator share: shapes, checks and outputs.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <tuple>

#include "common.h"

namespace foundry {

inline at::ScalarType y_dtype(const Tensor& x, const Tensor& weight, bool round_before_weight) {
  return round_before_weight && weight.defined() ? c10::promoteTypes(x.scalar_type(), weight.scalar_type())
                                                 : x.scalar_type();
}

inline void check_rms_norm(const Tensor& x, const Tensor& residual, const Tensor& weight) {
  TORCH_CHECK_VALUE(x.dim() >= 1 && x.sym_size(-1) > 0, "x must have a last dimension of at least 1");
  TORCH_CHECK_VALUE(!weight.defined() || (weight.dim() == 1 && weight.sym_size(0) == x.sym_size(-1)),
                    "weight must have shape [", x.sym_size(-1), "], the width of x; got ", weight.sym_sizes());
  TORCH_CHECK_VALUE(!residual.defined() || residual.sym_sizes() == x.sym_sizes(), "residual must have x's shape");
  TORCH_CHECK_TYPE(!residual.defined() || residual.scalar_type() == x.scalar_type(), "residual must have x's dtype");
}

// Outputs of the forward pass, on x's device, contiguous; they also serve as the fakes of the meta device.
inline std::tuple<Tensor, Tensor, Tensor> empty_fwd(const Tensor& x, const Tensor& residual, const Tensor& weight,
                                                    bool round_before_weight, bool save_rstd) {
  check_rms_norm(x, residual, weight);
  const auto options = x.options();
  const auto shape = x.sym_sizes();
  Tensor y = at::empty_symint(shape, options.dtype(y_dtype(x, weight, round_before_weight)));
  Tensor h = residual.defined() ? at::empty_symint(shape, options) : at::empty({0}, options);
  Tensor rstd = save_rstd ? at::empty_symint(shape.slice(0, shape.size() - 1), options.dtype(at::kFloat))
                          : at::empty({0}, options.dtype(at::kFloat));
  return {y, h, rstd};
}

inline std::tuple<Tensor, Tensor> empty_bwd(const Tensor& x, const Tensor& weight, bool need_dx, bool need_dw) {
  TORCH_CHECK_VALUE(!need_dw || weight.defined(), "there is no weight to give a gradient for");
  Tensor dx = need_dx ? at::empty_symint(x.sym_sizes(), x.options()) : at::empty({0}, x.options());
  Tensor dw = need_dw ? at::empty_symint(weight.sym_sizes(), weight.options()) : at::empty({0}, x.options());
  return {dx, dw};
}

}  // namespace foundry
