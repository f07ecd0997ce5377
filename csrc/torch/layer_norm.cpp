// The operators foundry_kernels::layer_norm and add_layer_norm: schema, shapes and autograd. rms_norm_cpu.cpp and
// rms_norm_cuda.cpp launch the kernels, which are those of rms_norm with a flag.
//
// Both consist of layer_norm_fwd and layer_norm_bwd, as in rms_norm.cpp. layer_norm_fwd returns (y, h, mean, rstd): h
// is empty without a residual, mean and rstd are empty unless requested.
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include "autograd.h"
#include "operators.h"
#include "rms_norm.h"

namespace foundry {
namespace layer_norm_schema {

std::tuple<Tensor, Tensor, Tensor, Tensor> call_fwd(const Tensor& x, const OptionalTensor& residual,
                                                    const OptionalTensor& weight, const OptionalTensor& bias,
                                                    double eps, bool save_stats, const DropoutOptions& dropout) {
  static const Operator<decltype(layer_fwd<&meta_forward>)> op(FK_LIBRARY_NAME "::layer_norm_fwd");
  return op(x, residual, weight, bias, eps, save_stats, dropout);
}

class LayerNormFunction : public torch::autograd::Function<LayerNormFunction> {
 public:
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const OptionalTensor& residual,
                               const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                               const DropoutOptions& dropout) {
    ctx->set_materialize_grads(false);  // as in rms_norm.cpp
    auto [y, h, mean, rstd] = call_fwd(x, residual, weight, bias, eps, true, dropout);
    ctx->save_for_backward(
        {residual.has_value() ? h : x, unwrap(weight), unwrap(bias), mean, rstd, unwrap(dropout.dropout_seed)});
    if (dropout.dropout_seed) ctx->saved_data["dropout_p"] = dropout.dropout_p;
    if (!residual.has_value()) return {y};
    if (!x.requires_grad() && !residual->requires_grad()) ctx->mark_non_differentiable({h});
    return {y, h};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    refuse_second_derivative("layer_norm");
    static const Operator<decltype(layer_bwd<&meta_backward>)> op(FK_LIBRARY_NAME "::layer_norm_bwd");
    static const Operator<decltype(layer_dropout_bwd<&meta_backward>)> dropout_op(FK_LIBRARY_NAME
                                                                                  "::layer_norm_dropout_bwd");
    const auto [x, weight, bias, mean, rstd, seed] = saved_tensors<6>(ctx);
    const bool has_residual = grads.size() == 2;
    const Tensor &dy = grads.front(), dh = has_residual ? grads.back() : Tensor();
    NeedsGrad needs(ctx);
    const bool need_x = needs.next(), need_residual = needs.next_if(has_residual),
               need_dw = needs.next_if(weight.defined()), need_db = needs.next_if(bias.defined());
    const auto gradients = [&](const Tensor& dx, const Tensor& dresidual, const Tensor& dw,
                               const Tensor& db) -> variable_list {
      return {need_x ? dx : Tensor(),
              need_residual ? dresidual : Tensor(),
              need_dw ? dw : Tensor(),
              need_db ? db : Tensor(),
              /*eps*/ {},
              /*dropout*/ {}};
    };
    const bool need_dx = need_x || need_residual;
    if (seed.defined()) {
      const bool has_dy = dy.defined();
      auto [dx, dresidual, dw, db] =
          dropout_op(has_dy ? dy : at::zeros_like(dh), wrap(dh), x, wrap(weight), wrap(bias), mean, rstd, need_dx,
                     need_dw && has_dy, need_db && has_dy, ctx->saved_data.at("dropout_p").toDouble(), seed);
      return gradients(dx, dresidual, has_dy ? dw : Tensor(), has_dy ? db : Tensor());
    }
    // Both terms of the sum x + residual get the same gradient.
    if (!dy.defined()) return gradients(dh, dh, Tensor(), Tensor());  // the gradient of h alone passes through
    auto [dx, dw, db] = op(dy, wrap(dh), x, wrap(weight), wrap(bias), mean, rstd, need_dx, need_dw, need_db);
    return gradients(dx, dx, dw, db);
  }
};

}  // namespace layer_norm_schema

Tensor layer_norm(const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias, double eps) {
  if (any_requires_grad(x, weight, bias))
    return layer_norm_schema::LayerNormFunction::apply(x, OptionalTensor(), weight, bias, eps, DropoutOptions())[0];
  return std::get<0>(layer_norm_schema::call_fwd(x, std::nullopt, weight, bias, eps, false, {}));
}

std::tuple<Tensor, Tensor> add_layer_norm(const Tensor& x, const Tensor& residual, const OptionalTensor& weight,
                                          const OptionalTensor& bias, double eps, const DropoutOptions& dropout) {
  if (any_requires_grad(x, residual, weight, bias)) {
    auto out = layer_norm_schema::LayerNormFunction::apply(x, OptionalTensor(residual), weight, bias, eps, dropout);
    return {out[0], out[1]};
  }
  auto [y, h, mean, rstd] = layer_norm_schema::call_fwd(x, residual, weight, bias, eps, false, dropout);
  return {y, h};
}

TORCH_LIBRARY_FRAGMENT(FK_LIBRARY, m) {
  const std::string affine = "Tensor? weight, Tensor? bias, ", dropout = DropoutOptions::schema();
  define_operator(m, "layer_norm(Tensor x, " + affine + "float eps) -> Tensor");
  define_operator(
      m, "add_layer_norm(Tensor x, Tensor residual, " + affine + "float eps, " + dropout + ") -> (Tensor y, Tensor h)");
  define_operator(m, "layer_norm_fwd(Tensor x, Tensor? residual, " + affine + "float eps, bool save_stats, " + dropout +
                         ") -> (Tensor y, Tensor h, Tensor mean, Tensor rstd)");
  const std::string saved = "Tensor dy, Tensor? dh, Tensor x, " + affine + "Tensor mean, Tensor rstd, ";
  const std::string needs = "bool need_dx, bool need_dw, bool need_db";
  define_operator(m, "layer_norm_bwd(" + saved + needs + ") -> (Tensor dx, Tensor dw, Tensor db)");
  define_operator(m, "layer_norm_dropout_bwd(" + saved + needs + ", float dropout_p, Tensor dropout_seed) " +
                         "-> (Tensor dx, Tensor dresidual, Tensor dw, Tensor db)");
}

TORCH_LIBRARY_IMPL(FK_LIBRARY, CompositeImplicitAutograd, m) {
  m.impl("layer_norm", &layer_norm);
  m.impl("add_layer_norm", flat_kernel<&add_layer_norm>);
}

TORCH_LIBRARY_IMPL(FK_LIBRARY, Meta, m) {
  m.impl("layer_norm_fwd", flat_kernel<&layer_fwd<&meta_forward>>);
  m.impl("layer_norm_bwd", &layer_bwd<&meta_backward>);
  m.impl("layer_norm_dropout_bwd", &layer_dropout_bwd<&meta_backward>);
}

}  // namespace foundry
