// The CPU launches of foundry_kernels::log_probs_fwd and log_probs_bwd; and log_probs_bwd_classes_, which replaces the
// logits of some classes by their gradient. The last is internal to linear_log_probs: no gradient, no fake.
#include "../cpu/log_probs.h"

#include <torch/library.h>

#include <algorithm>

#include "cpu_common.h"
#include "log_probs.h"

namespace foundry {
namespace log_probs_cpu {

// Sets the members that forward and backward share. `target` is contiguous and int64.
template <class Args>
Args shared_args(Tensor& logits, const Tensor& target, const LogProbsArguments& o) {
  Args args{};
  std::array<RowStrides, 1> strides{};
  make_row_layout<1>({&logits}, args.rows, strides);
  args.logits = logits.const_data_ptr();
  args.target = target.const_data_ptr<int64_t>();
  args.logits_strides = strides[0];
  args.n_cols = logits.size(-1);
  args.options = {o.ignore_index, static_cast<float>(o.logit_scale), static_cast<float>(o.softcap.value_or(0.0))};
  args.type = dtype_of(logits);
  return args;
}

LogProbsOutputs fwd_cpu(const Tensor& logits_, const Tensor& target_, const LogProbsArguments& options,
                        bool save_entropy, bool save_lse, bool save_low, bool save_stats) {
  const auto outputs = empty_log_probs_fwd(logits_, target_, save_entropy, save_lse, save_low, save_stats);
  if (target_.numel() == 0) return outputs;
  Tensor logits = logits_;
  const Tensor target = target_.to(at::kLong).contiguous();
  check_targets(target, logits.size(-1), options.ignore_index);
  const auto written = [](const Tensor& t) { return t.numel() ? t.mutable_data_ptr<float>() : nullptr; };
  auto args = shared_args<LogProbsForward>(logits, target, options);
  args.log_probs = written(std::get<0>(outputs));
  args.entropy = written(std::get<1>(outputs));
  args.lse = written(std::get<2>(outputs));
  args.lse_low = written(std::get<3>(outputs));
  args.stats = written(std::get<4>(outputs));
  in_parallel(FK_CHOOSE_ISA(log_probs_forward), args, args.rows.count(), kExpGrain, args.n_cols);
  return outputs;
}

void bwd_into(const Tensor& dlogits, const Tensor& logits, const Tensor& dlog_probs, const OptionalTensor& dlse,
              const OptionalTensor& dentropy, const Tensor& target_, const Tensor& lse, const Tensor& lse_low,
              int64_t first, int64_t n_classes, const LogProbsArguments& options) {
  if (dlogits.numel() == 0) return;
  const Tensor target = target_.to(at::kLong).contiguous();
  check_targets(target, n_classes, options.ignore_index);
  std::array<Tensor, 5> of_rows{dlog_probs.contiguous(), unwrap(dlse), unwrap(dentropy), lse.contiguous(),
                                lse_low.contiguous()};
  for (Tensor& each : of_rows) {
    if (!each.defined()) continue;
    each = each.contiguous();
    TORCH_CHECK_VALUE(each.numel() == target.numel(), "gradients, lse and lse_low must have a value for each token");
  }
  const auto pointer = [](const Tensor& t) { return t.defined() ? t.const_data_ptr<float>() : nullptr; };
  Tensor in = logits;
  auto args = shared_args<LogProbsBackward>(in, target, options);
  args.g = pointer(of_rows[0]);
  args.c = pointer(of_rows[1]);
  args.b = pointer(of_rows[2]);
  args.lse = pointer(of_rows[3]);
  args.lse_low = pointer(of_rows[4]);
  args.dlogits = dlogits.mutable_data_ptr();
  args.first = first;
  in_parallel(FK_CHOOSE_ISA(log_probs_backward), args, args.rows.count(), kExpGrain, args.n_cols);
}

Tensor bwd_cpu(const Tensor& dlog_probs, const OptionalTensor& dlse, const OptionalTensor& dentropy,
               const Tensor& logits, const Tensor& target, const Tensor& lse, const Tensor& lse_low,
               const LogProbsArguments& options) {
  const Tensor dlogits = empty_cross_entropy_bwd(logits, target, {});
  advise_huge_pages(dlogits);
  bwd_into(dlogits, logits, dlog_probs, dlse, dentropy, target, lse, lse_low, 0, logits.size(-1), options);
  return dlogits;
}

void bwd_classes_(const Tensor& logits, const Tensor& dlog_probs, const OptionalTensor& dlse,
                  const OptionalTensor& dentropy, const Tensor& target, const Tensor& lse, const Tensor& lse_low,
                  int64_t first, int64_t n_classes, const LogProbsArguments& options) {
  TORCH_CHECK_VALUE(logits.dim() == 2 && logits.is_contiguous() && target.numel() == logits.size(0),
                    "logits must be contiguous, a row for each target; got ", logits.sizes());
  TORCH_CHECK_VALUE(first >= 0 && first + logits.size(1) <= n_classes, "classes ", first, " .. ",
                    first + logits.size(1) - 1, " must be among the ", n_classes);
  bwd_into(logits, logits, dlog_probs, dlse, dentropy, target, lse, lse_low, first, n_classes, options);
}

}  // namespace log_probs_cpu

TORCH_LIBRARY_FRAGMENT(FK_LIBRARY, m) {
  define_operator(m,
                  "log_probs_bwd_classes_(Tensor(a!) logits, Tensor dlog_probs, Tensor? dlse, Tensor? dentropy, "
                  "Tensor target, Tensor lse, Tensor lse_low, int first, int n_classes, " +
                      LogProbsArguments::schema() + ") -> ()");
}

TORCH_LIBRARY_IMPL(FK_LIBRARY, CPU, m) {
  m.impl("log_probs_fwd", flat_kernel<&log_probs_cpu::fwd_cpu>);
  m.impl("log_probs_bwd", flat_kernel<&log_probs_cpu::bwd_cpu>);
  m.impl("log_probs_bwd_classes_", flat_kernel<&log_probs_cpu::bwd_classes_>);
}

}  // namespace foundry
