// The GPU launches of rope_apply, qk_norm_rope_fwd and qk_norm_rope_bwd; see rope.cpp for the operators.
#include "../cuda/rope.h"

#include <torch/library.h>

#include "cuda_common.h"
#include "rope.h"

namespace foundry {
namespace rope_cuda {

// Keeps the weights of q and k alive while kernels read them: contiguous, in their own dtype.
struct Weights {
  Tensor of[2];

  Weights(const OptionalTensor& q_weight, const OptionalTensor& k_weight)
      : of{q_weight ? q_weight->contiguous() : Tensor(), k_weight ? k_weight->contiguous() : Tensor()} {}

  template <class Args>
  void set(Args& args, double weight_offset) const {
    args.weight_offset = static_cast<float>(weight_offset);
    for (int side = 0; side < 2; ++side) {
      if (!of[side].defined()) continue;
      args.heads[side].weight = of[side].const_data_ptr();
      args.heads[side].weight_type = dtype_of(of[side]);
    }
  }
};

std::tuple<Tensor, Tensor> apply_cuda(const OptionalTensor& q, const OptionalTensor& k, const Tensor& cos,
                                      const Tensor& sin, const RopeOptions& options, bool inverse,
                                      OptionalOrder q_order, OptionalOrder k_order) {
  const OnDevice device(either(q, k));
  const RopeApplyCall call(q, k, cos, sin, options, inverse, q_order, k_order);
  if (count_heads(call.args.heads) > 0) check_cuda(cuda::rope(call.args, device.stream()), "rope");
  return {call.out[0], call.out[1]};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> fwd_cuda(const Tensor& q, const Tensor& k, const OptionalTensor& q_weight,
                                                    const OptionalTensor& k_weight, const Tensor& cos,
                                                    const Tensor& sin, double eps, const WeightOptions& weight_options,
                                                    const RopeOptions& options, bool save_q_rstd, bool save_k_rstd) {
  const OnDevice device(q);
  QkNormRopeForwardCall<cuda::QkNormRopeForward> call(q, k, q_weight, k_weight, cos, sin, eps, weight_options, options,
                                                      save_q_rstd, save_k_rstd);
  const Weights weights(q_weight, k_weight);
  weights.set(call.args, weight_options.weight_offset);
  if (count_heads(call.args.heads) > 0)
    check_cuda(cuda::qk_norm_rope_forward(call.args, device.stream()), "qk_norm_rope forward");
  return {call.out[0], call.out[1], call.rstd[0], call.rstd[1]};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> bwd_cuda(const OptionalTensor& dq_out, const OptionalTensor& dk_out,
                                                    const OptionalTensor& q, const OptionalTensor& k,
                                                    const OptionalTensor& q_weight, const OptionalTensor& k_weight,
                                                    const Tensor& cos, const Tensor& sin, const OptionalTensor& q_rstd,
                                                    const OptionalTensor& k_rstd, const WeightOptions& weight_options,
                                                    const RopeOptions& options, bool need_dq, bool need_dk,
                                                    bool need_dq_weight, bool need_dk_weight) {
  const OnDevice device(either(q, k));
  QkNormRopeBackwardCall<cuda::QkNormRopeBackward> call(dq_out, dk_out, q, k, q_weight, k_weight, cos, sin, q_rstd,
                                                        k_rstd, weight_options, options, need_dq, need_dk,
                                                        need_dq_weight, need_dk_weight);
  const Weights weights(q_weight, k_weight);
  weights.set(call.args, weight_options.weight_offset);
  Tensor partial[2];
  for (int side = 0; side < 2; ++side) {
    auto& heads = call.args.heads[side];
    if (heads.n_heads == 0) continue;
    heads.n_blocks = cuda::qk_norm_rope_backward_blocks(call.args.all_tokens * heads.n_heads, device.multiprocessors());
    if (!call.sums_dw(side)) continue;
    partial[side] = at::empty({heads.n_blocks, call.args.width}, cos.options().dtype(at::kFloat));
    heads.dw_partial = partial[side].mutable_data_ptr<float>();
    heads.dw = call.dw[side].mutable_data_ptr();
  }
  if (count_heads(call.args.heads) > 0)
    check_cuda(cuda::qk_norm_rope_backward(call.args, device.stream()), "qk_norm_rope backward");
  return {call.dx[0], call.dx[1], call.dw[0], call.dw[1]};
}

}  // namespace rope_cuda

TORCH_LIBRARY_IMPL(FK_LIBRARY, FK_CUDA_KEY, m) {
  m.impl("rope_apply", flat_kernel<&rope_cuda::apply_cuda>);
  m.impl("qk_norm_rope_fwd", flat_kernel<&rope_cuda::fwd_cuda>);
  m.impl("qk_norm_rope_bwd", flat_kernel<&rope_cuda::bwd_cuda>);
}

}  // namespace foundry
