// The operator foundry_kernels::grouped_mm: schema, shapes and autograd. grouped_mm_cpu.cpp and grouped_mm_cuda.cpp
// launch the kernels.
//
// It consists of grouped_mm_fwd and grouped_mm_bwd, which compiled graphs, checkpointing policies and profilers see.
// grouped_mm_bwd returns (dx, dweight); each is empty unless requested.
#include "grouped_mm.h"

#include <torch/library.h>

#include "autograd.h"
#include "options.h"

namespace foundry {
namespace grouped_mm_schema {

Tensor fwd_meta(const Tensor& x, const Tensor& weight, const Tensor& offs, bool) {
  return empty_grouped_mm_fwd(x, weight, offs);
}

std::tuple<Tensor, Tensor> bwd_meta(const Tensor&, const Tensor& x, const Tensor& weight, const Tensor& offs, bool,
                                    bool need_dx, bool need_dweight) {
  return empty_grouped_mm_bwd(x, weight, offs, need_dx, need_dweight);
}

Tensor call_fwd(const Tensor& x, const Tensor& weight, const Tensor& offs, bool batch_invariant) {
  static const Operator<decltype(fwd_meta)> op(FK_LIBRARY_NAME "::grouped_mm_fwd");
  return op(x, weight, offs, batch_invariant);
}

class GroupedMmFunction : public torch::autograd::Function<GroupedMmFunction> {
 public:
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight, const Tensor& offs,
                        bool batch_invariant) {
    ctx->save_for_backward({x, weight, offs});
    ctx->saved_data["batch_invariant"] = batch_invariant;
    return call_fwd(x, weight, offs, batch_invariant);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    refuse_second_derivative("grouped_mm");
    static const Operator<decltype(bwd_meta)> op(FK_LIBRARY_NAME "::grouped_mm_bwd");
    const auto [x, weight, offs] = saved_tensors<3>(ctx);
    NeedsGrad needs(ctx);
    const bool need_dx = needs.next(), need_dweight = needs.next();
    const bool batch_invariant = ctx->saved_data["batch_invariant"].toBool();
    auto [dx, dweight] = op(grads.front(), x, weight, offs, batch_invariant, need_dx, need_dweight);
    return {need_dx ? dx : Tensor(), need_dweight ? dweight : Tensor(), /*offs*/ {}, /*batch_invariant*/ {}};
  }
};

}  // namespace grouped_mm_schema

Tensor grouped_mm(const Tensor& x, const Tensor& weight, const Tensor& offs, bool batch_invariant) {
  using namespace grouped_mm_schema;
  if (any_requires_grad(x, weight)) return GroupedMmFunction::apply(x, weight, offs, batch_invariant);
  return call_fwd(x, weight, offs, batch_invariant);
}

TORCH_LIBRARY_FRAGMENT(FK_LIBRARY, m) {
  m.def("grouped_mm(Tensor x, Tensor weight, Tensor offs, bool batch_invariant) -> Tensor",
        {at::Tag::pt2_compliant_tag});
  m.def("grouped_mm_fwd(Tensor x, Tensor weight, Tensor offs, bool batch_invariant) -> Tensor",
        {at::Tag::pt2_compliant_tag});
  m.def(
      "grouped_mm_bwd(Tensor dy, Tensor x, Tensor weight, Tensor offs, bool batch_invariant, bool need_dx, "
      "bool need_dweight) "
      "-> (Tensor dx, Tensor dweight)",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(FK_LIBRARY, CompositeImplicitAutograd, m) { m.impl("grouped_mm", &grouped_mm); }

TORCH_LIBRARY_IMPL(FK_LIBRARY, Meta, m) {
  m.impl("grouped_mm_fwd", &grouped_mm_schema::fwd_meta);
  m.impl("grouped_mm_bwd", &grouped_mm_schema::bwd_meta);
}

}  // namespace foundry
