// The operator foundry_kernels::cross_entropy_bwd_classes_: replaces the logits of some classes by their gradient.
// Internal to linear_cross_entropy, which never holds all logits: no gradient, no fake.
#include "../cpu/cross_entropy.h"

#include <torch/library.h>

#include "cpu_common.h"
#include "cross_entropy.h"

namespace foundry {
namespace cross_entropy_classes_cpu {

// logits [rows, columns] belong to the classes first .. first + columns - 1 of n_classes. weight covers all classes;
// the other tensors cover all rows.
void bwd_classes_(const Tensor& logits, const Tensor& dloss, const Tensor& target, const OptionalTensor& weight,
                  const Tensor& lse, const Tensor& lse_low, int64_t first, int64_t n_classes, int64_t ignore_index,
                  double label_smoothing, double z_loss, std::optional<double> softcap) {
  TORCH_CHECK_VALUE(logits.dim() == 2 && logits.is_contiguous() && target.numel() == logits.size(0),
                    "logits must be contiguous, a row for each target; got ", logits.sizes());
  TORCH_CHECK_VALUE(first >= 0 && first + logits.size(1) <= n_classes && (!weight || weight->numel() == n_classes),
                    "classes ", first, " .. ", first + logits.size(1) - 1, " must be among the ", n_classes);
  if (logits.numel() == 0) return;
  CrossEntropyInputs in(logits, target, weight, label_smoothing);
  check_targets(in.target, n_classes, ignore_index);
  const auto options = cross_entropy_options({ignore_index, "none", label_smoothing, z_loss, softcap});
  const Tensor of_loss = dloss.contiguous(), of_rows = lse.contiguous(), low_of_rows = lse_low.contiguous();
  auto args = cross_entropy_backward_args(in, options, of_loss, of_rows, low_of_rows, {}, Reduction::none, logits);
  args.first = first;
  args.n_classes = n_classes;
  in_parallel(FK_CHOOSE_ISA(cross_entropy_backward), args, target.numel(), kExpGrain, args.n_cols);
}

}  // namespace cross_entropy_classes_cpu

TORCH_LIBRARY_FRAGMENT(FK_LIBRARY, m) {
  m.def(
      "cross_entropy_bwd_classes_(Tensor(a!) logits, Tensor dloss, Tensor target, Tensor? weight, Tensor lse, "
      "Tensor lse_low, int first, int n_classes, int ignore_index, float label_smoothing, float z_loss, "
      "float? softcap) -> ()",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(FK_LIBRARY, CPU, m) {
  m.impl("cross_entropy_bwd_classes_", &cross_entropy_classes_cpu::bwd_classes_);
}

}  // namespace foundry
