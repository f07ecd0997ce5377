// The operators foundry_kernels::gated_delta_rule_fwd, _bwd and _step: schemas and shapes. gated_delta_rule_cpu.cpp
// launches the kernels; autograd is in foundry_kernels/ops/gated_delta_rule/operators.py.
#include "gated_delta_rule.h"

#include <torch/library.h>

#include "operators.h"

namespace foundry {
namespace gated_delta_rule_schema {

DeltaRuleOutputs fwd_meta(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& g,
                          const OptionalTensor& beta, const OptionalTensor& initial_state, const OptionalTensor& A_log,
                          const OptionalTensor& dt_bias, const DeltaRuleOptions& o, bool need_final_state,
                          bool save_states) {
  return empty_delta_rule_fwd(q, k, v, g, beta, initial_state, A_log, dt_bias, o, need_final_state, save_states);
}

DeltaRuleGradients bwd_meta(const Tensor&, const OptionalTensor&, const Tensor& q, const Tensor& k, const Tensor& v,
                            const OptionalTensor& g, const OptionalTensor& beta, const OptionalTensor&,
                            const OptionalTensor& A_log, const OptionalTensor& dt_bias, const Tensor&,
                            const DeltaRuleOptions& o, bool need_dq, bool need_dk, bool need_dv, bool need_dg,
                            bool need_dbeta, bool need_dinitial_state, bool need_dA_log, bool need_ddt_bias) {
  return empty_delta_rule_bwd(q, k, v, g, beta, A_log, dt_bias, o, need_dq, need_dk, need_dv, need_dg, need_dbeta,
                              need_dinitial_state, need_dA_log, need_ddt_bias);
}

Tensor step_meta(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& g, const OptionalTensor& beta,
                 const Tensor& state, const OptionalTensor& A_log, const OptionalTensor& dt_bias, double, bool,
                 std::optional<double> beta_limit) {
  check_delta_rule_step(q, k, v, g, beta, state, A_log, dt_bias, beta_limit);
  return at::empty_symint(v.sym_sizes(), v.options());
}

}  // namespace gated_delta_rule_schema

Tensor gated_delta_rule_step(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& g,
                             const OptionalTensor& beta, const Tensor& state, const OptionalTensor& A_log,
                             const OptionalTensor& dt_bias, double scale, bool qk_l2norm,
                             std::optional<double> beta_limit) {
  static const Operator<decltype(gated_delta_rule_step)> op(FK_LIBRARY_NAME "::gated_delta_rule_step");
  return op(q, k, v, g, beta, state, A_log, dt_bias, scale, qk_l2norm, beta_limit);
}

TORCH_LIBRARY_FRAGMENT(FK_LIBRARY, m) {
  const std::string options = DeltaRuleOptions::schema();
  define_operator(m,
                  "gated_delta_rule_fwd(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta, Tensor? initial_state, "
                  "Tensor? A_log, Tensor? dt_bias, " +
                      options +
                      ", bool need_final_state, bool save_states) "
                      "-> (Tensor out, Tensor final_state, Tensor states)");
  define_operator(m,
                  "gated_delta_rule_bwd(Tensor dout, Tensor? dfinal_state, Tensor q, Tensor k, Tensor v, Tensor? g, "
                  "Tensor? beta, Tensor? initial_state, Tensor? A_log, Tensor? dt_bias, Tensor states, " +
                      options +
                      ", bool need_dq, bool need_dk, bool need_dv, bool need_dg, bool need_dbeta, "
                      "bool need_dinitial_state, bool need_dA_log, bool need_ddt_bias) "
                      "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dg, Tensor dbeta, Tensor dinitial_state, "
                      "Tensor dA_log, Tensor ddt_bias)");
  define_operator(m,
                  "gated_delta_rule_step(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta, Tensor(a!) state, "
                  "Tensor? A_log, Tensor? dt_bias, float scale, bool qk_l2norm, float? beta_limit) -> Tensor out");
}

TORCH_LIBRARY_IMPL(FK_LIBRARY, Meta, m) {
  m.impl("gated_delta_rule_fwd", flat_kernel<&gated_delta_rule_schema::fwd_meta>);
  m.impl("gated_delta_rule_bwd", flat_kernel<&gated_delta_rule_schema::bwd_meta>);
  m.impl("gated_delta_rule_step", &gated_delta_rule_schema::step_meta);
}

TORCH_LIBRARY_IMPL(FK_LIBRARY, Autograd, m) { m.impl("gated_delta_rule_step", torch::CppFunction::makeFallthrough()); }

}  // namespace foundry
