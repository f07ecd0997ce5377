// The operator foundry_kernels::cross_entropy: schema, shapes and autograd.
// cross_entropy_cpu.cpp and cross_entropy_cuda.cpp launch the kernels.
//
// cross_entropy is composed of cross_entropy_fwd and cross_entropy_bwd, which are what a compiled graph, a
// checkpointing policy or a profiler sees. lse_low and total_weight are what the backward pass needs beside lse: what
// lse's rounding took from it, and, for a mean, the sum of the weights of the targets that count.
#include "cross_entropy.h"

#include <torch/library.h>

#include "autograd.h"

namespace foundry {
namespace cross_entropy_schema {

CrossEntropyOutputs fwd_meta(const Tensor& logits, const Tensor& target, const OptionalTensor& weight, int64_t,
                             c10::string_view reduction, double, double, std::optional<double>, bool save_lse,
                             bool save_z_loss, bool save_stats) {
  return empty_cross_entropy_fwd(logits, target, weight, reduction_of(reduction), save_lse, save_z_loss, save_stats);
}

Tensor bwd_meta(const Tensor&, const Tensor& logits, const Tensor& target, const OptionalTensor& weight, const Tensor&,
                const Tensor&, const OptionalTensor&, int64_t, c10::string_view, double, double,
                std::optional<double>) {
  return empty_cross_entropy_bwd(logits, target, weight);
}

// The dispatcher finds the kernel of the tensors' device.
CrossEntropyOutputs call_fwd(const Tensor& logits, const Tensor& target, const OptionalTensor& weight,
                             int64_t ignore_index, c10::string_view reduction, double label_smoothing, double z_loss,
                             std::optional<double> softcap, bool save_lse, bool save_z_loss, bool save_stats) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow(FK_LIBRARY_NAME "::cross_entropy_fwd", "")
                             .typed<decltype(fwd_meta)>();
  return op.call(logits, target, weight, ignore_index, reduction, label_smoothing, z_loss, softcap, save_lse,
                 save_z_loss, save_stats);
}

class CrossEntropyFunction : public torch::autograd::Function<CrossEntropyFunction> {
 public:
  static variable_list forward(AutogradContext* ctx, const Tensor& logits, const Tensor& target,
                               const OptionalTensor& weight, int64_t ignore_index, c10::string_view reduction,
                               double label_smoothing, double z_loss, std::optional<double> softcap,
                               bool return_z_loss) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    auto [loss, lse, lse_low, z, total_weight] = call_fwd(logits, target, weight, ignore_index, reduction,
                                                          label_smoothing, z_loss, softcap, true, return_z_loss, true);
    const bool mean = reduction_of(reduction) == Reduction::mean;
    ctx->save_for_backward({logits, target, unwrap(weight), lse, lse_low, mean ? total_weight : Tensor()});
    ctx->saved_data["ignore_index"] = ignore_index;
    ctx->saved_data["reduction"] = std::string(reduction);
    ctx->saved_data["label_smoothing"] = label_smoothing;
    ctx->saved_data["z_loss"] = z_loss;
    ctx->saved_data["softcap"] = softcap;
    ctx->mark_non_differentiable({lse, z});
    return {loss, lse, z};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    refuse_second_derivative("cross_entropy");
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow(FK_LIBRARY_NAME "::cross_entropy_bwd", "")
                               .typed<decltype(bwd_meta)>();
    const auto [logits, target, weight, lse, lse_low, total_weight] = saved_tensors<6>(ctx);
    auto& data = ctx->saved_data;
    const Tensor dlogits =
        op.call(grads.front(), logits, target, wrap(weight), lse, lse_low, wrap(total_weight),
                data["ignore_index"].toInt(), data["reduction"].toStringRef(), data["label_smoothing"].toDouble(),
                data["z_loss"].toDouble(), data["softcap"].to<std::optional<double>>());
    variable_list gradients(9);  // one for each argument of forward
    gradients.front() = dlogits;
    return gradients;
  }
};

std::tuple<Tensor, Tensor, Tensor> cross_entropy(const Tensor& logits, const Tensor& target,
                                                 const OptionalTensor& weight, int64_t ignore_index,
                                                 c10::string_view reduction, double label_smoothing, double z_loss,
                                                 std::optional<double> softcap, bool return_lse, bool return_z_loss) {
  if (any_requires_grad(logits)) {
    auto out = CrossEntropyFunction::apply(logits, target, weight, ignore_index, reduction, label_smoothing, z_loss,
                                           softcap, return_z_loss);
    return {out[0], out[1], out[2]};
  }
  auto [loss, lse, lse_low, z, total_weight] =
      call_fwd(logits, target, weight, ignore_index, reduction, label_smoothing, z_loss, softcap, return_lse,
               return_z_loss, false);
  return {loss, lse, z};
}

}  // namespace cross_entropy_schema

TORCH_LIBRARY_FRAGMENT(FK_LIBRARY, m) {
  m.def(
      "cross_entropy(Tensor logits, Tensor target, Tensor? weight, int ignore_index, str reduction, "
      "float label_smoothing, float z_loss, float? softcap, bool return_lse, bool return_z_loss) "
      "-> (Tensor loss, Tensor lse, Tensor z_loss)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "cross_entropy_fwd(Tensor logits, Tensor target, Tensor? weight, int ignore_index, str reduction, "
      "float label_smoothing, float z_loss, float? softcap, bool save_lse, bool save_z_loss, bool save_stats) "
      "-> (Tensor loss, Tensor lse, Tensor lse_low, Tensor z_loss, Tensor total_weight)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "cross_entropy_bwd(Tensor dloss, Tensor logits, Tensor target, Tensor? weight, Tensor lse, Tensor lse_low, "
      "Tensor? total_weight, int ignore_index, str reduction, float label_smoothing, float z_loss, float? softcap) "
      "-> Tensor dlogits",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(FK_LIBRARY, CompositeImplicitAutograd, m) {
  m.impl("cross_entropy", &cross_entropy_schema::cross_entropy);
}

TORCH_LIBRARY_IMPL(FK_LIBRARY, Meta, m) {
  m.impl("cross_entropy_fwd", &cross_entropy_schema::fwd_meta);
  m.impl("cross_entropy_bwd", &cross_entropy_schema::bwd_meta);
}

}  // namespace foundry
