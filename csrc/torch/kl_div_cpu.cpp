// The CPU launches of foundry_kernels::kl_div_fwd and kl_div_bwd; and kl_div_fwd_bwd_, which returns the losses and
// replaces the logits by their gradient. The last is internal to linear_kl_div: no gradient, no fake.
#include "../cpu/kl_div.h"

#include <torch/library.h>

#include <algorithm>

#include "cpu_common.h"
#include "kl_div.h"

namespace foundry {
namespace kl_div_cpu {

KlDivOptions options_of(const KlDivArguments& o) {
  const auto cap = [&](const std::optional<double>& c) { return static_cast<float>(c.value_or(0.0) / o.temperature); };
  return {o.ignore_index,
          static_cast<float>(1.0 / o.temperature),
          divergence_of(o.direction, o.beta),
          static_cast<float>(o.beta),
          static_cast<float>(1.0 - o.beta),
          cap(o.softcap),
          cap(o.teacher_softcap)};
}

// Writes the losses and the gradients to those of `loss` and `dlogits` that are defined.
void run(const Tensor& logits_, const Tensor& teacher_logits, const Tensor& target_, const KlDivArguments& options,
         const Tensor& loss, const Tensor& dloss_, const Tensor& dlogits) {
  if (logits_.numel() == 0) return;
  Tensor logits = logits_, teacher = teacher_logits;
  const Tensor target = target_.to(at::kLong).contiguous();
  const Tensor dloss = dlogits.defined() ? dloss_.contiguous() : Tensor();
  KlDivRows args{};
  std::array<RowStrides, 2> strides{};
  make_row_layout<2>({&logits, &teacher}, args.rows, strides);
  args.logits = logits.const_data_ptr();
  args.teacher = teacher.const_data_ptr();
  args.target = target.const_data_ptr<int64_t>();
  if (dlogits.defined()) {
    TORCH_CHECK_VALUE(dloss.numel() == target.numel(), "dloss must have a value for each token");
    args.dloss = dloss.const_data_ptr<float>();
    args.dlogits = dlogits.mutable_data_ptr();
  }
  args.loss = loss.defined() ? loss.mutable_data_ptr<float>() : nullptr;
  args.logits_strides = strides[0];
  args.teacher_strides = strides[1];
  args.n_cols = logits.size(-1);
  args.options = options_of(options);
  args.type = dtype_of(logits);
  args.teacher_type = dtype_of(teacher);
  in_parallel(FK_CHOOSE_ISA(kl_div_rows), args, args.rows.count(), kExpGrain, args.n_cols);
}

Tensor fwd_cpu(const Tensor& logits, const Tensor& teacher_logits, const Tensor& target,
               const KlDivArguments& options) {
  const Tensor loss = empty_kl_div_losses(logits, teacher_logits, target);
  run(logits, teacher_logits, target, options, loss, {}, {});
  return loss;
}

Tensor bwd_cpu(const Tensor& dloss, const Tensor& logits, const Tensor& teacher_logits, const Tensor& target,
               const KlDivArguments& options) {
  const Tensor dlogits = empty_kl_div_gradient(logits, teacher_logits, target);
  advise_huge_pages(dlogits);
  run(logits, teacher_logits, target, options, {}, dloss, dlogits);
  return dlogits;
}

Tensor fwd_bwd_(const Tensor& logits, const Tensor& teacher_logits, const Tensor& target, const Tensor& dloss,
                const KlDivArguments& options) {
  TORCH_CHECK_VALUE(logits.is_contiguous(), "logits must be contiguous");
  const Tensor loss = empty_kl_div_losses(logits, teacher_logits, target);
  run(logits, teacher_logits, target, options, loss, dloss, logits);
  return loss;
}

}  // namespace kl_div_cpu

TORCH_LIBRARY_FRAGMENT(FK_LIBRARY, m) {
  define_operator(m, "kl_div_fwd_bwd_(Tensor(a!) logits, Tensor teacher_logits, Tensor target, Tensor dloss, " +
                         KlDivArguments::schema() + ") -> Tensor loss");
}

TORCH_LIBRARY_IMPL(FK_LIBRARY, CPU, m) {
  m.impl("kl_div_fwd", flat_kernel<&kl_div_cpu::fwd_cpu>);
  m.impl("kl_div_bwd", flat_kernel<&kl_div_cpu::bwd_cpu>);
  m.impl("kl_div_fwd_bwd_", flat_kernel<&kl_div_cpu::fwd_bwd_>);
}

}  // namespace foundry
