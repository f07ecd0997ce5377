// The operators foundry_kernels::gated_delta_rule_fwd, _bwd and _step: schemas and shapes. gated_delta_rule_cpu.cpp
// launches the kernels; autograd is in foundry_kernels/ops/gated_delta_rule/operators.py.
#include "gated_delta_rule.h"

#include <torch/library.h>

#include "operators.h"

namespace foundry {
namespace gated_delta_rule_schema {

DeltaRuleOutputs fwd_meta(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& g,
                          const OptionalTensor& beta, const OptionalTensor& initial_state, const DeltaRuleOptions& o,
                          bool need_final_state, bool save_states) {
  return empty_delta_rule_fwd(q, k, v, g, beta, initial_state, o, need_final_state, save_states);
}

DeltaRuleGradients bwd_meta(const Tensor&, const OptionalTensor&, const Tensor& q, const Tensor& k, const Tensor& v,
                            const OptionalTensor& g, const OptionalTensor& beta, const OptionalTensor&, const Tensor&,
                            const DeltaRuleOptions& o, bool need_dq, bool need_dk, bool need_dv, bool need_dg,
                            bool need_dbeta, bool need_dinitial_state) {
  return empty_delta_rule_bwd(q, k, v, g, beta, o, need_dq, need_dk, need_dv, need_dg, need_dbeta, need_dinitial_state);
}

Tensor step_meta(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& g, const OptionalTensor& beta,
                 const Tensor& state, double, bool) {
  check_delta_rule_step(q, k, v, g, beta, state);
  return at::empty_symint(v.sym_sizes(), v.options());
}

}  // namespace gated_delta_rule_schema

Tensor gated_delta_rule_step(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& g,
                             const OptionalTensor& beta, const Tensor& state, double scale, bool qk_l2norm) {
  static const Operator<decltype(gated_delta_rule_step)> op(FK_LIBRARY_NAME "::gated_delta_rule_step");
  return op(q, k, v, g, beta, state, scale, qk_l2norm);
}

TORCH_LIBRARY_FRAGMENT(FK_LIBRARY, m) {
  const std::string options = DeltaRuleOptions::schema();
  define_operator(
      m, "gated_delta_rule_fwd(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta, Tensor? initial_state, " +
             options +
             ", bool need_final_state, bool save_states) "
             "-> (Tensor out, Tensor final_state, Tensor states)");
  define_operator(m,
                  "gated_delta_rule_bwd(Tensor dout, Tensor? dfinal_state, Tensor q, Tensor k, Tensor v, Tensor? g, "
                  "Tensor? beta, Tensor? initial_state, Tensor states, " +
                      options +
                      ", bool need_dq, bool need_dk, bool need_dv, bool need_dg, bool need_dbeta, "
                      "bool need_dinitial_state) "
                      "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dg, Tensor dbeta, Tensor dinitial_state)");
  define_operator(m,
                  "gated_delta_rule_step(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta, Tensor(a!) state, "
                  "float scale, bool qk_l2norm) -> Tensor out");
}

TORCH_LIBRARY_IMPL(FK_LIBRARY, Meta, m) {
  m.impl("gated_delta_rule_fwd", flat_kernel<&gated_delta_rule_schema::fwd_meta>);
  m.impl("gated_delta_rule_bwd", flat_kernel<&gated_delta_rule_schema::bwd_meta>);
  m.impl("gated_delta_rule_step", &gated_delta_rule_schema::step_meta);
}

TORCH_LIBRARY_IMPL(FK_LIBRARY, Autograd, m) { m.impl("gated_delta_rule_step", torch::CppFunction::makeFallthrough()); }

}  // namespace foundry
