// The GPU's launches of foundry_kernels::cross_entropy_fwd and cross_entropy_bwd; see cross_entropy.cpp for the
// operators.
#include "../cuda/cross_entropy.h"

#include <torch/library.h>

#include "cross_entropy.h"
#include "cuda_common.h"

namespace foundry {
namespace {

CrossEntropyOutputs fwd_cuda(const Tensor& logits, const Tensor& target, const OptionalTensor& weight,
                             int64_t ignore_index, c10::string_view reduction, double label_smoothing, double z_loss,
                             std::optional<double> softcap, bool save_lse, bool save_z_loss, bool save_stats) {
  const Reduction kind = reduction_of(reduction);
  auto outputs = empty_cross_entropy_fwd(logits, target, weight, kind, save_lse, save_z_loss, save_stats);
  auto& [loss, lse, lse_low, z, total_weight] = outputs;
  const bool reduces = kind != Reduction::none;
  if (target.numel() == 0) {
    if (reduces) {
      loss.zero_();
      z.zero_();
      total_weight.zero_();
    }
    return outputs;
  }
  const OnDevice device(logits);
  CrossEntropyInputs in(logits, target, weight, label_smoothing);
  const Tensor losses = reduces ? at::empty(target.sizes(), loss.options()) : loss;
  const Tensor zs = reduces && save_z_loss ? at::empty(target.sizes(), loss.options()) : z;
  CrossEntropyForward args{};
  in.fill(args, cross_entropy_options(ignore_index, label_smoothing, z_loss, softcap));
  args.loss = losses.mutable_data_ptr<float>();
  args.lse = save_lse ? lse.mutable_data_ptr<float>() : nullptr;
  args.lse_low = save_stats ? lse_low.mutable_data_ptr<float>() : nullptr;
  args.z_loss = save_z_loss ? zs.mutable_data_ptr<float>() : nullptr;
  check_cuda(cuda::cross_entropy_forward(args, device.stream()), "cross-entropy forward");
  if (!reduces) return outputs;
  const bool mean = kind == Reduction::mean;
  const cuda::CrossEntropyReduce reduce{args.loss,
                                        args.z_loss,
                                        args.target,
                                        args.weight,
                                        loss.mutable_data_ptr<float>(),
                                        save_z_loss ? z.mutable_data_ptr<float>() : nullptr,
                                        save_stats && mean ? total_weight.mutable_data_ptr<float>() : nullptr,
                                        target.numel(),
                                        args.n_cols,
                                        ignore_index,
                                        mean};
  check_cuda(cuda::cross_entropy_reduce(reduce, device.stream()), "cross-entropy reduction");
  return outputs;
}

Tensor bwd_cuda(const Tensor& dloss_, const Tensor& logits, const Tensor& target, const OptionalTensor& weight,
                const Tensor& lse_, const Tensor& lse_low_, const OptionalTensor& total_weight, int64_t ignore_index,
                c10::string_view reduction, double label_smoothing, double z_loss, std::optional<double> softcap) {
  const Tensor dlogits = empty_cross_entropy_bwd(logits, target, weight);
  if (dlogits.numel() == 0) return dlogits;
  const OnDevice device(logits);
  CrossEntropyInputs in(logits, target, weight, label_smoothing);
  const Tensor dloss = dloss_.contiguous(), lse = lse_.contiguous(), lse_low = lse_low_.contiguous();
  CrossEntropyBackward args{};
  in.fill(args, cross_entropy_options(ignore_index, label_smoothing, z_loss, softcap));
  args.dloss = dloss.const_data_ptr<float>();
  args.dloss_a_row = reduction_of(reduction) == Reduction::none;
  args.total_weight = total_weight.has_value() ? total_weight->const_data_ptr<float>() : nullptr;
  args.lse = lse.const_data_ptr<float>();
  args.lse_low = lse_low.const_data_ptr<float>();
  args.dlogits = dlogits.mutable_data_ptr();
  check_cuda(cuda::cross_entropy_backward(args, device.stream()), "cross-entropy backward");
  return dlogits;
}

}  // namespace

TORCH_LIBRARY_IMPL(FK_LIBRARY, FK_CUDA_KEY, m) {
  m.impl("cross_entropy_fwd", &fwd_cuda);
  m.impl("cross_entropy_bwd", &bwd_cuda);
}

}  // namespace foundry
