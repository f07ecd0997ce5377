// The GPU launches of foundry_kernels::cross_entropy_fwd and cross_entropy_bwd; see cross_entropy.cpp for the
// operators.
#include "../cuda/cross_entropy.h"

#include <torch/library.h>

#include "cross_entropy.h"
#include "cuda_common.h"

namespace foundry {
namespace cross_entropy_cuda {

CrossEntropyOutputs fwd_cuda(const Tensor& logits, const Tensor& target, const OptionalTensor& weight,
                             const LossOptions& options, bool save_lse, bool save_z_loss, bool save_stats) {
  const Reduction kind = reduction_of(options.reduction);
  const auto outputs = empty_cross_entropy_fwd(logits, target, weight, kind, save_lse, save_z_loss, save_stats);
  const auto& [loss, lse, lse_low, z, total_weight] = outputs;
  if (target.numel() == 0) {
    for (const Tensor& t : {loss, z, total_weight}) t.zero_();
    return outputs;
  }
  const OnDevice device(logits);
  CrossEntropyInputs in(logits, target, weight, options.label_smoothing);
  const CrossEntropyRows rows(outputs, target, kind, save_z_loss);
  const CrossEntropyForward args = cross_entropy_forward_args(in, cross_entropy_options(options), rows, outputs);
  check_cuda(cuda::cross_entropy_forward(args, device.stream()), "cross-entropy forward");
  if (kind == Reduction::none) return outputs;
  cuda::CrossEntropyReduce reduce{};
  reduce.losses = args.loss;
  reduce.zs = args.z_loss;
  reduce.target = args.target;
  reduce.weight = args.weight;
  reduce.loss = loss.mutable_data_ptr<float>();
  reduce.z_loss = save_z_loss ? z.mutable_data_ptr<float>() : nullptr;
  reduce.total_weight = total_weight.numel() ? total_weight.mutable_data_ptr<float>() : nullptr;
  reduce.n_rows = target.numel();
  reduce.n_cols = args.n_cols;
  reduce.ignore_index = options.ignore_index;
  reduce.mean = kind == Reduction::mean;
  check_cuda(cuda::cross_entropy_reduce(reduce, device.stream()), "cross-entropy reduction");
  return outputs;
}

Tensor bwd_cuda(const Tensor& dloss, const Tensor& logits, const Tensor& target, const OptionalTensor& weight,
                const Tensor& lse, const Tensor& lse_low, const OptionalTensor& total_weight,
                const LossOptions& options) {
  const Tensor dlogits = empty_cross_entropy_bwd(logits, target, weight);
  if (dlogits.numel() == 0) return dlogits;
  const OnDevice device(logits);
  CrossEntropyInputs in(logits, target, weight, options.label_smoothing);
  const Tensor of_loss = dloss.contiguous(), of_rows = lse.contiguous(), low_of_rows = lse_low.contiguous();
  const CrossEntropyBackward args =
      cross_entropy_backward_args(in, cross_entropy_options(options), of_loss, of_rows, low_of_rows, total_weight,
                                  reduction_of(options.reduction), dlogits);
  check_cuda(cuda::cross_entropy_backward(args, device.stream()), "cross-entropy backward");
  return dlogits;
}

}  // namespace cross_entropy_cuda

TORCH_LIBRARY_IMPL(FK_LIBRARY, FK_CUDA_KEY, m) {
  m.impl("cross_entropy_fwd", flat_kernel<&cross_entropy_cuda::fwd_cuda>);
  m.impl("cross_entropy_bwd", flat_kernel<&cross_entropy_cuda::bwd_cuda>);
}

}  // namespace foundry
