// Shapes and checks of the operator of ssd.cpp and ssd_cpu.cpp.
#pragma once

#include "common.h"

namespace foundry {

// state [B, H, P, N], x [B, H, P], dt [B, H], B and C [B, G, N].
inline void check_ssd_step(const Tensor& state, const Tensor& x, const Tensor& dt, const Tensor& A, const Tensor& B,
                           const Tensor& C, const OptionalTensor& D, const OptionalTensor& z,
                           const OptionalTensor& dt_bias) {
  TORCH_CHECK_VALUE(x.dim() == 3 && B.dim() == 3 && C.sym_sizes() == B.sym_sizes(),
                    "x must be [B, H, P], and B and C [B, G, N]");
  TORCH_CHECK_TYPE(B.scalar_type() == x.scalar_type() && C.scalar_type() == x.scalar_type() &&
                       (!z.has_value() || z->scalar_type() == x.scalar_type()),
                   "B, C and z must have x's dtype");
  const auto sizes = x.sym_sizes();
  const c10::SymInt heads = sizes[1], groups = B.sym_size(1);
  TORCH_CHECK_VALUE(B.sym_size(0) == sizes[0] && groups > 0 && heads % groups == 0 && sizes[2] > 0 && B.sym_size(2) > 0,
                    "x must have B's batch and a multiple of its groups; got ", sizes);
  TORCH_CHECK_VALUE(dt.sym_sizes() == sizes.slice(0, 2), "dt must be [B, H]; got ", dt.sym_sizes());
  for (const OptionalTensor& each : {OptionalTensor(A), dt_bias})
    TORCH_CHECK_VALUE(!each.has_value() || (each->dim() == 1 && each->sym_size(0) == heads),
                      "A and dt_bias must be [H]");
  TORCH_CHECK_VALUE(!D.has_value() || (D->dim() == 1 && D->sym_size(0) == heads) || D->sym_sizes() == sizes.slice(1),
                    "D must be [H] or [H, P]");
  TORCH_CHECK_VALUE(!z.has_value() || z->sym_sizes() == sizes, "z must have x's shape");
  TORCH_CHECK_TYPE(state.scalar_type() == at::kFloat, "state must be float32");
  TORCH_CHECK_VALUE(state.dim() == 4 && state.sym_sizes().slice(0, 3) == sizes && state.sym_size(3) == B.sym_size(2),
                    "state must be [B, H, P, N]; got ", state.sym_sizes());
}

}  // namespace foundry
