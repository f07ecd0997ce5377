// The operators foundry_kernels::gated_rms_norm_fwd and _bwd: schemas and shapes. gated_rms_norm_cpu.cpp launches the
// kernels; autograd is in foundry_kernels/ops/gated_rms_norm/operators.py.
#include "gated_rms_norm.h"

#include <torch/library.h>

#include "options.h"

namespace foundry {
namespace gated_rms_norm_schema {

std::tuple<Tensor, Tensor> fwd_meta(const Tensor& x, const Tensor& gate, const OptionalTensor& weight, double,
                                    c10::string_view, bool, bool save_rstd) {
  return empty_gated_rms_norm_fwd(x, gate, weight, save_rstd);
}

std::tuple<Tensor, Tensor, Tensor> bwd_meta(const Tensor&, const Tensor& x, const Tensor& gate,
                                            const OptionalTensor& weight, const Tensor&, c10::string_view, bool,
                                            bool need_dx, bool need_dgate, bool need_dw) {
  return empty_gated_rms_norm_bwd(x, gate, weight, need_dx, need_dgate, need_dw);
}

}  // namespace gated_rms_norm_schema

TORCH_LIBRARY_FRAGMENT(FK_LIBRARY, m) {
  define_operator(m,
                  "gated_rms_norm_fwd(Tensor x, Tensor gate, Tensor? weight, float eps, str activation, "
                  "bool round_before_weight, bool save_rstd) -> (Tensor y, Tensor rstd)");
  define_operator(m,
                  "gated_rms_norm_bwd(Tensor dy, Tensor x, Tensor gate, Tensor? weight, Tensor rstd, str activation, "
                  "bool round_before_weight, bool need_dx, bool need_dgate, bool need_dw) "
                  "-> (Tensor dx, Tensor dgate, Tensor dw)");
}

TORCH_LIBRARY_IMPL(FK_LIBRARY, Meta, m) {
  m.impl("gated_rms_norm_fwd", &gated_rms_norm_schema::fwd_meta);
  m.impl("gated_rms_norm_bwd", &gated_rms_norm_schema::bwd_meta);
}

}  // namespace foundry
