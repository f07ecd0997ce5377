// Shapes and checks of the operators of short_conv1d.cpp and short_conv1d_cpu.cpp.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <tuple>

#include "common.h"

namespace foundry {

inline bool is_silu(c10::string_view activation) {
  TORCH_CHECK_VALUE(activation == "none" || activation == "silu", "activation must be one of none, silu; got ",
                    activation);
  return activation == "silu";
}

inline void check_conv_filter(const Tensor& weight, const OptionalTensor& bias, const c10::SymInt& channels) {
  TORCH_CHECK_VALUE(
      weight.dim() == 2 && weight.sym_size(0) == channels && weight.sym_size(1) >= 1 && weight.sym_size(1) <= 8,
      "weight must be [C, W] with x's ", channels, " channels and W in 1 .. 8; got ", weight.sym_sizes());
  TORCH_CHECK_VALUE(!bias.has_value() || (bias->dim() == 1 && bias->sym_size(0) == channels), "bias must be [",
                    channels, "], x's channels; got ", bias->sym_sizes());
}

// Checks the shapes of a call; returns the number of documents.
inline c10::SymInt check_short_conv1d(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                                      const OptionalTensor& cu_seqlens, const OptionalTensor& initial_state) {
  TORCH_CHECK_VALUE(x.dim() == 3, "x must be [B, T, C]; got ", x.sym_sizes());
  check_conv_filter(weight, bias, x.sym_size(2));
  if (cu_seqlens.has_value())
    TORCH_CHECK_VALUE(cu_seqlens->dim() == 1 && cu_seqlens->sym_size(0) >= 1 && x.sym_size(0) == 1,
                      "cu_seqlens must be [N + 1] and x [1, T, C]; got ", cu_seqlens->sym_sizes(), " and ",
                      x.sym_sizes());
  const c10::SymInt documents = cu_seqlens.has_value() ? cu_seqlens->sym_size(0) - 1 : x.sym_size(0);
  if (initial_state.has_value()) {
    const Tensor& state = *initial_state;
    TORCH_CHECK_VALUE(state.dim() == 3 && state.sym_size(0) == documents && state.sym_size(1) == x.sym_size(2) &&
                          state.sym_size(2) == weight.sym_size(1) - 1 && state.scalar_type() == x.scalar_type(),
                      "initial_state must be [", documents, ", C, W - 1] of x's dtype; got ", state.sym_sizes());
  }
  return documents;
}

inline void check_conv_residual(const Tensor& x, const OptionalTensor& residual) {
  TORCH_CHECK_VALUE(
      !residual.has_value() || (residual->sym_sizes() == x.sym_sizes() && residual->scalar_type() == x.scalar_type()),
      "residual must have x's shape and dtype; got ", residual->sym_sizes());
}

// The outputs (y, final_state); the state has shape [0] unless requested.
inline std::tuple<Tensor, Tensor> empty_short_conv1d_fwd(const Tensor& x, const Tensor& weight,
                                                         const OptionalTensor& bias, const OptionalTensor& cu_seqlens,
                                                         const OptionalTensor& initial_state,
                                                         const OptionalTensor& residual, bool need_state) {
  const c10::SymInt documents = check_short_conv1d(x, weight, bias, cu_seqlens, initial_state);
  check_conv_residual(x, residual);
  return {at::empty_symint(x.sym_sizes(), x.options()),
          need_state ? at::empty_symint({documents, x.sym_size(2), weight.sym_size(1) - 1}, x.options())
                     : absent(x, x.scalar_type())};
}

// The gradients (dx, dweight, dbias, dinitial_state); those that are not requested have shape [0].
inline std::tuple<Tensor, Tensor, Tensor, Tensor> empty_short_conv1d_bwd(
    const Tensor& x, const Tensor& weight, const OptionalTensor& bias, const OptionalTensor& cu_seqlens,
    const OptionalTensor& initial_state, bool need_dx, bool need_dweight, bool need_dbias, bool need_dinitial_state) {
  check_short_conv1d(x, weight, bias, cu_seqlens, initial_state);
  TORCH_CHECK_VALUE(!need_dbias || bias.has_value(), "there is no bias to give a gradient for");
  TORCH_CHECK_VALUE(!need_dinitial_state || initial_state.has_value(), "there is no state to give a gradient for");
  const auto like = [&](bool needed, const Tensor& t) {
    return needed ? at::empty_symint(t.sym_sizes(), t.options()) : absent(x, x.scalar_type());
  };
  return {like(need_dx, x), like(need_dweight, weight), like(need_dbias, unwrap(bias)),
          like(need_dinitial_state, unwrap(initial_state))};
}

}  // namespace foundry
