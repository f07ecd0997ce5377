// The operator foundry_kernels::combine_experts: schema, shapes and autograd. combine_experts_cpu.cpp and
// combine_experts_cuda.cpp launch the kernels.
//
// It consists of combine_experts_fwd and combine_experts_bwd, which compiled graphs, checkpointing policies and
// profilers see. combine_experts_bwd returns (dx, dweights); each is empty unless requested.
#include "combine_experts.h"

#include <torch/library.h>

#include "autograd.h"
#include "operators.h"
#include "options.h"

namespace foundry {
namespace combine_experts_schema {

Tensor fwd_meta(const Tensor& x, const OptionalTensor& weights, const Tensor& slots) {
  return empty_combine_experts_fwd(x, weights, slots);
}

std::tuple<Tensor, Tensor> bwd_meta(const Tensor&, const Tensor& x, const OptionalTensor& weights, const Tensor& slots,
                                    bool need_dx, bool need_dweights) {
  return empty_combine_experts_bwd(x, weights, slots, need_dx, need_dweights);
}

Tensor call_fwd(const Tensor& x, const OptionalTensor& weights, const Tensor& slots) {
  static const Operator<decltype(fwd_meta)> op(FK_LIBRARY_NAME "::combine_experts_fwd");
  return op(x, weights, slots);
}

class CombineExpertsFunction : public torch::autograd::Function<CombineExpertsFunction> {
 public:
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const OptionalTensor& weights, const Tensor& slots) {
    ctx->save_for_backward({x, unwrap(weights), slots});
    return call_fwd(x, weights, slots);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    refuse_second_derivative("combine_experts");
    static const Operator<decltype(bwd_meta)> op(FK_LIBRARY_NAME "::combine_experts_bwd");
    const auto [x, weights, slots] = saved_tensors<3>(ctx);
    NeedsGrad needs(ctx);
    const bool need_dx = needs.next(), need_dweights = needs.next_if(weights.defined());
    auto [dx, dweights] = op(grads.front(), x, wrap(weights), slots, need_dx, need_dweights);
    return {need_dx ? dx : Tensor(), need_dweights ? dweights : Tensor(), /*slots*/ {}};
  }
};

}  // namespace combine_experts_schema

Tensor combine_experts(const Tensor& x, const OptionalTensor& weights, const Tensor& slots) {
  using namespace combine_experts_schema;
  if (any_requires_grad(x, weights)) return CombineExpertsFunction::apply(x, weights, slots);
  return call_fwd(x, weights, slots);
}

TORCH_LIBRARY_FRAGMENT(FK_LIBRARY, m) {
  m.def("combine_experts(Tensor x, Tensor? weights, Tensor slots) -> Tensor", {at::Tag::pt2_compliant_tag});
  m.def("combine_experts_fwd(Tensor x, Tensor? weights, Tensor slots) -> Tensor", {at::Tag::pt2_compliant_tag});
  m.def(
      "combine_experts_bwd(Tensor dy, Tensor x, Tensor? weights, Tensor slots, bool need_dx, bool need_dweights) "
      "-> (Tensor dx, Tensor dweights)",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(FK_LIBRARY, CompositeImplicitAutograd, m) { m.impl("combine_experts", &combine_experts); }

TORCH_LIBRARY_IMPL(FK_LIBRARY, Meta, m) {
  m.impl("combine_experts_fwd", &combine_experts_schema::fwd_meta);
  m.impl("combine_experts_bwd", &combine_experts_schema::bwd_meta);
}

}  // namespace foundry
