// The operator foundry_kernels::ssd_step: schema and shapes. ssd_cpu.cpp launches the kernel. Sequences run on the
// operators of gated_delta_rule.cpp (foundry_kernels/ops/ssd/operators.py).
#include "ssd.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "options.h"

namespace foundry {
namespace ssd_schema {

Tensor step_meta(const Tensor& state, const Tensor& x, const Tensor& dt, const Tensor& A, const Tensor& B,
                 const Tensor& C, const OptionalTensor& D, const OptionalTensor& z, const OptionalTensor& dt_bias, bool,
                 double, double) {
  check_ssd_step(state, x, dt, A, B, C, D, z, dt_bias);
  return at::empty_symint(x.sym_sizes(), x.options());
}

}  // namespace ssd_schema

TORCH_LIBRARY_FRAGMENT(FK_LIBRARY, m) {
  define_operator(m,
                  "ssd_step(Tensor(a!) state, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, "
                  "Tensor? dt_bias, bool dt_softplus, float dt_min, float dt_max) -> Tensor y");
}

TORCH_LIBRARY_IMPL(FK_LIBRARY, Meta, m) { m.impl("ssd_step", &ssd_schema::step_meta); }

TORCH_LIBRARY_IMPL(FK_LIBRARY, Autograd, m) { m.impl("ssd_step", torch::CppFunction::makeFallthrough()); }

}  // namespace foundry
