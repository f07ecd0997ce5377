// The CPU launches of foundry_kernels::cross_entropy_fwd and cross_entropy_bwd; see cross_entropy.cpp for the
// operators.
#include "../cpu/cross_entropy.h"

#include <torch/library.h>

#include <algorithm>
#include <cmath>

#include "cpu_common.h"
#include "cross_entropy.h"

namespace foundry {
namespace cross_entropy_cpu {

// Sums in the order of the rows, for any number of threads.
float sum_of(const Tensor& rows) {
  double total = 0.0;
  const float* value = rows.const_data_ptr<float>();
  for (int64_t i = 0; i < rows.numel(); ++i) total += value[i];
  return static_cast<float>(total);
}

float weight_of(const Tensor& target, const Tensor& weight, int64_t ignore_index) {
  double total = 0.0;
  const int64_t* t = target.const_data_ptr<int64_t>();
  const float* w = weight.defined() ? weight.const_data_ptr<float>() : nullptr;
  for (int64_t i = 0; i < target.numel(); ++i)
    if (t[i] != ignore_index) total += w ? w[t[i]] : 1.0;
  return static_cast<float>(total);
}

CrossEntropyOutputs fwd_cpu(const Tensor& logits, const Tensor& target, const OptionalTensor& weight,
                            const LossOptions& options, bool save_lse, bool save_z_loss, bool save_stats) {
  const Reduction kind = reduction_of(options.reduction);
  const auto outputs = empty_cross_entropy_fwd(logits, target, weight, kind, save_lse, save_z_loss, save_stats);
  const auto& [loss, lse, lse_low, z, total_weight] = outputs;
  CrossEntropyInputs in(logits, target, weight, options.label_smoothing);
  check_targets(in.target, logits.size(-1), options.ignore_index);
  const CrossEntropyRows rows(outputs, target, kind, save_z_loss);
  if (target.numel() > 0) {
    const auto args = cross_entropy_forward_args(in, cross_entropy_options(options), rows, outputs);
    in_parallel(FK_CHOOSE_ISA(cross_entropy_forward), args, args.rows.count(), kExpGrain, args.n_cols);
  }
  if (kind == Reduction::none) return outputs;
  const float total = kind == Reduction::mean ? weight_of(in.target, in.weight, options.ignore_index) : 1.0f;
  const auto reduce = [&](const Tensor& into, const Tensor& of_rows) {
    const float sum = sum_of(of_rows);
    *into.mutable_data_ptr<float>() = total != 0.0f ? sum / total : std::isnan(sum) ? sum : 0.0f;
  };
  reduce(loss, rows.losses);
  if (save_z_loss) reduce(z, rows.zs);
  if (save_stats && kind == Reduction::mean) *total_weight.mutable_data_ptr<float>() = total;
  return outputs;
}

Tensor bwd_cpu(const Tensor& dloss, const Tensor& logits, const Tensor& target, const OptionalTensor& weight,
               const Tensor& lse, const Tensor& lse_low, const OptionalTensor& total_weight,
               const LossOptions& options) {
  const Tensor dlogits = empty_cross_entropy_bwd(logits, target, weight);
  if (dlogits.numel() == 0) return dlogits;
  advise_huge_pages(dlogits);
  CrossEntropyInputs in(logits, target, weight, options.label_smoothing);
  check_targets(in.target, logits.size(-1), options.ignore_index);
  const Tensor of_loss = dloss.contiguous(), of_rows = lse.contiguous(), low_of_rows = lse_low.contiguous();
  const auto args = cross_entropy_backward_args(in, cross_entropy_options(options), of_loss, of_rows, low_of_rows,
                                                total_weight, reduction_of(options.reduction), dlogits);
  in_parallel(FK_CHOOSE_ISA(cross_entropy_backward), args, args.rows.count(), kExpGrain, args.n_cols);
  return dlogits;
}

}  // namespace cross_entropy_cpu

TORCH_LIBRARY_IMPL(FK_LIBRARY, CPU, m) {
  m.impl("cross_entropy_fwd", flat_kernel<&cross_entropy_cpu::fwd_cpu>);
  m.impl("cross_entropy_bwd", flat_kernel<&cross_entropy_cpu::bwd_cpu>);
}

}  // namespace foundry
