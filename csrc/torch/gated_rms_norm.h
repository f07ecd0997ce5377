// Shapes of the operators of gated_rms_norm.cpp and gated_rms_norm_cpu.cpp.
#pragma once

#include <tuple>

#include "common.h"

namespace foundry {

inline void check_gated_rms_norm(const Tensor& x, const Tensor& gate, const OptionalTensor& weight) {
  TORCH_CHECK_VALUE(x.dim() > 0 && gate.sym_sizes() == x.sym_sizes(), "gate must have x's shape; got ",
                    gate.sym_sizes());
  TORCH_CHECK_TYPE(gate.scalar_type() == x.scalar_type(), "gate must have x's dtype");
  TORCH_CHECK_VALUE(!weight.has_value() || (weight->dim() == 1 && weight->sym_size(0) == x.sym_size(-1)),
                    "weight must be [N]");
}

inline Tensor empty_contiguous(const Tensor& x, bool wanted) {
  return wanted ? at::empty_symint(x.sym_sizes(), x.options()) : absent(x, x.scalar_type());
}

inline std::tuple<Tensor, Tensor> empty_gated_rms_norm_fwd(const Tensor& x, const Tensor& gate,
                                                           const OptionalTensor& weight, bool save_rstd) {
  check_gated_rms_norm(x, gate, weight);
  const auto rows = x.sym_sizes().slice(0, x.dim() - 1);
  return {empty_contiguous(x, true),
          save_rstd ? at::empty_symint(rows, x.options().dtype(at::kFloat)) : absent(x, at::kFloat)};
}

inline std::tuple<Tensor, Tensor, Tensor> empty_gated_rms_norm_bwd(const Tensor& x, const Tensor& gate,
                                                                   const OptionalTensor& weight, bool need_dx,
                                                                   bool need_dgate, bool need_dw) {
  check_gated_rms_norm(x, gate, weight);
  TORCH_CHECK_VALUE(!need_dw || weight.has_value(), "there is no weight to give a gradient for");
  return {empty_contiguous(x, need_dx), empty_contiguous(x, need_dgate),
          need_dw ? at::empty_symint(weight->sym_sizes(), weight->options()) : absent(x, x.scalar_type())};
}

}  // namespace foundry
