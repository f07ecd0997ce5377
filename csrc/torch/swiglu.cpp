// The operators foundry_kernels::swiglu and geglu: schema, shapes and autograd.
// swiglu_cpu.cpp and swiglu_cuda.cpp launch the kernels.
//
// Both are composed of glu_fwd and glu_bwd, which are what a compiled graph, a checkpointing policy or a profiler sees.
// Without `up`, gate is packed [..., 2N], in halves or interleaved, and so is its gradient. glu_bwd returns (dgate,
// dup), each empty unless it was asked for.
#include "swiglu.h"

#include <torch/library.h>

#include "autograd.h"
#include "operators.h"

namespace foundry {
namespace swiglu_schema {

Tensor fwd_meta(const Tensor& gate, const OptionalTensor& up, c10::string_view, double, std::optional<double>, double,
                bool) {
  return empty_glu_fwd(gate, up);
}

std::tuple<Tensor, Tensor> bwd_meta(const Tensor&, const Tensor& gate, const OptionalTensor& up, c10::string_view,
                                    bool need_dgate, bool need_dup, double, std::optional<double>, double, bool) {
  return empty_glu_bwd(gate, up, need_dgate, need_dup);
}

// The dispatcher finds the kernel of the tensors' device.
Tensor call_fwd(const Tensor& gate, const OptionalTensor& up, c10::string_view activation, const GluSettings& s) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow(FK_LIBRARY_NAME "::glu_fwd", "").typed<decltype(fwd_meta)>();
  return op.call(gate, up, activation, s.alpha, s.limit, s.up_offset, s.interleaved);
}

// Settings in what autograd keeps, which takes longer than a small call: usual ones are not put there. A limit of 0,
// which is none, stands for none.
const char* const kSettings = "settings";

void keep(AutogradContext* ctx, const GluSettings& s) {
  if (s.changed() || s.interleaved)
    ctx->saved_data[kSettings] =
        std::vector<double>{s.alpha, s.limit.value_or(0.0), s.up_offset, double(s.interleaved)};
}

GluSettings kept(AutogradContext* ctx) {
  const auto found = ctx->saved_data.find(kSettings);
  if (found == ctx->saved_data.end()) return {};
  const auto values = found->second.toDoubleVector();
  return {values[0], values[1] == 0.0 ? std::nullopt : std::optional<double>(values[1]), values[2], values[3] != 0.0};
}

class GluFunction : public torch::autograd::Function<GluFunction> {
 public:
  static Tensor forward(AutogradContext* ctx, const Tensor& gate, const OptionalTensor& up, c10::string_view activation,
                        const GluSettings& settings) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    ctx->save_for_backward({gate, unwrap(up)});
    ctx->saved_data["activation"] = std::string(activation);
    keep(ctx, settings);
    return call_fwd(gate, up, activation, settings);
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
    const GluSettings s = kept(ctx);
    auto [dgate, dup] =
        op.call(dy, gate, wrap(up), activation, need_dgate, need_dup, s.alpha, s.limit, s.up_offset, s.interleaved);
    return {need_dgate ? dgate : Tensor(), need_dup ? dup : Tensor(), /*activation*/ {}, /*settings*/ {}};
  }
};

Tensor glu(const Tensor& gate, const OptionalTensor& up, c10::string_view activation, const GluSettings& settings) {
  if (any_requires_grad(gate, up)) return GluFunction::apply(gate, up, activation, settings);
  return call_fwd(gate, up, activation, settings);
}

}  // namespace swiglu_schema

Tensor swiglu(const Tensor& gate, const OptionalTensor& up, double alpha, std::optional<double> limit, double up_offset,
              bool interleaved) {
  return swiglu_schema::glu(gate, up, "silu", {alpha, limit, up_offset, interleaved});
}

Tensor geglu(const Tensor& gate, const OptionalTensor& up, c10::string_view approximate) {
  TORCH_CHECK_VALUE(approximate == "none" || approximate == "tanh", "approximate must be one of none, tanh; got ",
                    approximate);
  return swiglu_schema::glu(gate, up, approximate == "tanh" ? "gelu_tanh" : "gelu", {});
}

TORCH_LIBRARY_FRAGMENT(FK_LIBRARY, m) {
#define FK_OPTIONS "float alpha=1.0, float? limit=None, float up_offset=0.0, bool interleaved=False"
  m.def("swiglu(Tensor gate, Tensor? up, " FK_OPTIONS ") -> Tensor", {at::Tag::pt2_compliant_tag});
  m.def("geglu(Tensor gate, Tensor? up, str approximate) -> Tensor", {at::Tag::pt2_compliant_tag});
  m.def("glu_fwd(Tensor gate, Tensor? up, str activation, " FK_OPTIONS ") -> Tensor", {at::Tag::pt2_compliant_tag});
  m.def("glu_bwd(Tensor dy, Tensor gate, Tensor? up, str activation, bool need_dgate, bool need_dup, " FK_OPTIONS
        ") -> (Tensor dgate, Tensor dup)",
        {at::Tag::pt2_compliant_tag});
#undef FK_OPTIONS
}

TORCH_LIBRARY_IMPL(FK_LIBRARY, CompositeImplicitAutograd, m) {
  m.impl("swiglu", &swiglu);
  m.impl("geglu", &geglu);
}

TORCH_LIBRARY_IMPL(FK_LIBRARY, Meta, m) {
  m.impl("glu_fwd", &swiglu_schema::fwd_meta);
  m.impl("glu_bwd", &swiglu_schema::bwd_meta);
}

}  // namespace foundry
