// The operators foundry_kernels::rope and qk_norm_rope: schema, shapes and autograd.
// rope_cpu.cpp and rope_cuda.cpp launch the kernels.
//
// rope is composed of rope_apply, which turns forward or, for gradients, back; of q and k either may be absent. Results
// lie in memory in the order that is given, or else in that of their input.
// qk_norm_rope is composed of qk_norm_rope_fwd, whose q_rstd and k_rstd are empty unless they were asked for, and
// qk_norm_rope_bwd.
#include "rope.h"

#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

namespace foundry {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

std::tuple<Tensor, Tensor> apply_meta(const OptionalTensor& q, const OptionalTensor& k, const Tensor& cos,
                                      const Tensor& sin, bool, const OptionalTensor& positions, bool,
                                      OptionalOrder q_order, OptionalOrder k_order) {
  check_rope(unwrap(q), unwrap(k), cos, sin, unwrap(positions));
  return empty_rope(unwrap(q), unwrap(k), q_order, k_order);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> fwd_meta(const Tensor& q, const Tensor& k, const OptionalTensor& q_weight,
                                                    const OptionalTensor& k_weight, const Tensor& cos,
                                                    const Tensor& sin, double, double, bool, bool,
                                                    const OptionalTensor& positions, bool save_rstd) {
  check_rope(q, k, cos, sin, unwrap(positions));
  check_weight("q_weight", unwrap(q_weight), q);
  check_weight("k_weight", unwrap(k_weight), q);
  return {empty_in_storage_order(q), empty_in_storage_order(k), empty_rstd(q, save_rstd), empty_rstd(k, save_rstd)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> bwd_meta(const Tensor&, const Tensor&, const Tensor& q, const Tensor& k,
                                                    const OptionalTensor& q_weight, const OptionalTensor& k_weight,
                                                    const Tensor&, const Tensor&, const Tensor&, const Tensor&, double,
                                                    bool, bool, const OptionalTensor&, bool need_dq, bool need_dk,
                                                    bool need_dq_weight, bool need_dk_weight) {
  return {empty_gradient(q, need_dq), empty_gradient(k, need_dk),
          empty_weight_gradient("q_weight", unwrap(q_weight), q, need_dq_weight),
          empty_weight_gradient("k_weight", unwrap(k_weight), k, need_dk_weight)};
}

// The dispatcher finds the kernel of the tensors' device.
std::tuple<Tensor, Tensor> call_apply(const OptionalTensor& q, const OptionalTensor& k, const Tensor& cos,
                                      const Tensor& sin, bool interleaved, const OptionalTensor& positions,
                                      bool inverse, OptionalOrder q_order, OptionalOrder k_order) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow(FK_LIBRARY_NAME "::rope_apply", "").typed<decltype(apply_meta)>();
  return op.call(q, k, cos, sin, interleaved, positions, inverse, q_order, k_order);
}

auto call_fwd(const Tensor& q, const Tensor& k, const OptionalTensor& q_weight, const OptionalTensor& k_weight,
              const Tensor& cos, const Tensor& sin, double eps, double weight_offset, bool round_before_weight,
              bool interleaved, const OptionalTensor& positions, bool save_rstd) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow(FK_LIBRARY_NAME "::qk_norm_rope_fwd", "")
                             .typed<decltype(fwd_meta)>();
  return op.call(q, k, q_weight, k_weight, cos, sin, eps, weight_offset, round_before_weight, interleaved, positions,
                 save_rstd);
}

bool requires_grad(const OptionalTensor& t) { return t.has_value() && t->requires_grad(); }

class RopeFunction : public torch::autograd::Function<RopeFunction> {
 public:
  static variable_list forward(AutogradContext* ctx, const Tensor& q, const Tensor& k, const Tensor& cos,
                               const Tensor& sin, bool interleaved, const OptionalTensor& positions) {
    ctx->set_materialize_grads(false);  // zeros would cost a pass, and are no DTensor where the outputs are
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    auto [q_out, k_out] = call_apply(q, k, cos, sin, interleaved, positions, false, std::nullopt, std::nullopt);
    ctx->save_for_backward({cos, sin, unwrap(positions)});
    ctx->saved_data["interleaved"] = interleaved;
    ctx->saved_data["q_order"] = storage_order(q);
    ctx->saved_data["k_order"] = storage_order(k);
    variable_list constant;
    if (!q.requires_grad()) constant.push_back(q_out);
    if (!k.requires_grad()) constant.push_back(k_out);
    ctx->mark_non_differentiable(constant);
    return {q_out, k_out};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    TORCH_CHECK(!at::GradMode::is_enabled(),
                "rope has no second derivative: backward was called with create_graph=True");
    const auto saved = ctx->get_saved_variables();
    const bool need_dq = ctx->needs_input_grad(0) && grads[0].defined();
    const bool need_dk = ctx->needs_input_grad(1) && grads[1].defined();
    if (!need_dq && !need_dk) return variable_list(6);
    const auto q_order = ctx->saved_data["q_order"].toIntVector(), k_order = ctx->saved_data["k_order"].toIntVector();
    auto [dq, dk] =
        call_apply(need_dq ? OptionalTensor(grads[0]) : std::nullopt, need_dk ? OptionalTensor(grads[1]) : std::nullopt,
                   saved[0], saved[1], ctx->saved_data["interleaved"].toBool(), wrap(saved[2]), true, q_order, k_order);
    return {need_dq ? dq : Tensor(), need_dk ? dk : Tensor(), Tensor(), Tensor(), Tensor(), Tensor()};
  }
};

std::tuple<Tensor, Tensor> rope(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin,
                                bool interleaved, const OptionalTensor& positions) {
  if (at::GradMode::is_enabled() && (q.requires_grad() || k.requires_grad())) {
    auto out = RopeFunction::apply(q, k, cos, sin, interleaved, positions);
    return {out[0], out[1]};
  }
  return call_apply(q, k, cos, sin, interleaved, positions, false, std::nullopt, std::nullopt);
}

class QkNormRopeFunction : public torch::autograd::Function<QkNormRopeFunction> {
 public:
  static variable_list forward(AutogradContext* ctx, const Tensor& q, const Tensor& k, const OptionalTensor& q_weight,
                               const OptionalTensor& k_weight, const Tensor& cos, const Tensor& sin, double eps,
                               double weight_offset, bool round_before_weight, bool interleaved,
                               const OptionalTensor& positions) {
    ctx->set_materialize_grads(false);
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    auto [q_out, k_out, q_rstd, k_rstd] = call_fwd(q, k, q_weight, k_weight, cos, sin, eps, weight_offset,
                                                   round_before_weight, interleaved, positions, true);
    const bool save_q = q.requires_grad() || requires_grad(q_weight);
    const bool save_k = k.requires_grad() || requires_grad(k_weight);
    const Tensor none;  // nothing is kept of a side that takes no gradient
    ctx->save_for_backward({save_q ? q : none, save_k ? k : none, save_q ? unwrap(q_weight) : none,
                            save_k ? unwrap(k_weight) : none, cos, sin, save_q ? q_rstd : none, save_k ? k_rstd : none,
                            unwrap(positions)});
    ctx->saved_data["has_q_weight"] = q_weight.has_value();
    ctx->saved_data["weight_offset"] = weight_offset;
    ctx->saved_data["round_before_weight"] = round_before_weight;
    ctx->saved_data["interleaved"] = interleaved;
    variable_list constant;
    if (!save_q) constant.push_back(q_out);
    if (!save_k) constant.push_back(k_out);
    ctx->mark_non_differentiable(constant);
    return {q_out, k_out};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    TORCH_CHECK(!at::GradMode::is_enabled(),
                "qk_norm_rope has no second derivative: backward was called with create_graph=True");
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow(FK_LIBRARY_NAME "::qk_norm_rope_bwd", "")
                               .typed<decltype(bwd_meta)>();
    auto saved = ctx->get_saved_variables();
    const bool has_q = saved[0].defined() && grads[0].defined(), has_k = saved[1].defined() && grads[1].defined();
    if (!has_q && !has_k) return variable_list(11);
    for (int side = 0; side < 2; ++side) {  // one that is absent, or whose result was not used, has no heads
      if (side == 0 ? has_q : has_k) continue;
      const Tensor& other = saved[1 - side];
      saved[side] = other.new_empty_symint({other.sym_size(0), 0, other.sym_size(2), other.sym_size(3)});
      saved[2 + side] = Tensor();
      saved[6 + side] = other.new_empty({0}, other.options().dtype(at::kFloat));
      grads[side] = saved[side];
    }
    // needs_input_grad counts the tensors that were given, so an absent weight moves the next one forward.
    const bool need_dq = has_q && ctx->needs_input_grad(0), need_dk = has_k && ctx->needs_input_grad(1);
    const bool need_dq_weight = saved[2].defined() && ctx->needs_input_grad(2);
    const int k_weight_index = ctx->saved_data["has_q_weight"].toBool() ? 3 : 2;
    const bool need_dk_weight = saved[3].defined() && ctx->needs_input_grad(k_weight_index);
    auto [dq, dk, dq_weight, dk_weight] = op.call(
        grads[0], grads[1], saved[0], saved[1], wrap(saved[2]), wrap(saved[3]), saved[4], saved[5], saved[6], saved[7],
        ctx->saved_data["weight_offset"].toDouble(), ctx->saved_data["round_before_weight"].toBool(),
        ctx->saved_data["interleaved"].toBool(), wrap(saved[8]), need_dq, need_dk, need_dq_weight, need_dk_weight);
    variable_list out(11);
    if (need_dq) out[0] = dq;
    if (need_dk) out[1] = dk;
    if (need_dq_weight) out[2] = dq_weight;
    if (need_dk_weight) out[3] = dk_weight;
    return out;
  }
};

std::tuple<Tensor, Tensor> qk_norm_rope(const Tensor& q, const Tensor& k, const OptionalTensor& q_weight,
                                        const OptionalTensor& k_weight, const Tensor& cos, const Tensor& sin,
                                        double eps, double weight_offset, bool round_before_weight, bool interleaved,
                                        const OptionalTensor& positions) {
  const bool wanted = q.requires_grad() || k.requires_grad() || requires_grad(q_weight) || requires_grad(k_weight);
  if (at::GradMode::is_enabled() && wanted) {
    auto out = QkNormRopeFunction::apply(q, k, q_weight, k_weight, cos, sin, eps, weight_offset, round_before_weight,
                                         interleaved, positions);
    return {out[0], out[1]};
  }
  auto [q_out, k_out, q_rstd, k_rstd] = call_fwd(q, k, q_weight, k_weight, cos, sin, eps, weight_offset,
                                                 round_before_weight, interleaved, positions, false);
  return {q_out, k_out};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(FK_LIBRARY, m) {
  m.def(
      "rope(Tensor q, Tensor k, Tensor cos, Tensor sin, bool interleaved, Tensor? positions) -> (Tensor q_out, Tensor "
      "k_out)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "rope_apply(Tensor? q, Tensor? k, Tensor cos, Tensor sin, bool interleaved, Tensor? positions, bool inverse, "
      "int[]? q_order=None, int[]? k_order=None) -> (Tensor q_out, Tensor k_out)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "qk_norm_rope(Tensor q, Tensor k, Tensor? q_weight, Tensor? k_weight, Tensor cos, Tensor sin, float eps, "
      "float weight_offset, bool round_before_weight, bool interleaved, Tensor? positions) -> (Tensor q_out, Tensor "
      "k_out)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "qk_norm_rope_fwd(Tensor q, Tensor k, Tensor? q_weight, Tensor? k_weight, Tensor cos, Tensor sin, float eps, "
      "float weight_offset, bool round_before_weight, bool interleaved, Tensor? positions, bool save_rstd) -> (Tensor "
      "q_out, Tensor k_out, Tensor q_rstd, Tensor k_rstd)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "qk_norm_rope_bwd(Tensor dq_out, Tensor dk_out, Tensor q, Tensor k, Tensor? q_weight, Tensor? k_weight, "
      "Tensor cos, Tensor sin, Tensor q_rstd, Tensor k_rstd, float weight_offset, bool round_before_weight, "
      "bool interleaved, Tensor? positions, bool need_dq, bool need_dk, bool need_dq_weight, bool need_dk_weight) -> "
      "(Tensor dq, Tensor dk, Tensor dq_weight, Tensor dk_weight)",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(FK_LIBRARY, CompositeImplicitAutograd, m) {
  m.impl("rope", &rope);
  m.impl("qk_norm_rope", &qk_norm_rope);
}

TORCH_LIBRARY_IMPL(FK_LIBRARY, Meta, m) {
  m.impl("rope_apply", &apply_meta);
  m.impl("qk_norm_rope_fwd", &fwd_meta);
  m.impl("qk_norm_rope_bwd", &bwd_meta);
}

}  // namespace foundry
