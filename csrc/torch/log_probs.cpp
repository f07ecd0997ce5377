// The operators foundry_kernels::log_probs_fwd and log_probs_bwd: schemas and shapes. log_probs_cpu.cpp launches the
// kernels; autograd is in foundry_kernels/ops/log_probs/operators.py.
#include "log_probs.h"

#include <torch/library.h>

namespace foundry {
namespace log_probs_schema {

LogProbsOutputs fwd_meta(const Tensor& logits, const Tensor& target, const LogProbsArguments&, bool save_entropy,
                         bool save_lse, bool save_low) {
  return empty_log_probs_fwd(logits, target, save_entropy, save_lse, save_low);
}

Tensor bwd_meta(const Tensor&, const OptionalTensor&, const OptionalTensor&, const Tensor& logits, const Tensor& target,
                const Tensor&, const Tensor&, const LogProbsArguments&) {
  return empty_cross_entropy_bwd(logits, target, {});
}

}  // namespace log_probs_schema

TORCH_LIBRARY_FRAGMENT(FK_LIBRARY, m) {
  const std::string options = LogProbsArguments::schema();
  define_operator(m, "log_probs_fwd(Tensor logits, Tensor target, " + options +
                         ", bool save_entropy, bool save_lse, bool save_low) "
                         "-> (Tensor log_probs, Tensor entropy, Tensor lse, Tensor lse_low)");
  define_operator(m,
                  "log_probs_bwd(Tensor dlog_probs, Tensor? dlse, Tensor? dentropy, Tensor logits, Tensor target, "
                  "Tensor lse, Tensor lse_low, " +
                      options + ") -> Tensor dlogits");
}

TORCH_LIBRARY_IMPL(FK_LIBRARY, Meta, m) {
  m.impl("log_probs_fwd", flat_kernel<&log_probs_schema::fwd_meta>);
  m.impl("log_probs_bwd", flat_kernel<&log_probs_schema::bwd_meta>);
}

}  // namespace foundry
