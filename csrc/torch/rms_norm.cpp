// The operators foundry_kernels::rms_norm and add_rms_norm: schema, shapes and autograd. rms_norm_cpu.cpp and
// rms_norm_cuda.cpp launch the kernels.
//
// They consist of rms_norm_fwd and rms_norm_bwd, which compiled graphs, checkpointing policies and profilers see.
// rms_norm_fwd normalises x, or x + residual if a residual is given. It returns (y, h, rstd): h is empty without a
// residual, rstd is empty unless requested. With dropout on x before the sum, rms_norm_dropout_bwd replaces
// rms_norm_bwd, because the two terms then have different gradients.
#include "rms_norm.h"

#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include "autograd.h"
#include "operators.h"

namespace foundry {
namespace rms_norm_schema {

std::tuple<Tensor, Tensor, Tensor> call_fwd(const Tensor& x, const OptionalTensor& residual,
                                            const OptionalTensor& weight, double eps, const WeightOptions& options,
                                            bool save_rstd, const DropoutOptions& dropout) {
  static const Operator<decltype(norm_fwd<&meta_forward>)> op(FK_LIBRARY_NAME "::rms_norm_fwd");
  return op(x, residual, weight, eps, options, save_rstd, dropout);
}

// The gradient of a y that was not used.
Tensor zero_dy(const Tensor& dh, const Tensor& weight, bool round_before_weight) {
  return at::zeros_like(dh, dh.options().dtype(y_dtype(dh, weight, round_before_weight)));
}

class RmsNormFunction : public torch::autograd::Function<RmsNormFunction> {
 public:
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const OptionalTensor& residual,
                               const OptionalTensor& weight, double eps, const WeightOptions& options,
                               const DropoutOptions& dropout) {
    ctx->set_materialize_grads(false);  // zeros would cost a pass, and would not be DTensors where the outputs are
    auto [y, h, rstd] = call_fwd(x, residual, weight, eps, options, true, dropout);
    variable_list saved{residual.has_value() ? h : x, unwrap(weight), rstd, unwrap(dropout.dropout_seed)};
    ctx->saved_data["options"] = save_options(options, saved);
    ctx->save_for_backward(std::move(saved));
    if (dropout.dropout_seed) ctx->saved_data["dropout_p"] = dropout.dropout_p;
    if (!residual.has_value()) return {y};
    if (!x.requires_grad() && !residual->requires_grad()) ctx->mark_non_differentiable({h});
    return {y, h};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    refuse_second_derivative("rms_norm");
    static const Operator<decltype(norm_bwd<&meta_backward>)> op(FK_LIBRARY_NAME "::rms_norm_bwd");
    static const Operator<decltype(norm_dropout_bwd<&meta_backward>)> dropout_op(FK_LIBRARY_NAME
                                                                                 "::rms_norm_dropout_bwd");
    const auto [x, weight, rstd, seed] = saved_tensors<4>(ctx);
    const bool has_residual = grads.size() == 2;
    const Tensor &dy = grads.front(), dh = has_residual ? grads.back() : Tensor();
    NeedsGrad needs(ctx);
    const bool need_x = needs.next(), need_residual = needs.next_if(has_residual),
               need_dw = needs.next_if(weight.defined());
    const auto gradients = [&](const Tensor& dx, const Tensor& dresidual, const Tensor& dw) -> variable_list {
      return {need_x ? dx : Tensor(),
              need_residual ? dresidual : Tensor(),
              need_dw ? dw : Tensor(),
              /*eps*/ {},
              /*options*/ {},
              /*dropout*/ {}};
    };
    const WeightOptions options = load_options<WeightOptions>(nullptr, ctx->saved_data.at("options"));
    const bool need_dx = need_x || need_residual;
    if (seed.defined()) {
      const Tensor dy_or_0 = dy.defined() ? dy : zero_dy(dh, weight, options.round_before_weight);
      auto [dx, dresidual, dw] = dropout_op(dy_or_0, wrap(dh), x, wrap(weight), rstd, options, need_dx,
                                            need_dw && dy.defined(), ctx->saved_data.at("dropout_p").toDouble(), seed);
      return gradients(dx, dresidual, dy.defined() ? dw : Tensor());
    }
    // Both terms of the sum x + residual get the same gradient.
    if (!dy.defined()) return gradients(dh, dh, Tensor());  // the gradient of h passes through, the weight gets none
    auto [dx, dw] = op(dy, wrap(dh), x, wrap(weight), rstd, options, need_dx, need_dw);
    return gradients(dx, dx, dw);
  }
};

}  // namespace rms_norm_schema

Tensor rms_norm(const Tensor& x, const OptionalTensor& weight, double eps, const WeightOptions& options) {
  if (any_requires_grad(x, weight))
    return rms_norm_schema::RmsNormFunction::apply(x, OptionalTensor(), weight, eps, options, DropoutOptions())[0];
  return std::get<0>(rms_norm_schema::call_fwd(x, std::nullopt, weight, eps, options, false, {}));
}

std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual, const OptionalTensor& weight,
                                        double eps, const WeightOptions& options, const DropoutOptions& dropout) {
  if (any_requires_grad(x, residual, weight)) {
    auto out = rms_norm_schema::RmsNormFunction::apply(x, OptionalTensor(residual), weight, eps, options, dropout);
    return {out[0], out[1]};
  }
  auto [y, h, rstd] = rms_norm_schema::call_fwd(x, residual, weight, eps, options, false, dropout);
  return {y, h};
}

TORCH_LIBRARY_FRAGMENT(FK_LIBRARY, m) {
  const std::string options = WeightOptions::schema(), dropout = DropoutOptions::schema();
  define_operator(m, "rms_norm(Tensor x, Tensor? weight, float eps, " + options + ") -> Tensor");
  define_operator(m, "add_rms_norm(Tensor x, Tensor residual, Tensor? weight, float eps, " + options + ", " + dropout +
                         ") -> (Tensor y, Tensor h)");
  define_operator(m, "rms_norm_fwd(Tensor x, Tensor? residual, Tensor? weight, float eps, " + options +
                         ", bool save_rstd, " + dropout + ") -> (Tensor y, Tensor h, Tensor rstd)");
  const std::string saved = "Tensor dy, Tensor? dh, Tensor x, Tensor? weight, Tensor rstd, " + options;
  define_operator(m, "rms_norm_bwd(" + saved + ", bool need_dx, bool need_dw) -> (Tensor dx, Tensor dw)");
  define_operator(m, "rms_norm_dropout_bwd(" + saved + ", bool need_dx, bool need_dw, float dropout_p, " +
                         "Tensor dropout_seed) -> (Tensor dx, Tensor dresidual, Tensor dw)");
}

TORCH_LIBRARY_IMPL(FK_LIBRARY, CompositeImplicitAutograd, m) {
  m.impl("rms_norm", flat_kernel<&rms_norm>);
  m.impl("add_rms_norm", flat_kernel<&add_rms_norm>);
}

TORCH_LIBRARY_IMPL(FK_LIBRARY, Meta, m) {
  m.impl("rms_norm_fwd", flat_kernel<&norm_fwd<&meta_forward>>);
  m.impl("rms_norm_bwd", flat_kernel<&norm_bwd<&meta_backward>>);
  m.impl("rms_norm_dropout_bwd", flat_kernel<&norm_dropout_bwd<&meta_backward>>);
}

}  // namespace foundry
