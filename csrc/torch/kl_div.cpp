// The operators foundry_kernels::kl_div_fwd and kl_div_bwd: schemas and shapes. kl_div_cpu.cpp launches the kernels;
// autograd is in foundry_kernels/ops/kl_div/operators.py.
#include "kl_div.h"

#include <torch/library.h>

namespace foundry {
namespace kl_div_schema {

Tensor fwd_meta(const Tensor& logits, const Tensor& teacher_logits, const Tensor& target, const KlDivArguments&) {
  return empty_kl_div_losses(logits, teacher_logits, target);
}

Tensor bwd_meta(const Tensor&, const Tensor& logits, const Tensor& teacher_logits, const Tensor& target,
                const KlDivArguments&) {
  return empty_kl_div_gradient(logits, teacher_logits, target);
}

}  // namespace kl_div_schema

TORCH_LIBRARY_FRAGMENT(FK_LIBRARY, m) {
  const std::string inputs = "Tensor logits, Tensor teacher_logits, Tensor target, " + KlDivArguments::schema();
  define_operator(m, "kl_div_fwd(" + inputs + ") -> Tensor loss");
  define_operator(m, "kl_div_bwd(Tensor dloss, " + inputs + ") -> Tensor dlogits");
}

TORCH_LIBRARY_IMPL(FK_LIBRARY, Meta, m) {
  m.impl("kl_div_fwd", flat_kernel<&kl_div_schema::fwd_meta>);
  m.impl("kl_div_bwd", flat_kernel<&kl_div_schema::bwd_meta>);
}

}  // namespace foundry
