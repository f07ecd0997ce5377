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

// The outputs of forward: contiguous, on x's device. The meta device uses them as fakes. `centered`: of layer_norm,
// which has a mean too, undefined otherwise.
struct NormOutputs {
  Tensor y, h, mean, rstd;
};

inline NormOutputs empty_fwd(const Tensor& x, const Tensor& residual, const Tensor& weight, const Tensor& bias,
                             bool round_before_weight, bool save, bool centered) {
  check_rms_norm(x, residual, weight);
  check_vector("bias", bias, x);
  const auto options = x.options();
  const auto shape = x.sym_sizes();
  const auto of_rows = [&] {
    return save ? at::empty_symint(shape.slice(0, shape.size() - 1), options.dtype(at::kFloat)) : absent(x, at::kFloat);
  };
  return {at::empty_symint(shape, options.dtype(y_dtype(x, weight, round_before_weight))),
          residual.defined() ? at::empty_symint(shape, options) : absent(x, x.scalar_type()),
          centered ? of_rows() : Tensor(), of_rows()};
}

// The gradients. Without dropout dresidual is dx itself; db is undefined unless `centered`.
struct NormGradients {
  Tensor dx, dresidual, dw, db;
};

inline NormGradients empty_bwd(const Tensor& x, const Tensor& weight, const Tensor& bias, bool need_dx, bool need_dw,
                               bool need_db, bool drops, bool centered) {
  TORCH_CHECK_VALUE(!need_dw || weight.defined(), "there is no weight to give a gradient for");
  TORCH_CHECK_VALUE(!need_db || bias.defined(), "there is no bias to give a gradient for");
  const auto empty = [&](bool needed, const Tensor& like) {
    return needed ? at::empty_symint(like.sym_sizes(), like.options()) : absent(x, x.scalar_type());
  };
  const Tensor dx = empty(need_dx, x);
  return {dx, drops ? empty(need_dx, x) : dx, empty(need_dw, weight), centered ? empty(need_db, bias) : Tensor()};
}

inline void check_dropout(const Tensor& x, const Tensor& residual, const DropoutOptions& dropout) {
  check_dropout(x, dropout);
  TORCH_CHECK_VALUE(!dropout.dropout_seed.has_value() || residual.defined(),
                    "dropout is of what is added to a residual, and there is none");
}

// Arguments that both kinds of kernels take. Replaces `x` and `residual` by copies where strides cannot describe their
// rows. Empty outputs are not written.
inline void set_forward(RmsNormForwardCall& args, Tensor& x, Tensor& residual, const NormOutputs& out, double eps,
                        bool round_before_weight) {
  std::array<RowStrides, 2> strides{};
  make_row_layout<2>({&x, &residual}, args.rows, strides);
  const auto [x_strides, residual_strides] = strides;
  args.x = x.const_data_ptr();
  args.residual = residual.defined() ? residual.const_data_ptr() : nullptr;
  args.y = out.y.mutable_data_ptr();
  args.h = out.h.numel() ? out.h.mutable_data_ptr() : nullptr;
  args.rstd = out.rstd.numel() ? out.rstd.mutable_data_ptr<float>() : nullptr;
  args.centered = out.mean.defined();
  args.mean = args.centered && out.mean.numel() ? out.mean.mutable_data_ptr<float>() : nullptr;
  args.x_strides = x_strides;
  args.residual_strides = residual_strides;
  args.n_cols = x.size(-1);
  args.eps = static_cast<float>(eps);
  args.round_before_weight = round_before_weight;
  args.x_type = dtype_of(x);
  args.y_type = dtype_of(out.y);
}

// What a backward pass reads. mean and bias are undefined, unless it is of layer_norm.
struct NormSaved {
  Tensor dy, dh, x, weight, bias, mean, rstd;
};

inline void set_backward(RmsNormBackwardCall& args, NormSaved& saved, const Tensor& dx, bool round_before_weight) {
  std::array<RowStrides, 3> strides{};
  make_row_layout<3>({&saved.dy, &saved.dh, &saved.x}, args.rows, strides);
  const auto [dy_strides, dh_strides, x_strides] = strides;
  args.dy = saved.dy.const_data_ptr();
  args.dh = saved.dh.defined() ? saved.dh.const_data_ptr() : nullptr;
  args.x = saved.x.const_data_ptr();
  args.rstd = saved.rstd.const_data_ptr<float>();
  args.centered = saved.mean.defined();
  args.mean = args.centered ? saved.mean.const_data_ptr<float>() : nullptr;
  args.dx = dx.numel() ? dx.mutable_data_ptr() : nullptr;
  args.dy_strides = dy_strides;
  args.dh_strides = dh_strides;
  args.x_strides = x_strides;
  args.n_cols = saved.x.size(-1);
  args.round_before_weight = round_before_weight;
  args.x_type = dtype_of(saved.x);
  args.y_type = dtype_of(saved.dy);
}

inline NormOutputs meta_forward(const Tensor& x, const Tensor& residual, const Tensor& weight, const Tensor& bias,
                                double, const WeightOptions& options, bool save, const DropoutOptions& dropout,
                                bool centered) {
  check_dropout(x, residual, dropout);
  return empty_fwd(x, residual, weight, bias, options.round_before_weight, save, centered);
}

inline NormGradients meta_backward(const NormSaved& saved, const WeightOptions&, bool need_dx, bool need_dw,
                                   bool need_db, const DropoutOptions& dropout) {
  return empty_bwd(saved.x, saved.weight, saved.bias, need_dx, need_dw, need_db, dropout.dropout_seed.has_value(),
                   saved.mean.defined());
}

// The operators of a device, from its functions for both norms, whose arguments are those of the two above.
template <auto run>
std::tuple<Tensor, Tensor, Tensor> norm_fwd(const Tensor& x, const OptionalTensor& residual,
                                            const OptionalTensor& weight, double eps, const WeightOptions& options,
                                            bool save_rstd, const DropoutOptions& dropout) {
  auto [y, h, _, rstd] = run(x, unwrap(residual), unwrap(weight), {}, eps, options, save_rstd, dropout, false);
  return {y, h, rstd};
}

template <auto run>
std::tuple<Tensor, Tensor, Tensor, Tensor> layer_fwd(const Tensor& x, const OptionalTensor& residual,
                                                     const OptionalTensor& weight, const OptionalTensor& bias,
                                                     double eps, bool save_stats, const DropoutOptions& dropout) {
  auto [y, h, mean, rstd] =
      run(x, unwrap(residual), unwrap(weight), unwrap(bias), eps, {0.0, false}, save_stats, dropout, true);
  return {y, h, mean, rstd};
}

template <auto run>
std::tuple<Tensor, Tensor> norm_bwd(const Tensor& dy, const OptionalTensor& dh, const Tensor& x,
                                    const OptionalTensor& weight, const Tensor& rstd, const WeightOptions& options,
                                    bool need_dx, bool need_dw) {
  auto [dx, _, dw, db] = run({dy, unwrap(dh), x, unwrap(weight), {}, {}, rstd}, options, need_dx, need_dw, false, {});
  return {dx, dw};
}

template <auto run>
std::tuple<Tensor, Tensor, Tensor> norm_dropout_bwd(const Tensor& dy, const OptionalTensor& dh, const Tensor& x,
                                                    const OptionalTensor& weight, const Tensor& rstd,
                                                    const WeightOptions& options, bool need_dx, bool need_dw,
                                                    double dropout_p, const Tensor& dropout_seed) {
  check_dropout(x, x, {dropout_p, dropout_seed});
  auto [dx, dresidual, dw, db] = run({dy, unwrap(dh), x, unwrap(weight), {}, {}, rstd}, options, need_dx, need_dw,
                                     false, {dropout_p, dropout_seed});
  return {dx, dresidual, dw};
}

template <auto run>
std::tuple<Tensor, Tensor, Tensor> layer_bwd(const Tensor& dy, const OptionalTensor& dh, const Tensor& x,
                                             const OptionalTensor& weight, const OptionalTensor& bias,
                                             const Tensor& mean, const Tensor& rstd, bool need_dx, bool need_dw,
                                             bool need_db) {
  auto [dx, _, dw, db] =
      run({dy, unwrap(dh), x, unwrap(weight), unwrap(bias), mean, rstd}, {0.0, false}, need_dx, need_dw, need_db, {});
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
  auto [dx, dresidual, dw, db] = run({dy, unwrap(dh), x, unwrap(weight), unwrap(bias), mean, rstd}, {0.0, false},
                                     need_dx, need_dw, need_db, {dropout_p, dropout_seed});
  return {dx, dresidual, dw, db};
}

}  // namespace foundry
