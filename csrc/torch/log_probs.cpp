// The operator foundry_kernels::log_probs, of log_probs_fwd and log_probs_bwd: schemas, shapes and autograd.
// log_probs_cpu.cpp launches the kernels.
#include "log_probs.h"

#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include "autograd.h"

namespace foundry {
namespace log_probs_schema {

LogProbsOutputs fwd_meta(const Tensor& logits, const Tensor& target, const LogProbsArguments&, bool save_entropy,
                         bool save_lse, bool save_low, bool save_stats) {
  return empty_log_probs_fwd(logits, target, save_entropy, save_lse, save_low, save_stats);
}

Tensor bwd_meta(const Tensor&, const OptionalTensor&, const OptionalTensor&, const Tensor& logits, const Tensor& target,
                const Tensor&, const Tensor&, const LogProbsArguments&) {
  return empty_cross_entropy_bwd(logits, target, {});
}

LogProbsOutputs call_fwd(const Tensor& logits, const Tensor& target, const LogProbsArguments& options,
                         bool save_entropy, bool save_lse, bool save_low, bool save_stats) {
  static const Operator<decltype(fwd_meta)> op(FK_LIBRARY_NAME "::log_probs_fwd");
  return op(logits, target, options, save_entropy, save_lse, save_low, save_stats);
}

const LogProbsArguments kUsual{-100, 1.0, std::nullopt};

class LogProbsFunction : public torch::autograd::Function<LogProbsFunction> {
 public:
  static variable_list forward(AutogradContext* ctx, const Tensor& logits, const Tensor& target,
                               const LogProbsArguments& options, bool return_entropy, bool return_lse,
                               bool return_stats) {
    auto [picked, entropy, lse, low, stats] =
        call_fwd(logits, target, options, return_entropy, true, true, return_stats);
    ctx->save_for_backward({logits, target, entropy, lse, low});
    save_unless_usual(ctx, options, kUsual);
    ctx->set_materialize_grads(false);
    variable_list unused{stats};
    if (!return_entropy) unused.push_back(entropy);
    if (!return_lse) unused.push_back(lse);
    ctx->mark_non_differentiable(unused);
    return {picked, entropy, lse, stats};
  }

  // Of each token the kernel takes g, c and b: its logits' gradient is [j = t] g + p_j (c - g + b (y_j - lse)).
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    refuse_second_derivative("log_probs");
    static const Operator<decltype(bwd_meta)> op(FK_LIBRARY_NAME "::log_probs_bwd");
    const auto [logits, target, entropy, lse, low] = saved_tensors<5>(ctx);
    const auto options = load_or_usual(ctx, kUsual);
    const Tensor g = grads[0].defined() ? grads[0] : at::zeros_like(lse);
    OptionalTensor c = wrap(grads[2]), b;
    if (grads[1].defined()) {
      b = grads[1].neg();
      const Tensor part = b->mul(entropy);
      c = c ? part.add(*c) : part;
    }
    return {op(g, c, b, logits, target, lse, low, options), {}, {}, {}, {}, {}};
  }
};

}  // namespace log_probs_schema

std::tuple<Tensor, Tensor, Tensor, Tensor> log_probs(const Tensor& logits, const Tensor& target,
                                                     const LogProbsArguments& options, bool return_entropy,
                                                     bool return_lse, bool return_stats) {
  if (any_requires_grad(logits)) {
    auto out =
        log_probs_schema::LogProbsFunction::apply(logits, target, options, return_entropy, return_lse, return_stats);
    return {out[0], out[1], out[2], out[3]};
  }
  auto [picked, entropy, lse, low, stats] =
      log_probs_schema::call_fwd(logits, target, options, return_entropy, return_lse, false, return_stats);
  return {picked, entropy, lse, stats};
}

TORCH_LIBRARY_FRAGMENT(FK_LIBRARY, m) {
  const std::string options = LogProbsArguments::schema();
  define_operator(m, "log_probs(Tensor logits, Tensor target, " + options +
                         ", bool return_entropy, bool return_lse, bool return_stats) "
                         "-> (Tensor log_probs, Tensor entropy, Tensor lse, Tensor stats)");
  define_operator(m, "log_probs_fwd(Tensor logits, Tensor target, " + options +
                         ", bool save_entropy, bool save_lse, bool save_low, bool save_stats) "
                         "-> (Tensor log_probs, Tensor entropy, Tensor lse, Tensor lse_low, Tensor stats)");
  define_operator(m,
                  "log_probs_bwd(Tensor dlog_probs, Tensor? dlse, Tensor? dentropy, Tensor logits, Tensor target, "
                  "Tensor lse, Tensor lse_low, " +
                      options + ") -> Tensor dlogits");
}

TORCH_LIBRARY_IMPL(FK_LIBRARY, CompositeImplicitAutograd, m) { m.impl("log_probs", flat_kernel<&log_probs>); }

TORCH_LIBRARY_IMPL(FK_LIBRARY, Meta, m) {
  m.impl("log_probs_fwd", flat_kernel<&log_probs_schema::fwd_meta>);
  m.impl("log_probs_bwd", flat_kernel<&log_probs_schema::bwd_meta>);
}

}  // namespace foundry
