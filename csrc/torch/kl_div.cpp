// The operator foundry_kernels::kl_div, of kl_div_fwd and kl_div_bwd: schemas, shapes and autograd. kl_div_cpu.cpp
// launches the kernels.
#include "kl_div.h"

#include <torch/library.h>

#include "autograd.h"

namespace foundry {
namespace kl_div_schema {

Tensor fwd_meta(const Tensor& logits, const Tensor& teacher_logits, const Tensor& target, const KlDivArguments&) {
  return empty_kl_div_losses(logits, teacher_logits, target);
}

Tensor bwd_meta(const Tensor&, const Tensor& logits, const Tensor& teacher_logits, const Tensor& target,
                const KlDivArguments&) {
  return empty_kl_div_gradient(logits, teacher_logits, target);
}

Tensor call_fwd(const Tensor& logits, const Tensor& teacher_logits, const Tensor& target, const KlDivArguments& options,
                std::optional<int64_t> n_counted) {
  static const Operator<decltype(fwd_meta)> op(FK_LIBRARY_NAME "::kl_div_fwd");
  const Tensor each = op(logits, teacher_logits, target, options);
  if (!n_counted) return each;
  Tensor sum = each.sum(at::kDouble).to(each.scalar_type());  // as ops/_sums.py
  return *n_counted == 1 ? sum : sum.div_(*n_counted);
}

const KlDivArguments kUsual{-100, 1.0, "forward", 0.5, std::nullopt, std::nullopt};

class KlDivFunction : public torch::autograd::Function<KlDivFunction> {
 public:
  static Tensor forward(AutogradContext* ctx, const Tensor& logits, const Tensor& teacher_logits, const Tensor& target,
                        const KlDivArguments& options, std::optional<int64_t> n_counted) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    ctx->save_for_backward({logits, teacher_logits, target});
    save_unless_usual(ctx, options, kUsual);
    if (n_counted) ctx->saved_data["n_counted"] = *n_counted;
    return call_fwd(logits, teacher_logits, target, options, n_counted);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    refuse_second_derivative("kl_div");
    static const Operator<decltype(bwd_meta)> op(FK_LIBRARY_NAME "::kl_div_bwd");
    const auto [logits, teacher_logits, target] = saved_tensors<3>(ctx);
    const auto options = load_or_usual(ctx, kUsual);
    Tensor dloss = grads[0];
    if (const auto found = ctx->saved_data.find("n_counted"); found != ctx->saved_data.end()) {
      const int64_t n_counted = found->second.toInt();
      dloss = (n_counted == 1 ? dloss : dloss.div(n_counted)).expand(target.sizes());
    }
    return {op(dloss, logits, teacher_logits, target, options), {}, {}, {}, {}};
  }
};

Tensor kl_div(const Tensor& logits, const Tensor& teacher_logits, const Tensor& target, const KlDivArguments& options) {
  return foundry::kl_div(logits, teacher_logits, target, options, std::nullopt);
}

}  // namespace kl_div_schema

Tensor kl_div(const Tensor& logits, const Tensor& teacher_logits, const Tensor& target, const KlDivArguments& options,
              std::optional<int64_t> n_counted) {
  if (any_requires_grad(logits))
    return kl_div_schema::KlDivFunction::apply(logits, teacher_logits, target, options, n_counted);
  return kl_div_schema::call_fwd(logits, teacher_logits, target, options, n_counted);
}

TORCH_LIBRARY_FRAGMENT(FK_LIBRARY, m) {
  const std::string inputs = "Tensor logits, Tensor teacher_logits, Tensor target, " + KlDivArguments::schema();
  define_operator(m, "kl_div(" + inputs + ") -> Tensor loss");
  define_operator(m, "kl_div_fwd(" + inputs + ") -> Tensor loss");
  define_operator(m, "kl_div_bwd(Tensor dloss, " + inputs + ") -> Tensor dlogits");
}

TORCH_LIBRARY_IMPL(FK_LIBRARY, CompositeImplicitAutograd, m) { m.impl("kl_div", flat_kernel<&kl_div_schema::kl_div>); }

TORCH_LIBRARY_IMPL(FK_LIBRARY, Meta, m) {
  m.impl("kl_div_fwd", flat_kernel<&kl_div_schema::fwd_meta>);
  m.impl("kl_div_bwd", flat_kernel<&kl_div_schema::bwd_meta>);
}

}  // namespace foundry
