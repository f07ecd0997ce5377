// The operators foundry_kernels::bias_gelu, bias_silu and bias_relu: schema, shapes and autograd. bias_gelu_cpu.cpp and
// bias_gelu_cuda.cpp launch the kernels.
//
// They consist of bias_act_fwd and bias_act_bwd, which compiled graphs, checkpointing policies and profilers see.
// bias_act_bwd returns (dx, dbias); each is empty unless requested.
#include "bias_gelu.h"

#include <torch/library.h>

#include "autograd.h"
#include "operators.h"

namespace foundry {
namespace bias_gelu_schema {

Tensor fwd_meta(const Tensor& x, const OptionalTensor& bias, c10::string_view, const DropoutOptions& dropout) {
  return empty_bias_act_fwd(x, bias, dropout);
}

std::tuple<Tensor, Tensor> bwd_meta(const Tensor&, const Tensor& x, const OptionalTensor& bias, c10::string_view,
                                    bool need_dx, bool need_dbias, const DropoutOptions& dropout) {
  return empty_bias_act_bwd(x, bias, need_dx, need_dbias, dropout);
}

Tensor call_fwd(const Tensor& x, const OptionalTensor& bias, c10::string_view activation,
                const DropoutOptions& dropout) {
  static const Operator<decltype(fwd_meta)> op(FK_LIBRARY_NAME "::bias_act_fwd");
  return op(x, bias, activation, dropout);
}

class BiasActFunction : public torch::autograd::Function<BiasActFunction> {
 public:
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const OptionalTensor& bias, c10::string_view activation,
                        const DropoutOptions& dropout) {
    ctx->save_for_backward({x, unwrap(bias), unwrap(dropout.dropout_seed)});
    ctx->saved_data["activation"] = std::string(activation);
    if (dropout.dropout_seed) ctx->saved_data["dropout_p"] = dropout.dropout_p;
    return call_fwd(x, bias, activation, dropout);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const std::string activation = ctx->saved_data["activation"].toStringRef();
    refuse_second_derivative(activation == "silu" ? "bias_silu" : activation == "relu" ? "bias_relu" : "bias_gelu");
    static const Operator<decltype(bwd_meta)> op(FK_LIBRARY_NAME "::bias_act_bwd");
    const auto [x, bias, seed] = saved_tensors<3>(ctx);
    NeedsGrad needs(ctx);
    const bool need_dx = needs.next(), need_dbias = needs.next_if(bias.defined());
    DropoutOptions dropout;
    if (seed.defined()) dropout = {ctx->saved_data.at("dropout_p").toDouble(), seed};
    auto [dx, dbias] = op(grads.front(), x, wrap(bias), activation, need_dx, need_dbias, dropout);
    return {need_dx ? dx : Tensor(), need_dbias ? dbias : Tensor(), /*activation*/ {}, /*dropout*/ {}};
  }
};

Tensor bias_act(const Tensor& x, const OptionalTensor& bias, c10::string_view activation,
                const DropoutOptions& dropout) {
  if (any_requires_grad(x, bias)) return BiasActFunction::apply(x, bias, activation, dropout);
  return call_fwd(x, bias, activation, dropout);
}

}  // namespace bias_gelu_schema

Tensor bias_gelu(const Tensor& x, const OptionalTensor& bias, c10::string_view approximate,
                 const DropoutOptions& dropout) {
  TORCH_CHECK_VALUE(approximate == "none" || approximate == "tanh", "approximate must be one of none, tanh; got ",
                    approximate);
  return bias_gelu_schema::bias_act(x, bias, approximate == "none" ? "gelu" : "gelu_tanh", dropout);
}

Tensor bias_silu(const Tensor& x, const OptionalTensor& bias, const DropoutOptions& dropout) {
  return bias_gelu_schema::bias_act(x, bias, "silu", dropout);
}

Tensor bias_relu(const Tensor& x, const OptionalTensor& bias, const DropoutOptions& dropout) {
  return bias_gelu_schema::bias_act(x, bias, "relu", dropout);
}

TORCH_LIBRARY_FRAGMENT(FK_LIBRARY, m) {
  const std::string inputs = "Tensor x, Tensor? bias, ", dropout = DropoutOptions::schema();
  define_operator(m, "bias_gelu(" + inputs + "str approximate, " + dropout + ") -> Tensor");
  define_operator(m, "bias_silu(" + inputs + dropout + ") -> Tensor");
  define_operator(m, "bias_relu(" + inputs + dropout + ") -> Tensor");
  define_operator(m, "bias_act_fwd(" + inputs + "str activation, " + dropout + ") -> Tensor");
  define_operator(m, "bias_act_bwd(Tensor dy, " + inputs + "str activation, bool need_dx, bool need_dbias, " + dropout +
                         ") -> (Tensor dx, Tensor dbias)");
}

TORCH_LIBRARY_IMPL(FK_LIBRARY, CompositeImplicitAutograd, m) {
  m.impl("bias_gelu", flat_kernel<&bias_gelu>);
  m.impl("bias_silu", flat_kernel<&bias_silu>);
  m.impl("bias_relu", flat_kernel<&bias_relu>);
}

TORCH_LIBRARY_IMPL(FK_LIBRARY, Meta, m) {
  m.impl("bias_act_fwd", flat_kernel<&bias_gelu_schema::fwd_meta>);
  m.impl("bias_act_bwd", flat_kernel<&bias_gelu_schema::bwd_meta>);
}

}  // namespace foundry
