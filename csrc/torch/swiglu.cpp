// The operators foundry_kernels::swiglu, geglu, glu and reglu: schema, shapes and autograd. swiglu_cpu.cpp and
// swiglu_cuda.cpp launch the kernels.
//
// All consist of glu_fwd and glu_bwd, which compiled graphs, checkpointing policies and profilers see. Without `up`,
// gate is packed [..., 2N], in halves or interleaved, and so is its gradient. glu_bwd returns (dgate, dup); each is
// empty unless requested.
#include "swiglu.h"

#include <torch/library.h>

#include "autograd.h"
#include "operators.h"

namespace foundry {
namespace swiglu_schema {

Tensor fwd_meta(const Tensor& gate, const OptionalTensor& up, c10::string_view, const GatedOptions& options) {
  return empty_glu_fwd(gate, up, options);
}

std::tuple<Tensor, Tensor> bwd_meta(const Tensor&, const Tensor& gate, const OptionalTensor& up, c10::string_view,
                                    bool need_dgate, bool need_dup, const GatedOptions& options) {
  return empty_glu_bwd(gate, up, need_dgate, need_dup, options);
}

Tensor call_fwd(const Tensor& gate, const OptionalTensor& up, c10::string_view activation,
                const GatedOptions& options) {
  static const Operator<decltype(fwd_meta)> op(FK_LIBRARY_NAME "::glu_fwd");
  return op(gate, up, activation, options);
}

// The public function for an activation.
const char* name_of(std::string_view activation) {
  return activation == "silu" ? "swiglu" : activation == "sigmoid" ? "glu" : activation == "relu" ? "reglu" : "geglu";
}

class GluFunction : public torch::autograd::Function<GluFunction> {
 public:
  static Tensor forward(AutogradContext* ctx, const Tensor& gate, const OptionalTensor& up, c10::string_view activation,
                        const GatedOptions& options) {
    variable_list saved{gate, unwrap(up)};
    ctx->saved_data["activation"] = std::string(activation);
    // Saving the options takes longer than a small call, so defaults are not saved.
    if (options.changed() || options.interleaved || options.dropout_seed)
      ctx->saved_data["options"] = save_options(options, saved);
    else saved.emplace_back();
    ctx->save_for_backward(std::move(saved));
    return call_fwd(gate, up, activation, options);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const std::string activation = ctx->saved_data["activation"].toStringRef();
    refuse_second_derivative(name_of(activation));
    static const Operator<decltype(bwd_meta)> op(FK_LIBRARY_NAME "::glu_bwd");
    const auto [gate, up, seed] = saved_tensors<3>(ctx);
    const Tensor& dy = grads.front();
    NeedsGrad needs(ctx);
    const bool need_dgate = needs.next(), need_dup = needs.next_if(up.defined());
    const auto saved = ctx->saved_data.find("options");
    const auto options =
        saved == ctx->saved_data.end() ? GatedOptions() : load_options<GatedOptions>(&seed, saved->second);
    auto [dgate, dup] = op(dy, gate, wrap(up), activation, need_dgate, need_dup, options);
    return {need_dgate ? dgate : Tensor(), need_dup ? dup : Tensor(), /*activation*/ {}, /*options*/ {}};
  }
};

Tensor glu(const Tensor& gate, const OptionalTensor& up, c10::string_view activation, const GatedOptions& options) {
  if (any_requires_grad(gate, up)) return GluFunction::apply(gate, up, activation, options);
  return call_fwd(gate, up, activation, options);
}

}  // namespace swiglu_schema

namespace {

GatedOptions only(const DropoutOptions& dropout) {
  GatedOptions options;
  options.dropout_p = dropout.dropout_p;
  options.dropout_seed = dropout.dropout_seed;
  return options;
}

}  // namespace

Tensor swiglu(const Tensor& gate, const OptionalTensor& up, const GatedOptions& options) {
  return swiglu_schema::glu(gate, up, "silu", options);
}

Tensor geglu(const Tensor& gate, const OptionalTensor& up, c10::string_view approximate,
             const DropoutOptions& dropout) {
  TORCH_CHECK_VALUE(approximate == "none" || approximate == "tanh", "approximate must be one of none, tanh; got ",
                    approximate);
  return swiglu_schema::glu(gate, up, approximate == "tanh" ? "gelu_tanh" : "gelu", only(dropout));
}

Tensor glu(const Tensor& gate, const OptionalTensor& up, const DropoutOptions& dropout) {
  return swiglu_schema::glu(gate, up, "sigmoid", only(dropout));
}

Tensor reglu(const Tensor& gate, const OptionalTensor& up, const DropoutOptions& dropout) {
  return swiglu_schema::glu(gate, up, "relu", only(dropout));
}

TORCH_LIBRARY_FRAGMENT(FK_LIBRARY, m) {
  const std::string inputs = "Tensor gate, Tensor? up, ", options = GatedOptions::schema(),
                    dropout = DropoutOptions::schema();
  define_operator(m, "swiglu(" + inputs + options + ") -> Tensor");
  define_operator(m, "geglu(" + inputs + "str approximate, " + dropout + ") -> Tensor");
  define_operator(m, "glu(" + inputs + dropout + ") -> Tensor");
  define_operator(m, "reglu(" + inputs + dropout + ") -> Tensor");
  define_operator(m, "glu_fwd(" + inputs + "str activation, " + options + ") -> Tensor");
  define_operator(m, "glu_bwd(Tensor dy, " + inputs + "str activation, bool need_dgate, bool need_dup, " + options +
                         ") -> (Tensor dgate, Tensor dup)");
}

TORCH_LIBRARY_IMPL(FK_LIBRARY, CompositeImplicitAutograd, m) {
  m.impl("swiglu", flat_kernel<&swiglu>);
  m.impl("geglu", flat_kernel<&geglu>);
  m.impl("glu", flat_kernel<&glu>);
  m.impl("reglu", flat_kernel<&reglu>);
}

TORCH_LIBRARY_IMPL(FK_LIBRARY, Meta, m) {
  m.impl("glu_fwd", flat_kernel<&swiglu_schema::fwd_meta>);
  m.impl("glu_bwd", flat_kernel<&swiglu_schema::bwd_meta>);
}

}  // namespace foundry
