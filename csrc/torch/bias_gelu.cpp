// The operator foundry_kernels::bias_gelu: schema, shapes and autograd.
// bias_gelu_cpu.cpp and bias_gelu_cuda.cpp launch the kernels.
//
// It is composed of bias_gelu_fwd and bias_gelu_bwd, which are what a compiled graph, a checkpointing policy or a
// profiler sees. bias_gelu_bwd returns (dx, dbias), each empty unless it was asked for.
#include "bias_gelu.h"

#include <torch/library.h>

#include "autograd.h"
#include "operators.h"

namespace foundry {
namespace bias_gelu_schema {

Tensor fwd_meta(const Tensor& x, const OptionalTensor& bias, c10::string_view) { return empty_bias_gelu_fwd(x, bias); }

std::tuple<Tensor, Tensor> bwd_meta(const Tensor&, const Tensor& x, const OptionalTensor& bias, c10::string_view,
                                    bool need_dx, bool need_dbias) {
  return empty_bias_gelu_bwd(x, bias, need_dx, need_dbias);
}

Tensor call_fwd(const Tensor& x, const OptionalTensor& bias, c10::string_view approximate) {
  static const Operator<decltype(fwd_meta)> op(FK_LIBRARY_NAME "::bias_gelu_fwd");
  return op(x, bias, approximate);
}

class BiasGeluFunction : public torch::autograd::Function<BiasGeluFunction> {
 public:
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const OptionalTensor& bias,
                        c10::string_view approximate) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    ctx->save_for_backward({x, unwrap(bias)});
    ctx->saved_data["approximate"] = std::string(approximate);
    return call_fwd(x, bias, approximate);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    refuse_second_derivative("bias_gelu");
    static const Operator<decltype(bwd_meta)> op(FK_LIBRARY_NAME "::bias_gelu_bwd");
    const auto [x, bias] = saved_tensors<2>(ctx);
    NeedsGrad needs(ctx);
    const bool need_dx = needs.next(), need_dbias = needs.next_if(bias.defined());
    auto [dx, dbias] =
        op(grads.front(), x, wrap(bias), ctx->saved_data["approximate"].toStringRef(), need_dx, need_dbias);
    return {need_dx ? dx : Tensor(), need_dbias ? dbias : Tensor(), /*approximate*/ {}};
  }
};

}  // namespace bias_gelu_schema

Tensor bias_gelu(const Tensor& x, const OptionalTensor& bias, c10::string_view approximate) {
  gelu_of(approximate);
  if (any_requires_grad(x, bias)) return bias_gelu_schema::BiasGeluFunction::apply(x, bias, approximate);
  return bias_gelu_schema::call_fwd(x, bias, approximate);
}

TORCH_LIBRARY_FRAGMENT(FK_LIBRARY, m) {
  m.def("bias_gelu(Tensor x, Tensor? bias, str approximate) -> Tensor", {at::Tag::pt2_compliant_tag});
  m.def("bias_gelu_fwd(Tensor x, Tensor? bias, str approximate) -> Tensor", {at::Tag::pt2_compliant_tag});
  m.def(
      "bias_gelu_bwd(Tensor dy, Tensor x, Tensor? bias, str approximate, bool need_dx, bool need_dbias) "
      "-> (Tensor dx, Tensor dbias)",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(FK_LIBRARY, CompositeImplicitAutograd, m) { m.impl("bias_gelu", &bias_gelu); }

TORCH_LIBRARY_IMPL(FK_LIBRARY, Meta, m) {
  m.impl("bias_gelu_fwd", &bias_gelu_schema::fwd_meta);
  m.impl("bias_gelu_bwd", &bias_gelu_schema::bwd_meta);
}

}  // namespace foundry
