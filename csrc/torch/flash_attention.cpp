// The operator foundry_kernels::flash_attention: schema, shapes and autograd. flash_attention_cpu.cpp and
// flash_attention_cuda.cpp launch the kernels.
//
// It consists of flash_attention_fwd and flash_attention_bwd, which compiled graphs, checkpointing policies and
// profilers see. They take dense tensors, or packed ones with cu_seqlens. Outputs that were not requested are empty.
#include "flash_attention.h"

#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include "autograd.h"
#include "operators.h"

namespace foundry {
namespace flash_attention_schema {

FourTensors fwd_meta(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionOptions& options, bool save_lse,
                     bool save_stats) {
  check_attention(q, k, v, options);
  return empty_attention_fwd(q, v, options.packed(), save_lse, save_stats);
}

SixTensors bwd_meta(const Tensor&, const OptionalTensor&, const Tensor& q, const Tensor& k, const Tensor& v,
                    const Tensor&, const Tensor&, const AttentionOptions& options, bool need_dq, bool need_dk,
                    bool need_dv, bool need_dsinks, bool need_dbias, Slots dscore_slots) {
  return empty_attention_bwd(q, k, v, options, need_dq, need_dk, need_dv, need_dsinks, need_dbias, dscore_slots);
}

FourTensors call_fwd(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionOptions& options, bool save_lse,
                     bool save_stats) {
  static const Operator<decltype(fwd_meta)> op(FK_LIBRARY_NAME "::flash_attention_fwd");
  return op(q, k, v, options, save_lse, save_stats);
}

class AttentionFunction : public torch::autograd::Function<AttentionFunction> {
 public:
  // Indices in autograd's lists: forward's arguments, its results and the tensors that it saves.
  enum Argument { kQ, kK, kV, kSinks, kBias, kOptions, kReturnLse, kReturnStats, kScoreTensors };
  enum Result { kOut, kLse, kEntropy, kMaxLogit };
  enum Saved { kSavedQ, kSavedK, kSavedV, kSavedOut, kSavedLse, kSavedOptions };

  // The sinks, attn_mask and score_tensors are separate arguments: autograd looks for tensors that require gradients
  // only among the arguments.
  static variable_list forward(AutogradContext* ctx, const Tensor& q, const Tensor& k, const Tensor& v,
                               const OptionalTensor& sinks, const OptionalTensor& bias, const AttentionOptions& options,
                               bool return_lse, bool return_stats, at::TensorList score_tensors) {
    ctx->set_materialize_grads(false);  // zeros would cost a pass, and would not be DTensors where the outputs are
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    auto [out, lse, entropy, max_logit] = call_fwd(q, k, v, options, true, return_stats);
    variable_list saved{q, k, v, out, lse};
    ctx->saved_data["options"] = save_options(options, saved);
    ctx->save_for_backward(std::move(saved));
    // Through the dispatcher, unlike absent(): here tensors may be fake.
    lse = return_lse ? lse.to(at::kFloat) : at::empty({0}, q.options().dtype(at::kFloat));
    variable_list constants{entropy, max_logit};
    const bool depends_on_inputs = requires_grad(q) || requires_grad(k) || requires_grad(sinks) ||
                                   requires_grad(bias) || requires_grad(score_tensors);
    if (!return_lse || !depends_on_inputs) constants.push_back(lse);  // lse does not depend on v
    ctx->mark_non_differentiable(constants);
    return {out, lse, entropy, max_logit};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    refuse_second_derivative("flash_attention");
    static const Operator<decltype(bwd_meta)> op(FK_LIBRARY_NAME "::flash_attention_bwd");
    const auto saved = ctx->get_saved_variables();
    const AttentionOptions options =
        load_options<AttentionOptions>(&saved[kSavedOptions], ctx->saved_data.at("options"));
    const OptionalTensor dlse = wrap(grads[kLse]);
    const bool has_dout = grads[kOut].defined();
    variable_list result(kScoreTensors + options.score_tensors.size());
    if (!has_dout && !dlse.has_value()) return result;
    const Tensor dout = has_dout ? grads[kOut] : at::zeros_like(saved[kSavedOut]);
    NeedsGrad needs(ctx);
    const bool need_dq = needs.next(), need_dk = needs.next();
    const bool need_dv = needs.next() && has_dout;  // the gradient of lse does not reach v
    const bool need_dsinks = needs.next_if(options.sinks.has_value());
    const bool need_dbias = needs.next_if(options.attn_mask.has_value());
    Slots dscore_slots;
    for (size_t slot = 0; slot < options.score_tensors.size(); ++slot)
      if (needs.next()) dscore_slots.push_back(static_cast<int64_t>(slot));
    auto [dq, dk, dv, dsinks, dbias, dscore] =
        op(dout, dlse, saved[kSavedQ], saved[kSavedK], saved[kSavedV], saved[kSavedOut], saved[kSavedLse], options,
           need_dq, need_dk, need_dv, need_dsinks, need_dbias, dscore_slots);
    if (need_dq) result[kQ] = dq;
    if (need_dk) result[kK] = dk;
    if (need_dv) result[kV] = dv;
    if (need_dsinks) result[kSinks] = dsinks;
    if (need_dbias) result[kBias] = dbias;
    c10::SymInt at = 0;
    for (int64_t slot : dscore_slots) {
      const Tensor& t = options.score_tensors[slot];
      const c10::SymInt end = at + t.sym_numel();
      result[kScoreTensors + slot] = dscore.slice_symint(0, at, end).view_symint(t.sym_sizes()).to(t.scalar_type());
      at = end;
    }
    return result;
  }
};

}  // namespace flash_attention_schema

FourTensors flash_attention(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionOptions& options,
                            bool return_lse, bool return_stats) {
  using F = flash_attention_schema::AttentionFunction;
  if (!any_requires_grad(q, k, v, options.sinks, options.attn_mask, at::TensorList(options.score_tensors))) {
    auto results = flash_attention_schema::call_fwd(q, k, v, options, return_lse, return_stats);
    if (return_lse) std::get<F::kLse>(results) = std::get<F::kLse>(results).to(at::kFloat);
    return results;
  }
  TORCH_CHECK_VALUE(!options.paged(), "block_table does not support gradients");
  const auto results = F::apply(q, k, v, options.sinks, options.attn_mask, options, return_lse, return_stats,
                                at::TensorList(options.score_tensors));
  return {results[F::kOut], results[F::kLse], results[F::kEntropy], results[F::kMaxLogit]};
}

TORCH_LIBRARY_FRAGMENT(FK_LIBRARY, m) {
  const std::string inputs = "Tensor q, Tensor k, Tensor v, ", options = AttentionOptions::schema();
  const std::string results = " -> (Tensor out, Tensor lse, Tensor entropy, Tensor max_logit)";
  define_operator(m, "flash_attention(" + inputs + options + ", bool return_lse, bool return_stats)" + results);
  define_operator(m, "flash_attention_fwd(" + inputs + options + ", bool save_lse, bool save_stats)" + results);
  define_operator(m, "flash_attention_bwd(Tensor dout, Tensor? dlse, " + inputs + "Tensor out, Tensor lse, " + options +
                         ", bool need_dq, bool need_dk, bool need_dv, bool need_dsinks, bool need_dbias, "
                         "int[] dscore_slots) "
                         "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks, Tensor dbias, Tensor dscore)");
}

TORCH_LIBRARY_IMPL(FK_LIBRARY, CompositeImplicitAutograd, m) {
  m.impl("flash_attention", flat_kernel<&flash_attention>);
}

TORCH_LIBRARY_IMPL(FK_LIBRARY, Meta, m) {
  m.impl("flash_attention_fwd", flat_kernel<&flash_attention_schema::fwd_meta>);
  m.impl("flash_attention_bwd", flat_kernel<&flash_attention_schema::bwd_meta>);
}

}  // namespace foundry
