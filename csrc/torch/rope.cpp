// The operators foundry_kernels::rope and qk_norm_rope: schema, shapes and autograd. rope_cpu.cpp and rope_cuda.cpp
// launch the kernels.
//
// rope consists of rope_apply, which rotates forward, or back for gradients. q or k may be absent. A result has the
// given storage order, by default that of its input. qk_norm_rope consists of qk_norm_rope_fwd, whose q_rstd and k_rstd
// are empty unless requested, and qk_norm_rope_bwd, whose q or k may be absent.
#include "rope.h"

#include <torch/library.h>

#include "autograd.h"
#include "operators.h"

namespace foundry {
namespace rope_schema {

std::tuple<Tensor, Tensor> apply_meta(const OptionalTensor& q, const OptionalTensor& k, const Tensor& cos,
                                      const Tensor& sin, const RopeOptions& options, bool, OptionalOrder q_order,
                                      OptionalOrder k_order) {
  check_rope(q, k, cos, sin, options);
  return empty_rope(q, k, q_order, k_order);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> fwd_meta(const Tensor& q, const Tensor& k, const OptionalTensor& q_weight,
                                                    const OptionalTensor& k_weight, const Tensor& cos,
                                                    const Tensor& sin, double, const WeightOptions&,
                                                    const RopeOptions& options, bool save_q_rstd, bool save_k_rstd) {
  check_rope(q, k, cos, sin, options);
  check_norms(q, q_weight, k_weight);
  return empty_qk_norm_rope_fwd(q, k, save_q_rstd, save_k_rstd);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> bwd_meta(const OptionalTensor& dq_out, const OptionalTensor& dk_out,
                                                    const OptionalTensor& q, const OptionalTensor& k,
                                                    const OptionalTensor& q_weight, const OptionalTensor& k_weight,
                                                    const Tensor& cos, const Tensor& sin, const OptionalTensor& q_rstd,
                                                    const OptionalTensor& k_rstd, const WeightOptions&,
                                                    const RopeOptions& options, bool need_dq, bool need_dk,
                                                    bool need_dq_weight, bool need_dk_weight) {
  check_rope(q, k, cos, sin, options);
  check_norms(either(q, k), q_weight, k_weight);
  check_side('q', q, q_rstd, dq_out, need_dq, need_dq_weight, q_weight);
  check_side('k', k, k_rstd, dk_out, need_dk, need_dk_weight, k_weight);
  return empty_qk_norm_rope_bwd(q, k, q_weight, k_weight, need_dq, need_dk, need_dq_weight, need_dk_weight);
}

std::tuple<Tensor, Tensor> call_apply(const OptionalTensor& q, const OptionalTensor& k, const Tensor& cos,
                                      const Tensor& sin, const RopeOptions& options, bool inverse,
                                      OptionalOrder q_order, OptionalOrder k_order) {
  static const Operator<decltype(apply_meta)> op(FK_LIBRARY_NAME "::rope_apply");
  return op(q, k, cos, sin, options, inverse, q_order, k_order);
}

auto call_fwd(const Tensor& q, const Tensor& k, const OptionalTensor& q_weight, const OptionalTensor& k_weight,
              const Tensor& cos, const Tensor& sin, double eps, const WeightOptions& weight_options,
              const RopeOptions& options, bool save_q_rstd, bool save_k_rstd) {
  static const Operator<decltype(fwd_meta)> op(FK_LIBRARY_NAME "::qk_norm_rope_fwd");
  return op(q, k, q_weight, k_weight, cos, sin, eps, weight_options, options, save_q_rstd, save_k_rstd);
}

class RopeFunction : public torch::autograd::Function<RopeFunction> {
 public:
  static variable_list forward(AutogradContext* ctx, const Tensor& q, const Tensor& k, const Tensor& cos,
                               const Tensor& sin, const RopeOptions& options) {
    ctx->set_materialize_grads(false);  // zeros would cost a pass, and would not be DTensors where the outputs are
    auto [q_out, k_out] = call_apply(q, k, cos, sin, options, false, std::nullopt, std::nullopt);
    variable_list saved{cos, sin};
    ctx->saved_data["options"] = save_options(options, saved);
    ctx->save_for_backward(std::move(saved));
    ctx->saved_data["q_order"] = storage_order(q);
    ctx->saved_data["k_order"] = storage_order(k);
    variable_list constant;
    if (!q.requires_grad()) constant.push_back(q_out);
    if (!k.requires_grad()) constant.push_back(k_out);
    ctx->mark_non_differentiable(constant);
    return {q_out, k_out};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    refuse_second_derivative("rope");
    const auto [cos, sin, positions] = saved_tensors<3>(ctx);
    const Tensor &dq_out = grads.front(), &dk_out = grads.back();
    NeedsGrad needs(ctx);
    const bool need_dq = needs.next() && dq_out.defined(), need_dk = needs.next() && dk_out.defined();
    const auto gradients = [](const Tensor& dq, const Tensor& dk) -> variable_list {
      return {dq, dk, /*cos*/ {}, /*sin*/ {}, /*options*/ {}};
    };
    if (!need_dq && !need_dk) return gradients({}, {});
    const auto q_order = ctx->saved_data["q_order"].toIntVector(), k_order = ctx->saved_data["k_order"].toIntVector();
    const RopeOptions options = load_options<RopeOptions>(&positions, ctx->saved_data.at("options"));
    if (!need_dq) {  // a side that is present goes first: DTensor of torch 2.11 looks for its mesh only there
      auto [dk, none] = call_apply(wrap(dk_out), std::nullopt, cos, sin, options, true, k_order, q_order);
      return gradients({}, dk);
    }
    auto [dq, dk] =
        call_apply(wrap(dq_out), need_dk ? wrap(dk_out) : std::nullopt, cos, sin, options, true, q_order, k_order);
    return gradients(dq, need_dk ? dk : Tensor());
  }
};

}  // namespace rope_schema

std::tuple<Tensor, Tensor> rope(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin,
                                const RopeOptions& options) {
  if (any_requires_grad(q, k)) {
    const variable_list out = rope_schema::RopeFunction::apply(q, k, cos, sin, options);
    return {out.front(), out.back()};
  }
  return rope_schema::call_apply(q, k, cos, sin, options, false, std::nullopt, std::nullopt);
}

namespace rope_schema {

class QkNormRopeFunction : public torch::autograd::Function<QkNormRopeFunction> {
 public:
  static variable_list forward(AutogradContext* ctx, const Tensor& q, const Tensor& k, const OptionalTensor& q_weight,
                               const OptionalTensor& k_weight, const Tensor& cos, const Tensor& sin, double eps,
                               const WeightOptions& weight_options, const RopeOptions& options) {
    ctx->set_materialize_grads(false);
    const bool save_q = requires_grad(q) || requires_grad(q_weight);
    const bool save_k = requires_grad(k) || requires_grad(k_weight);
    auto [q_out, k_out, q_rstd, k_rstd] =
        call_fwd(q, k, q_weight, k_weight, cos, sin, eps, weight_options, options, save_q, save_k);
    const Tensor none;  // a side that needs no gradient saves nothing
    variable_list saved{save_q ? q : none,
                        save_k ? k : none,
                        save_q ? unwrap(q_weight) : none,
                        save_k ? unwrap(k_weight) : none,
                        cos,
                        sin,
                        save_q ? q_rstd : none,
                        save_k ? k_rstd : none};
    ctx->saved_data["weight_options"] = save_options(weight_options, saved);
    ctx->saved_data["options"] = save_options(options, saved);
    ctx->save_for_backward(std::move(saved));
    ctx->saved_data["has_q_weight"] = q_weight.has_value();
    ctx->saved_data["has_k_weight"] = k_weight.has_value();
    variable_list constant;
    if (!save_q) constant.push_back(q_out);
    if (!save_k) constant.push_back(k_out);
    ctx->mark_non_differentiable(constant);
    return {q_out, k_out};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    refuse_second_derivative("qk_norm_rope");
    static const Operator<decltype(bwd_meta)> op(FK_LIBRARY_NAME "::qk_norm_rope_bwd");
    const auto [q, k, q_weight, k_weight, cos, sin, q_rstd, k_rstd, positions] = saved_tensors<9>(ctx);
    const Tensor &dq_out = grads.front(), &dk_out = grads.back();
    // A side is skipped if it needs no gradient or its result was not used.
    const bool has_q = q.defined() && dq_out.defined(), has_k = k.defined() && dk_out.defined();
    NeedsGrad needs(ctx);
    const bool need_dq = needs.next() && has_q, need_dk = needs.next() && has_k;
    const bool need_dq_weight = needs.next_if(ctx->saved_data["has_q_weight"].toBool()) && has_q;
    const bool need_dk_weight = needs.next_if(ctx->saved_data["has_k_weight"].toBool()) && has_k;
    const auto gradients = [](const Tensor& dq, const Tensor& dk, const Tensor& dq_weight,
                              const Tensor& dk_weight) -> variable_list {
      return {dq,
              dk,
              dq_weight,
              dk_weight,
              /*cos*/ {},
              /*sin*/ {},
              /*eps*/ {},
              /*weight_options*/ {},
              /*options*/ {}};
    };
    if (!has_q && !has_k) return gradients({}, {}, {}, {});
    const auto weight_options = load_options<WeightOptions>(nullptr, ctx->saved_data.at("weight_options"));
    const auto options = load_options<RopeOptions>(&positions, ctx->saved_data.at("options"));
    const auto wanted = [](bool need, const Tensor& t) { return need ? t : Tensor(); };
    if (!has_q) {  // as in RopeFunction
      const OptionalTensor none;
      const auto [dk, no_dq, dk_weight, no_dq_weight] =
          op(wrap(dk_out), none, wrap(k), none, wrap(k_weight), none, cos, sin, wrap(k_rstd), none, weight_options,
             options, need_dk, false, need_dk_weight, false);
      return gradients({}, wanted(need_dk, dk), {}, wanted(need_dk_weight, dk_weight));
    }
    const auto if_k = [&](const Tensor& t) { return has_k ? wrap(t) : std::nullopt; };
    const auto [dq, dk, dq_weight, dk_weight] =
        op(wrap(dq_out), if_k(dk_out), wrap(q), if_k(k), wrap(q_weight), if_k(k_weight), cos, sin, wrap(q_rstd),
           if_k(k_rstd), weight_options, options, need_dq, need_dk, need_dq_weight, need_dk_weight);
    return gradients(wanted(need_dq, dq), wanted(need_dk, dk), wanted(need_dq_weight, dq_weight),
                     wanted(need_dk_weight, dk_weight));
  }
};

}  // namespace rope_schema

std::tuple<Tensor, Tensor> qk_norm_rope(const Tensor& q, const Tensor& k, const OptionalTensor& q_weight,
                                        const OptionalTensor& k_weight, const Tensor& cos, const Tensor& sin,
                                        double eps, const WeightOptions& weight_options, const RopeOptions& options) {
  if (any_requires_grad(q, k, q_weight, k_weight)) {
    const variable_list out =
        rope_schema::QkNormRopeFunction::apply(q, k, q_weight, k_weight, cos, sin, eps, weight_options, options);
    return {out.front(), out.back()};
  }
  auto [q_out, k_out, q_rstd, k_rstd] =
      rope_schema::call_fwd(q, k, q_weight, k_weight, cos, sin, eps, weight_options, options, false, false);
  return {q_out, k_out};
}

TORCH_LIBRARY_FRAGMENT(FK_LIBRARY, m) {
  const std::string tables = "Tensor cos, Tensor sin, ", rotated = "(Tensor q_out, Tensor k_out";
  const std::string weights = "Tensor? q_weight, Tensor? k_weight, ";
  const std::string options = RopeOptions::schema(), both = WeightOptions::schema() + ", " + options;
  define_operator(m, "rope(Tensor q, Tensor k, " + tables + options + ") -> " + rotated + ")");
  define_operator(m, "rope_apply(Tensor? q, Tensor? k, " + tables + options +
                         ", bool inverse, int[]? q_order=None, int[]? k_order=None) -> " + rotated + ")");
  define_operator(
      m, "qk_norm_rope(Tensor q, Tensor k, " + weights + tables + "float eps, " + both + ") -> " + rotated + ")");
  define_operator(m, "qk_norm_rope_fwd(Tensor q, Tensor k, " + weights + tables + "float eps, " + both +
                         ", bool save_q_rstd, bool save_k_rstd) -> " + rotated + ", Tensor q_rstd, Tensor k_rstd)");
  define_operator(m, "qk_norm_rope_bwd(Tensor? dq_out, Tensor? dk_out, Tensor? q, Tensor? k, " + weights + tables +
                         "Tensor? q_rstd, Tensor? k_rstd, " + both +
                         ", bool need_dq, bool need_dk, bool need_dq_weight, bool need_dk_weight) -> "
                         "(Tensor dq, Tensor dk, Tensor dq_weight, Tensor dk_weight)");
}

TORCH_LIBRARY_IMPL(FK_LIBRARY, CompositeImplicitAutograd, m) {
  m.impl("rope", flat_kernel<&rope>);
  m.impl("qk_norm_rope", flat_kernel<&qk_norm_rope>);
}

TORCH_LIBRARY_IMPL(FK_LIBRARY, Meta, m) {
  m.impl("rope_apply", flat_kernel<&rope_schema::apply_meta>);
  m.impl("qk_norm_rope_fwd", flat_kernel<&rope_schema::fwd_meta>);
  m.impl("qk_norm_rope_bwd", flat_kernel<&rope_schema::bwd_meta>);
}

}  // namespace foundry
