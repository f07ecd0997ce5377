// The operator foundry_kernels::cross_entropy: schema, shapes and autograd. cross_entropy_cpu.cpp and
// cross_entropy_cuda.cpp launch the kernels.
//
// It consists of cross_entropy_fwd and cross_entropy_bwd, which compiled graphs, checkpointing policies and profilers
// see. Besides lse the backward pass needs lse_low, the rounding error of lse, and for a mean total_weight, the sum of
// the weights of the targets that are not ignored.
#include "cross_entropy.h"

#include <torch/library.h>

#include "autograd.h"

namespace foundry {
namespace cross_entropy_schema {

CrossEntropyOutputs fwd_meta(const Tensor& logits, const Tensor& target, const OptionalTensor& weight,
                             const LossOptions& options, bool save_lse, bool save_z_loss, bool save_stats) {
  return empty_cross_entropy_fwd(logits, target, weight, reduction_of(options.reduction), save_lse, save_z_loss,
                                 save_stats);
}

Tensor bwd_meta(const Tensor&, const Tensor& logits, const Tensor& target, const OptionalTensor& weight, const Tensor&,
                const Tensor&, const OptionalTensor&, const LossOptions&) {
  return empty_cross_entropy_bwd(logits, target, weight);
}

CrossEntropyOutputs call_fwd(const Tensor& logits, const Tensor& target, const OptionalTensor& weight,
                             const LossOptions& options, bool save_lse, bool save_z_loss, bool save_stats) {
  static const Operator<decltype(fwd_meta)> op(FK_LIBRARY_NAME "::cross_entropy_fwd");
  return op(logits, target, weight, options, save_lse, save_z_loss, save_stats);
}

Tensor call_bwd(const Tensor& dloss, const Tensor& logits, const Tensor& target, const OptionalTensor& weight,
                const Tensor& lse, const Tensor& lse_low, const OptionalTensor& total_weight,
                const LossOptions& options) {
  static const Operator<decltype(bwd_meta)> op(FK_LIBRARY_NAME "::cross_entropy_bwd");
  return op(dloss, logits, target, weight, lse, lse_low, total_weight, options);
}

class CrossEntropyFunction : public torch::autograd::Function<CrossEntropyFunction> {
 public:
  // `outputs` gets the other results, which have no gradient.
  static Tensor forward(AutogradContext* ctx, const Tensor& logits, const Tensor& target, const OptionalTensor& weight,
                        const LossOptions& options, bool return_z_loss, CrossEntropyOutputs* outputs) {
    *outputs = call_fwd(logits, target, weight, options, true, return_z_loss, true);
    const auto& [loss, lse, lse_low, z, total_weight] = *outputs;
    const bool mean = reduction_of(options.reduction) == Reduction::mean;
    ctx->save_for_backward({logits, target, unwrap(weight), lse, lse_low, mean ? total_weight : Tensor()});
    save_unless_usual(ctx, options, kUsualLoss);
    return loss;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    refuse_second_derivative("cross_entropy");
    const auto [logits, target, weight, lse, lse_low, total_weight] = saved_tensors<6>(ctx);
    const auto options = load_or_usual(ctx, kUsualLoss);
    const Tensor dlogits =
        call_bwd(grads.front(), logits, target, wrap(weight), lse, lse_low, wrap(total_weight), options);
    return {dlogits, /*target*/ {}, /*weight*/ {}, /*options*/ {}, /*return_z_loss*/ {}, /*outputs*/ {}};
  }
};

}  // namespace cross_entropy_schema

std::tuple<Tensor, Tensor, Tensor> cross_entropy(const Tensor& logits, const Tensor& target,
                                                 const OptionalTensor& weight, const LossOptions& options,
                                                 bool return_lse, bool return_z_loss) {
  if (any_requires_grad(logits)) {
    CrossEntropyOutputs outputs;
    const Tensor loss =
        cross_entropy_schema::CrossEntropyFunction::apply(logits, target, weight, options, return_z_loss, &outputs);
    return {loss, std::get<1>(outputs), std::get<3>(outputs)};
  }
  auto [loss, lse, lse_low, z, total_weight] =
      cross_entropy_schema::call_fwd(logits, target, weight, options, return_lse, return_z_loss, false);
  return {loss, lse, z};
}

TORCH_LIBRARY_FRAGMENT(FK_LIBRARY, m) {
  const std::string inputs = "Tensor logits, Tensor target, Tensor? weight, ", options = LossOptions::schema();
  define_operator(m, "cross_entropy(" + inputs + options + ", bool return_lse, bool return_z_loss) " +
                         "-> (Tensor loss, Tensor lse, Tensor z_loss)");
  define_operator(m, "cross_entropy_fwd(" + inputs + options + ", bool save_lse, bool save_z_loss, bool save_stats) " +
                         "-> (Tensor loss, Tensor lse, Tensor lse_low, Tensor z_loss, Tensor total_weight)");
  define_operator(m, "cross_entropy_bwd(Tensor dloss, " + inputs + "Tensor lse, Tensor lse_low, " +
                         "Tensor? total_weight, " + options + ") -> Tensor dlogits");
}

TORCH_LIBRARY_IMPL(FK_LIBRARY, CompositeImplicitAutograd, m) { m.impl("cross_entropy", flat_kernel<&cross_entropy>); }

TORCH_LIBRARY_IMPL(FK_LIBRARY, Meta, m) {
  m.impl("cross_entropy_fwd", flat_kernel<&cross_entropy_schema::fwd_meta>);
  m.impl("cross_entropy_bwd", flat_kernel<&cross_entropy_schema::bwd_meta>);
}

}  // namespace foundry
