// Checks, outputs and kernel arguments that the CPU and CUDA launches share.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <tuple>

#include "../common/bias_gelu.h"
#include "common.h"
#include "dropout_options.h"

namespace foundry {

inline Activation plain_activation_of(c10::string_view name) {
  if (name == "gelu") return Activation::gelu;
  if (name == "gelu_tanh") return Activation::gelu_tanh;
  if (name == "silu") return Activation::silu;
  TORCH_CHECK_VALUE(name == "relu", "activation must be one of gelu, gelu_tanh, silu, relu; got ", name);
  return Activation::relu;
}

inline void check_bias_act(const Tensor& x, const OptionalTensor& bias, const DropoutOptions& dropout) {
  check_dropout(x, dropout);
  TORCH_CHECK_VALUE(x.dim() >= 1, "x must have at least one dimension; got a scalar");
  TORCH_CHECK_VALUE(!bias.has_value() || (bias->dim() == 1 && bias->sym_size(0) == x.sym_size(-1)),
                    "bias must have shape [", x.sym_size(-1), "], the width of x; got ", bias->sym_sizes());
}

// The outputs: contiguous, on x's device. The meta device uses them as fakes.
inline Tensor empty_bias_act_fwd(const Tensor& x, const OptionalTensor& bias, const DropoutOptions& dropout) {
  check_bias_act(x, bias, dropout);
  return at::empty_symint(x.sym_sizes(), x.options());
}

inline std::tuple<Tensor, Tensor> empty_bias_act_bwd(const Tensor& x, const OptionalTensor& bias, bool need_dx,
                                                     bool need_dbias, const DropoutOptions& dropout) {
  check_bias_act(x, bias, dropout);
  TORCH_CHECK_VALUE(!need_dbias || bias.has_value(), "there is no bias to give a gradient for");
  return {need_dx ? at::empty_symint(x.sym_sizes(), x.options()) : absent(x, x.scalar_type()),
          need_dbias ? at::empty_symint(bias->sym_sizes(), bias->options()) : absent(x, x.scalar_type())};
}

// Replaces `x` and `dy` by copies where strides cannot describe their rows.
inline void set_forward(BiasActForwardCall& args, Tensor& x, const Tensor& y, Activation activation,
                        const DropoutOptions& dropout) {
  std::array<RowStrides, 1> strides{};
  make_row_layout<1>({&x}, args.rows, strides);
  args.x = x.const_data_ptr();
  args.y = y.mutable_data_ptr();
  args.x_strides = strides[0];
  args.n_cols = x.size(-1);
  args.activation = activation;
  args.type = dtype_of(x);
  args.dropout = make_dropout(dropout);
}

inline void set_backward(BiasActBackwardCall& args, Tensor& dy, Tensor& x, const Tensor& dx, Activation activation,
                         const DropoutOptions& dropout) {
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
  args.dropout = make_dropout(dropout);
}

}  // namespace foundry
