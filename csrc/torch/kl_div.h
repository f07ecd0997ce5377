// Options, shapes and checks of the operators of kl_div.cpp and kl_div_cpu.cpp.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include "../common/kl_div.h"
#include "common.h"
#include "options.h"

namespace foundry {

#define FK_KL_DIV_OPTIONS(OPTION)                           \
  OPTION(int64_t, ignore_index, integer)                    \
  OPTION(double, temperature, real)                         \
  OPTION(c10::string_view, direction, text)                 \
  OPTION(double, beta, real)                                \
  OPTION(std::optional<double>, softcap, optional_positive) \
  OPTION(std::optional<double>, teacher_softcap, optional_positive)

struct KlDivArguments {
  FK_OPTIONS(FK_KL_DIV_OPTIONS)
};

// The one that is named; "jsd" is one of the others at its ends.
inline Divergence divergence_of(c10::string_view direction, double beta) {
  if (direction == "tvd") return Divergence::variation;
  if (direction == "forward" || (direction == "jsd" && beta == 0.0)) return Divergence::forward;
  if (direction == "reverse" || (direction == "jsd" && beta == 1.0)) return Divergence::reverse;
  TORCH_CHECK_VALUE(direction == "jsd", "direction must be forward, reverse, jsd or tvd; got ", direction);
  return Divergence::mixed;
}

// The divergence of each token, or with n_counted their sum over this number. For direct_losses.cpp; the operator
// kl_div is without n_counted.
Tensor kl_div(const Tensor& logits, const Tensor& teacher_logits, const Tensor& target, const KlDivArguments& options,
              std::optional<int64_t> n_counted);

inline void check_kl_div(const Tensor& logits, const Tensor& teacher_logits, const Tensor& target) {
  TORCH_CHECK_VALUE(logits.dim() >= 1 && logits.sym_size(-1) > 0, "logits must have a last dimension of at least 1");
  const auto shape = logits.sym_sizes();
  TORCH_CHECK_VALUE(teacher_logits.sym_sizes() == shape, "teacher_logits must have logits' shape ", shape, "; got ",
                    teacher_logits.sym_sizes());
  TORCH_CHECK_VALUE(target.sym_sizes() == shape.slice(0, shape.size() - 1), "target must have shape ",
                    shape.slice(0, shape.size() - 1), ", that of logits without the last dimension; got ",
                    target.sym_sizes());
  TORCH_CHECK_TYPE(target.scalar_type() == at::kLong || target.scalar_type() == at::kInt,
                   "target must be int32 or int64; got ", target.scalar_type());
}

inline Tensor empty_kl_div_losses(const Tensor& logits, const Tensor& teacher_logits, const Tensor& target) {
  check_kl_div(logits, teacher_logits, target);
  return empty_beside(logits, target.sym_sizes(), at::kFloat);
}

inline Tensor empty_kl_div_gradient(const Tensor& logits, const Tensor& teacher_logits, const Tensor& target) {
  check_kl_div(logits, teacher_logits, target);
  return empty_beside(logits, logits.sym_sizes(), logits.scalar_type());
}

}  // namespace foundry
