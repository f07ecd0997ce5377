// Shapes, checks, outputs and kernel arguments that the CPU and CUDA launches of rms_norm and layer_norm share.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <tuple>

#include "../common/rms_norm.h"
#include "common.h"
#include "rms_norm_options.h"

namespace foundry {

inline at::ScalarType y_dtype(const Tensor& x, const Tensor& weight, bool round_before_weight) {
  return round_before_weight && weight.defined() ? c10::promoteTypes(x.scalar_type(), weight.scalar_type())
                                                 : x.scalar_type();
}

inline void check_vector(const char* name, const Tensor& vector, const Tensor& x) {
  TORCH_CHECK_VALUE(!vector.defined() || (vector.dim() == 1 && vector.sym_size(0) == x.sym_size(-1)), name,
                    " must have shape [", x.sym_size(-1), "], the width of x; got ", vector.sym_sizes());
}

inline void check_rms_norm(const Tensor& x, const Tensor& residual, const Tensor& weight) {
  TORCH_CHECK_VALUE(x.dim() >= 1 && x.sym_size(-1) > 0, "x must have a last dimension of at least 1");
  check_vector("weight", weight, x);
  TORCH_CHECK_VALUE(!residual.defined() || residual.sym_sizes() == x.sym_sizes(), "residual must have x's shape");
  TORCH_CHECK_TYPE(!residual.defined() || residual.scalar_type() == x.scalar_type(), "residual must have x's dtype");
}

// The outputs of forward: contiguous, on x's device. The meta device uses them as fakes.
inline std::tuple<Tensor, Tensor, Tensor> empty_fwd(const Tensor& x, const Tensor& residual, const Tensor& weight,
                                                    bool round_before_weight, bool save_rstd) {
  check_rms_norm(x, residual, weight);
  const auto options = x.options();
  const auto shape = x.sym_sizes();
  Tensor y = at::empty_symint(shape, options.dtype(y_dtype(x, weight, round_before_weight)));
  Tensor h = residual.defined() ? at::empty_symint(shape, options) : absent(x, x.scalar_type());
  Tensor rstd =
      save_rstd ? at::empty_symint(shape.slice(0, shape.size() - 1), options.dtype(at::kFloat)) : absent(x, at::kFloat);
  return {y, h, rstd};
}

inline std::tuple<Tensor, Tensor> empty_bwd(const Tensor& x, const Tensor& weight, bool need_dx, bool need_dw) {
  TORCH_CHECK_VALUE(!need_dw || weight.defined(), "there is no weight to give a gradient for");
  Tensor dx = need_dx ? at::empty_symint(x.sym_sizes(), x.options()) : absent(x, x.scalar_type());
  Tensor dw = need_dw ? at::empty_symint(weight.sym_sizes(), weight.options()) : absent(x, x.scalar_type());
  return {dx, dw};
}

// Same for layer_norm: (y, h, mean, rstd) and (dx, dw, db).
inline std::tuple<Tensor, Tensor, Tensor, Tensor> empty_layer_fwd(const Tensor& x, const Tensor& residual,
                                                                  const Tensor& weight, const Tensor& bias,
                                                                  bool save_stats) {
  check_vector("bias", bias, x);
  auto [y, h, rstd] = empty_fwd(x, residual, weight, /*round_before_weight=*/false, save_stats);
  Tensor mean = save_stats ? at::empty_symint(rstd.sym_sizes(), rstd.options()) : absent(x, at::kFloat);
  return {y, h, mean, rstd};
}

inline std::tuple<Tensor, Tensor, Tensor> empty_layer_bwd(const Tensor& x, const Tensor& weight, const Tensor& bias,
                                                          bool need_dx, bool need_dw, bool need_db) {
  TORCH_CHECK_VALUE(!need_db || bias.defined(), "there is no bias to give a gradient for");
  auto [dx, dw] = empty_bwd(x, weight, need_dx, need_dw);
  Tensor db = need_db ? at::empty_symint(bias.sym_sizes(), bias.options()) : absent(x, x.scalar_type());
  return {dx, dw, db};
}

inline void check_dropout(const Tensor& x, const Tensor& residual, const DropoutOptions& dropout) {
  check_dropout(x, dropout);
  TORCH_CHECK_VALUE(!dropout.dropout_seed.has_value() || residual.defined(),
                    "dropout is of what is added to a residual, and there is none");
}

// The gradients of both terms of the sum under dropout: (dx, dresidual), both or neither.
inline Tensor empty_dresidual(const Tensor& dx) { return at::empty_symint(dx.sym_sizes(), dx.options()); }

// Arguments that both kinds of kernels take. Replaces `x` and `residual` by copies where strides cannot describe their
// rows. Empty outputs are not written.
inline void set_forward(RmsNormForwardCall& args, Tensor& x, Tensor& residual, const Tensor& y, const Tensor& h,
                        const Tensor& rstd, double eps, bool round_before_weight) {
  std::array<RowStrides, 2> strides{};
  make_row_layout<2>({&x, &residual}, args.rows, strides);
  const auto [x_strides, residual_strides] = strides;
  args.x = x.const_data_ptr();
  args.residual = residual.defined() ? residual.const_data_ptr() : nullptr;
  args.y = y.mutable_data_ptr();
  args.h = h.numel() ? h.mutable_data_ptr() : nullptr;
  args.rstd = rstd.numel() ? rstd.mutable_data_ptr<float>() : nullptr;
  args.x_strides = x_strides;
  args.residual_strides = residual_strides;
  args.n_cols = x.size(-1);
  args.eps = static_cast<float>(eps);
  args.round_before_weight = round_before_weight;
  args.x_type = dtype_of(x);
  args.y_type = dtype_of(y);
}

inline void set_backward(RmsNormBackwardCall& args, Tensor& dy, Tensor& dh, Tensor& x, const Tensor& rstd,
                         const Tensor& dx, bool round_before_weight) {
  std::array<RowStrides, 3> strides{};
  make_row_layout<3>({&dy, &dh, &x}, args.rows, strides);
  const auto [dy_strides, dh_strides, x_strides] = strides;
  args.dy = dy.const_data_ptr();
  args.dh = dh.defined() ? dh.const_data_ptr() : nullptr;
  args.x = x.const_data_ptr();
  args.rstd = rstd.const_data_ptr<float>();
  args.dx = dx.numel() ? dx.mutable_data_ptr() : nullptr;
  args.dy_strides = dy_strides;
  args.dh_strides = dh_strides;
  args.x_strides = x_strides;
  args.n_cols = x.size(-1);
  args.round_before_weight = round_before_weight;
  args.x_type = dtype_of(x);
  args.y_type = dtype_of(dy);
}

inline void set_centered(RmsNormForwardCall& args, const Tensor& mean) {
  args.centered = true;
  args.mean = mean.numel() ? mean.mutable_data_ptr<float>() : nullptr;
}

inline void set_centered(RmsNormBackwardCall& args, const Tensor& mean) {
  args.centered = true;
  args.mean = mean.const_data_ptr<float>();
}

// The backward operators of a device, without and with dropout, from its functions for both: `run` returns (dx,
// dresidual, dw), and that of layer_norm db too.
template <auto run>
std::tuple<Tensor, Tensor> norm_bwd(const Tensor& dy, const OptionalTensor& dh, const Tensor& x,
                                    const OptionalTensor& weight, const Tensor& rstd, const WeightOptions& options,
                                    bool need_dx, bool need_dw) {
  auto [dx, _, dw] = run(dy, dh, x, weight, rstd, options, need_dx, need_dw, {});
  return {dx, dw};
}

template <auto run>
std::tuple<Tensor, Tensor, Tensor> norm_dropout_bwd(const Tensor& dy, const OptionalTensor& dh, const Tensor& x,
                                                    const OptionalTensor& weight, const Tensor& rstd,
                                                    const WeightOptions& options, bool need_dx, bool need_dw,
                                                    double dropout_p, const Tensor& dropout_seed) {
  check_dropout(x, x, {dropout_p, dropout_seed});
  return run(dy, dh, x, weight, rstd, options, need_dx, need_dw, make_dropout({dropout_p, dropout_seed}));
}

template <auto run>
std::tuple<Tensor, Tensor, Tensor> layer_bwd(const Tensor& dy, const OptionalTensor& dh, const Tensor& x,
                                             const OptionalTensor& weight, const OptionalTensor& bias,
                                             const Tensor& mean, const Tensor& rstd, bool need_dx, bool need_dw,
                                             bool need_db) {
  auto [dx, _, dw, db] = run(dy, dh, x, weight, bias, mean, rstd, need_dx, need_dw, need_db, {});
  return {dx, dw, db};
}

template <auto run>
std::tuple<Tensor, Tensor, Tensor, Tensor> layer_dropout_bwd(const Tensor& dy, const OptionalTensor& dh,
                                                             const Tensor& x, const OptionalTensor& weight,
                                                             const OptionalTensor& bias, const Tensor& mean,
                                                             const Tensor& rstd, bool need_dx, bool need_dw,
                                                             bool need_db, double dropout_p,
                                                             const Tensor& dropout_seed) {
  check_dropout(x, x, {dropout_p, dropout_seed});
  return run(dy, dh, x, weight, bias, mean, rstd, need_dx, need_dw, need_db, make_dropout({dropout_p, dropout_seed}));
}

}  // namespace foundry
