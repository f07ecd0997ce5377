// The operators foundry_kernels::flash_attention and flash_attention_varlen: schema, shapes and autograd.
// flash_attention_cpu.cpp launches the kernels; there are none for CUDA.
//
// Both are composed of flash_attention_fwd and flash_attention_bwd, which are what a compiled graph, a checkpointing
// policy or a profiler sees. They take dense tensors, or packed ones with the sequences' starts (cu_seqlens), and
// return empty tensors in place of what was not asked for.
#include "flash_attention.h"

#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

namespace foundry {
namespace {

FourTensors fwd_meta(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& cu_seqlens_q,
                     const OptionalTensor& cu_seqlens_k, double, OptionalInt, OptionalInt, std::optional<double>,
                     const OptionalTensor& slopes, const OptionalTensor& sinks, bool, bool save_lse, bool save_stats) {
  check_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, slopes, sinks);
  return empty_attention_fwd(q, v, cu_seqlens_q.has_value(), save_lse, save_stats);
}

FourTensors bwd_meta(const Tensor&, const OptionalTensor&, const Tensor& q, const Tensor& k, const Tensor& v,
                     const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&, double, OptionalInt,
                     OptionalInt, std::optional<double>, const OptionalTensor&, const OptionalTensor& sinks, bool,
                     bool need_dq, bool need_dk, bool need_dv, bool need_dsinks) {
  return empty_attention_bwd(q, k, v, sinks, need_dq, need_dk, need_dv, need_dsinks);
}

// What a call has besides q, k and v.
struct Call {
  OptionalTensor cu_seqlens_q, cu_seqlens_k;
  double scale;
  OptionalInt left, right;
  std::optional<double> softcap;
  OptionalTensor slopes, sinks;
  bool bottom_right, return_lse, return_stats;
};

// The dispatcher finds the kernel of the tensors' device.
FourTensors call_fwd(const Tensor& q, const Tensor& k, const Tensor& v, const Call& c, bool save_lse) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow(FK_LIBRARY_NAME "::flash_attention_fwd", "")
                             .typed<decltype(fwd_meta)>();
  return op.call(q, k, v, c.cu_seqlens_q, c.cu_seqlens_k, c.scale, c.left, c.right, c.softcap, c.slopes, c.sinks,
                 c.bottom_right, save_lse, c.return_stats);
}

template <class T>
c10::IValue pack(const std::optional<T>& value) {
  return value.has_value() ? c10::IValue(*value) : c10::IValue();
}
OptionalInt unpack_int(const c10::IValue& value) {
  return value.isNone() ? OptionalInt() : OptionalInt(value.toSymInt());
}

class AttentionFunction : public torch::autograd::Function<AttentionFunction> {
 public:
  // The sinks are passed by themselves: autograd looks for tensors that require gradients among the arguments.
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* ctx, const Tensor& q, const Tensor& k,
                                                const Tensor& v, const OptionalTensor& sinks, const Call& c) {
    ctx->set_materialize_grads(false);  // zeros would cost a pass, and are no DTensor where the outputs are
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    auto [out, lse, entropy, max_logit] = call_fwd(q, k, v, c, true);
    ctx->save_for_backward(
        {q, k, v, out, lse, unwrap(c.cu_seqlens_q), unwrap(c.cu_seqlens_k), unwrap(c.slopes), unwrap(sinks)});
    ctx->saved_data["scale"] = c.scale;
    ctx->saved_data["left"] = pack(c.left);
    ctx->saved_data["right"] = pack(c.right);
    ctx->saved_data["softcap"] = pack(c.softcap);
    ctx->saved_data["bottom_right"] = c.bottom_right;
    torch::autograd::variable_list results{out}, constants;
    if (c.return_lse) results.push_back(lse);
    if (c.return_lse && !q.requires_grad() && !k.requires_grad() && !(sinks && sinks->requires_grad()))
      constants.push_back(lse);  // of v alone it is no function
    if (c.return_stats) {
      results.insert(results.end(), {entropy, max_logit});
      constants.insert(constants.end(), {entropy, max_logit});
    }
    ctx->saved_data["return_lse"] = c.return_lse;
    ctx->mark_non_differentiable(constants);
    return results;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    TORCH_CHECK(!at::GradMode::is_enabled(),
                "flash_attention has no second derivative: backward was called with create_graph=True");
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow(FK_LIBRARY_NAME "::flash_attention_bwd", "")
                               .typed<decltype(bwd_meta)>();
    const auto saved = ctx->get_saved_variables();
    auto& data = ctx->saved_data;
    const auto softcap = data["softcap"];
    const bool need_dsinks = saved[8].defined() && ctx->needs_input_grad(3);
    const OptionalTensor dlse = data["return_lse"].toBool() ? wrap(grads[1]) : std::nullopt;
    const bool has_dout = grads[0].defined();
    if (!has_dout && !dlse.has_value()) return torch::autograd::variable_list(5);
    const Tensor dout = has_dout ? grads[0] : at::zeros_like(saved[3]);
    const bool need_dq = ctx->needs_input_grad(0), need_dk = ctx->needs_input_grad(1);
    const bool need_dv = has_dout && ctx->needs_input_grad(2);  // of lse alone v is no part
    auto [dq, dk, dv, dsinks] =
        op.call(dout, dlse, saved[0], saved[1], saved[2], saved[3], saved[4], wrap(saved[5]), wrap(saved[6]),
                data["scale"].toDouble(), unpack_int(data["left"]), unpack_int(data["right"]),
                softcap.isNone() ? std::nullopt : std::optional<double>(softcap.toDouble()), wrap(saved[7]),
                wrap(saved[8]), data["bottom_right"].toBool(), need_dq, need_dk, need_dv, need_dsinks);
    return {need_dq ? dq : Tensor(), need_dk ? dk : Tensor(), need_dv ? dv : Tensor(), need_dsinks ? dsinks : Tensor(),
            Tensor()};
  }
};

FourTensors attend(const Tensor& q, const Tensor& k, const Tensor& v, const Call& c) {
  const bool needs_grad = at::GradMode::is_enabled() && (q.requires_grad() || k.requires_grad() || v.requires_grad() ||
                                                         (c.sinks && c.sinks->requires_grad()));
  if (!needs_grad) return call_fwd(q, k, v, c, c.return_lse);
  auto results = AttentionFunction::apply(q, k, v, c.sinks, c);
  const auto nothing = [&] { return at::empty({0}, q.options().dtype(at::kFloat)); };
  const size_t stats = c.return_lse ? 2 : 1;
  return {results[0], c.return_lse ? results[1] : nothing(), c.return_stats ? results[stats] : nothing(),
          c.return_stats ? results[stats + 1] : nothing()};
}

FourTensors flash_attention(const Tensor& q, const Tensor& k, const Tensor& v, double scale, OptionalInt left,
                            OptionalInt right, std::optional<double> softcap, const OptionalTensor& slopes,
                            const OptionalTensor& sinks, bool bottom_right, bool return_lse, bool return_stats) {
  return attend(
      q, k, v,
      {std::nullopt, std::nullopt, scale, left, right, softcap, slopes, sinks, bottom_right, return_lse, return_stats});
}

FourTensors flash_attention_varlen(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cu_seqlens_q,
                                   const Tensor& cu_seqlens_k, double scale, OptionalInt left, OptionalInt right,
                                   std::optional<double> softcap, const OptionalTensor& slopes,
                                   const OptionalTensor& sinks, bool bottom_right, bool return_lse, bool return_stats) {
  return attend(
      q, k, v,
      {cu_seqlens_q, cu_seqlens_k, scale, left, right, softcap, slopes, sinks, bottom_right, return_lse, return_stats});
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(FK_LIBRARY, m) {
  m.def(
      "flash_attention(Tensor q, Tensor k, Tensor v, float scale, SymInt? left, SymInt? right, float? softcap, "
      "Tensor? alibi_slopes, Tensor? sinks, bool bottom_right, bool return_lse, bool return_stats) "
      "-> (Tensor out, Tensor lse, Tensor entropy, Tensor max_logit)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "flash_attention_varlen(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, float scale, "
      "SymInt? left, SymInt? right, float? softcap, Tensor? alibi_slopes, Tensor? sinks, bool bottom_right, "
      "bool return_lse, bool return_stats) -> (Tensor out, Tensor lse, Tensor entropy, Tensor max_logit)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "flash_attention_fwd(Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, float scale, "
      "SymInt? left, SymInt? right, float? softcap, Tensor? alibi_slopes, Tensor? sinks, bool bottom_right, "
      "bool save_lse, bool save_stats) -> (Tensor out, Tensor lse, Tensor entropy, Tensor max_logit)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "flash_attention_bwd(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
      "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, float scale, SymInt? left, SymInt? right, float? softcap, "
      "Tensor? alibi_slopes, Tensor? sinks, bool bottom_right, bool need_dq, bool need_dk, bool need_dv, "
      "bool need_dsinks) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(FK_LIBRARY, CompositeImplicitAutograd, m) {
  m.impl("flash_attention", &flash_attention);
  m.impl("flash_attention_varlen", &flash_attention_varlen);
}

TORCH_LIBRARY_IMPL(FK_LIBRARY, Meta, m) {
  m.impl("flash_attention_fwd", &fwd_meta);
  m.impl("flash_attention_bwd", &bwd_meta);
}

}  // namespace foundry
