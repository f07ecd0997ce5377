// The operators foundry_kernels::short_conv1d_fwd, short_conv1d_bwd and short_conv1d_step: schemas and shapes.
// short_conv1d_cpu.cpp launches the kernels; autograd is in foundry_kernels/ops/short_conv1d/operators.py.
#include "short_conv1d.h"

#include <torch/library.h>

#include "operators.h"
#include "options.h"

namespace foundry {
namespace short_conv1d_schema {

std::tuple<Tensor, Tensor> fwd_meta(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, c10::string_view,
                                    const OptionalTensor& cu_seqlens, const OptionalTensor& initial_state,
                                    const OptionalTensor& residual, bool need_state) {
  return empty_short_conv1d_fwd(x, weight, bias, cu_seqlens, initial_state, residual, need_state);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> bwd_meta(const Tensor&, const OptionalTensor&, const Tensor& x,
                                                    const Tensor& weight, const OptionalTensor& bias, c10::string_view,
                                                    const OptionalTensor& cu_seqlens,
                                                    const OptionalTensor& initial_state, bool need_dx,
                                                    bool need_dweight, bool need_dbias, bool need_dinitial_state) {
  return empty_short_conv1d_bwd(x, weight, bias, cu_seqlens, initial_state, need_dx, need_dweight, need_dbias,
                                need_dinitial_state);
}

Tensor step_meta(const Tensor& x, const Tensor&, const Tensor&, const OptionalTensor&, c10::string_view,
                 const OptionalTensor&) {
  return at::empty_symint(x.sym_sizes(), x.options());
}

}  // namespace short_conv1d_schema

Tensor short_conv1d_step(const Tensor& x, const Tensor& state, const Tensor& weight, const OptionalTensor& bias,
                         c10::string_view activation, const OptionalTensor& residual) {
  static const Operator<decltype(short_conv1d_step)> op(FK_LIBRARY_NAME "::short_conv1d_step");
  return op(x, state, weight, bias, activation, residual);
}

TORCH_LIBRARY_FRAGMENT(FK_LIBRARY, m) {
  const std::string filter = "Tensor weight, Tensor? bias, str activation";
  const std::string inputs = "Tensor x, " + filter + ", Tensor? cu_seqlens, Tensor? initial_state, ";
  define_operator(
      m, "short_conv1d_fwd(" + inputs + "Tensor? residual, bool need_state) -> (Tensor y, Tensor final_state)");
  define_operator(m, "short_conv1d_bwd(Tensor dy, Tensor? dfinal_state, " + inputs +
                         "bool need_dx, bool need_dweight, bool need_dbias, bool need_dinitial_state) -> "
                         "(Tensor dx, Tensor dweight, Tensor dbias, Tensor dinitial_state)");
  define_operator(m, "short_conv1d_step(Tensor x, Tensor(a!) state, " + filter + ", Tensor? residual) -> Tensor");
}

TORCH_LIBRARY_IMPL(FK_LIBRARY, Meta, m) {
  m.impl("short_conv1d_fwd", &short_conv1d_schema::fwd_meta);
  m.impl("short_conv1d_bwd", &short_conv1d_schema::bwd_meta);
  m.impl("short_conv1d_step", &short_conv1d_schema::step_meta);
}

}  // namespace foundry
