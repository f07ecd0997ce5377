// The operators foundry_kernels::swiglu and geglu: schema, shapes and autograd.
// swiglu_cpu.cpp and swiglu_cuda.cpp launch the kernels.
//
// Both are composed of glu_fwd and glu_bwd, which are what a compiled graph, a checkpointing policy or a profiler sees.
// Without `up`, gate is packed [..., 2N], and so is its gradient. glu_bwd returns (dgate, dup), each empty unless it
// was asked for.
#include "swiglu.h"

#include <torch/library.h>

#include "autograd.h"
#include "operators.h"

namespace foundry {
namespace {

Tensor fwd_meta(const Tensor& gate, const OptionalTensor& up, c10::string_view) { return empty_glu_fwd(gate, up); }

std::tuple<Tensor, Tensor> bwd_meta(const Tensor&, const Tensor& gate, const OptionalTensor& up, c10::string_view,
                                    bool need_dgate, bool need_dup) {
  return empty_glu_bwd(gate, up, need_dgate, need_dup);
}

// The dispatcher finds the kernel of the tensors' device.
Tensor call_fwd(const Tensor& gate, const OptionalTensor& up, c10::string_view activation) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow(FK_LIBRARY_NAME "::glu_fwd", "").typed<decltype(fwd_meta)>();
  return op.call(gate, up, activation);
}

class GluFunction : public torch::autograd::Function<GluFunction> {
 public:
  static Tensor forward(AutogradContext* ctx, const Tensor& gate, const OptionalTensor& up,
                        c10::string_view activation) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    ctx->save_for_backward({gate, unwrap(up)});
    ctx->saved_data["activation"] = std::string(activation);
    return call_fwd(gate, up, activation);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const std::string activation = ctx->saved_data["activation"].toStringRef();
    refuse_second_derivative(activation == "silu" ? "swiglu" : "geglu");
    static const auto op =
        c10::Dispatcher::singleton().findSchemaOrThrow(FK_LIBRARY_NAME "::glu_bwd", "").typed<decltype(bwd_meta)>();
    const auto [gate, up] = saved_tensors<2>(ctx);
    const Tensor& dy = grads.front();
    NeedsGrad needs(ctx);
    const bool need_dgate = needs.next(), need_dup = needs.next_if(up.defined());
    auto [dgate, dup] = op.call(dy, gate, wrap(up), activation, need_dgate, need_dup);
    return {need_dgate ? dgate : Tensor(), need_dup ? dup : Tensor(), /*activation*/ {}};
  }
};

Tensor glu(const Tensor& gate, const OptionalTensor& up, c10::string_view activation) {
  if (any_requires_grad(gate, up)) return GluFunction::apply(gate, up, activation);
  return call_fwd(gate, up, activation);
}

}  // namespace

Tensor swiglu(const Tensor& gate, const OptionalTensor& up) { return glu(gate, up, "silu"); }

Tensor geglu(const Tensor& gate, const OptionalTensor& up, c10::string_view approximate) {
  TORCH_CHECK_VALUE(approximate == "none" || approximate == "tanh", "approximate must be one of none, tanh; got ",
                    approximate);
  return glu(gate, up, approximate == "tanh" ? "gelu_tanh" : "gelu");
}

TORCH_LIBRARY_FRAGMENT(FK_LIBRARY, m) {
  m.def("swiglu(Tensor gate, Tensor? up) -> Tensor", {at::Tag::pt2_compliant_tag});
  m.def("geglu(Tensor gate, Tensor? up, str approximate) -> Tensor", {at::Tag::pt2_compliant_tag});
  m.def("glu_fwd(Tensor gate, Tensor? up, str activation) -> Tensor", {at::Tag::pt2_compliant_tag});
  m.def(
      "glu_bwd(Tensor dy, Tensor gate, Tensor? up, str activation, bool need_dgate, bool need_dup) "
      "-> (Tensor dgate, Tensor dup)",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(FK_LIBRARY, CompositeImplicitAutograd, m) {
  m.impl("swiglu", &swiglu);
  m.impl("geglu", &geglu);
}

TORCH_LIBRARY_IMPL(FK_LIBRARY, Meta, m) {
  m.impl("glu_fwd", &fwd_meta);
  m.impl("glu_bwd", &bwd_meta);
}

}  // namespace foundry
