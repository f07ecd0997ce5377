// What the CPU and CUDA sides of the operator share: checks, outputs, and what the kernels are given.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <tuple>

#include "../common/bias_gelu.h"
#include "common.h"

namespace foundry {

inline Activation gelu_of(c10::string_view approximate) {
  TORCH_CHECK_VALUE(approximate == "none" || approximate == "tanh", "approximate must be one of none, tanh; got ",
                    approximate);
  return approximate == "none" ? Activation::gelu : Activation::gelu_tanh;
}

inline void check_bias_gelu(const Tensor& x, const OptionalTensor& bias) {
  TORCH_CHECK_VALUE(x.dim() >= 1, "x must have at least one dimension; got a scalar");
  TORCH_CHECK_VALUE(!bias.has_value() || (bias->dim() == 1 && bias->sym_size(0) == x.sym_size(-1)),
                    "bias must have shape [", x.sym_size(-1), "], the width of x; got ", bias->sym_sizes());
}

// Outputs, on x's device, contiguous; they are also the fakes of the meta device.
inline Tensor empty_bias_gelu_fwd(const Tensor& x, const OptionalTensor& bias) {
  check_bias_gelu(x, bias);
  return at::empty_symint(x.sym_sizes(), x.options());
}

inline std::tuple<Tensor, Tensor> empty_bias_gelu_bwd(const Tensor& x, const OptionalTensor& bias, bool need_dx,
                                                      bool need_dbias) {
  check_bias_gelu(x, bias);
  TORCH_CHECK_VALUE(!need_dbias || bias.has_value(), "there is no bias to give a gradient for");
  return {need_dx ? at::empty_symint(x.sym_sizes(), x.options()) : absent(x, x.scalar_type()),
          need_dbias ? at::empty_symint(bias->sym_sizes(), bias->options()) : absent(x, x.scalar_type())};
}

// `x` and `dy` are replaced by copies where strides do not reach their rows.
inline void set_forward(BiasGeluForwardCall& args, Tensor& x, const Tensor& y, Activation activation) {
  std::array<RowStrides, 1> strides{};
  make_row_layout<1>({&x}, args.rows, strides);
  args.x = x.const_data_ptr();
  args.y = y.mutable_data_ptr();
  args.x_strides = strides[0];
  args.n_cols = x.size(-1);
  args.activation = activation;
  args.type = dtype_of(x);
}

inline void set_backward(BiasGeluBackwardCall& args, Tensor& dy, Tensor& x, const Tensor& dx, Activation activation) {
  std::array<RowStrides, 2> strides{};
  make_row_layout<2>({&dy, &x}, args.rows, strides);
  args.dy = dy.const_data_ptr();
  args.x = x.const_data_ptr();
  args.dx = dx.numel() ? dx.mutable_data_ptr() : nullptr;
  args.dy_strides = strides[0];
  args.x_strides = strides[1];
  args.n_cols = x.size(-1);
  args.activation = activation;
  args.type = dtype_of(x);
}

}  // namespace foundry
