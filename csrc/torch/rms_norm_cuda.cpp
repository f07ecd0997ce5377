// The GPU launches of foundry_kernels::rms_norm_* and layer_norm_*; see rms_norm.cpp and layer_norm.cpp for the
// operators.
#include "../cuda/rms_norm.h"

#include <torch/library.h>

#include "cuda_common.h"
#include "rms_norm.h"

namespace foundry {
namespace rms_norm_cuda {

// The weight in a dtype that the kernels are compiled for: x's or float.
Tensor weight_of_compiled_dtype(const Tensor& weight, const Tensor& x) {
  if (!weight.defined()) return weight;
  const bool compiled = weight.scalar_type() == x.scalar_type() || weight.scalar_type() == at::kFloat;
  return (compiled ? weight : weight.to(x.scalar_type() == at::kFloat ? x.scalar_type() : at::kFloat)).contiguous();
}

// Weight and bias in one dtype that the kernels are compiled for: their own if they share it, else float.
std::array<Tensor, 2> affine_of_compiled_dtype(const Tensor& weight, const Tensor& bias, const Tensor& x) {
  const bool one_dtype = !weight.defined() || !bias.defined() || weight.scalar_type() == bias.scalar_type();
  const auto compiled = [&](const Tensor& t) {
    return weight_of_compiled_dtype(one_dtype || !t.defined() ? t : t.to(at::kFloat), x);
  };
  return {compiled(weight), compiled(bias)};
}

template <class Args>
void set_affine(Args& args, const Tensor& weight, const Tensor& bias, double offset) {
  args.weight = weight.defined() ? weight.const_data_ptr() : nullptr;
  args.weight_type = weight.defined() ? dtype_of(weight) : bias.defined() ? dtype_of(bias) : args.x_type;
  if (args.y_type != args.x_type) args.weight_type = Dtype::f32;  // without a weight the type only selects a template
  args.weight_offset = static_cast<float>(offset);
}

NormOutputs forward(const Tensor& x_, const Tensor& residual_, const Tensor& weight_, const Tensor& bias_, double eps,
                    const WeightOptions& options, bool save, const DropoutOptions& dropout, bool centered) {
  Tensor x = x_, residual = residual_;
  NormOutputs out = meta_forward(x, residual, weight_, bias_, eps, options, save, dropout, centered);
  if (x.numel() == 0) return out;
  const OnDevice device(x);
  const auto [weight, bias] = affine_of_compiled_dtype(weight_, bias_, x);

  cuda::RmsNormForward args{};
  set_forward(args, x, residual, out, eps, options.round_before_weight);
  set_affine(args, weight, bias, options.weight_offset);
  args.bias = bias.defined() ? bias.const_data_ptr() : nullptr;
  args.dropout = make_dropout(dropout);
  check_cuda(cuda::rms_norm_forward(args, device.stream()), centered ? "layer_norm forward" : "rms_norm forward");
  return out;
}

// Dropout in backward. Without dx nothing is dropped.
template <class Args>
void set_dropout(Args& args, const Dropout& dropout, const Tensor& dresidual) {
  if (args.dx == nullptr || dropout.seed == nullptr) return;
  args.dropout = dropout;
  args.dresidual = dresidual.mutable_data_ptr();
}

NormGradients backward(NormSaved saved, const WeightOptions& options, bool need_dx, bool need_dw, bool need_db,
                       const DropoutOptions& dropout_options) {
  const Tensor& x = saved.x;
  const bool centered = saved.mean.defined();
  NormGradients out = meta_backward(saved, options, need_dx, need_dw, need_db, dropout_options);
  if (x.numel() == 0) {
    out.dw.zero_();
    if (centered) out.db.zero_();
    return out;
  }
  if (!need_dx && !need_dw && !need_db) return out;
  const OnDevice device(x);
  const auto [weight, bias] = affine_of_compiled_dtype(saved.weight, saved.bias, x);

  cuda::RmsNormBackward args{};
  set_backward(args, saved, out.dx, options.round_before_weight);
  set_affine(args, weight, bias, options.weight_offset);
  set_dropout(args, make_dropout(dropout_options), out.dresidual);
  args.n_blocks = cuda::rms_norm_backward_blocks(args, device.multiprocessors());
  Tensor dw_partial, db_partial, dw_out, db_out;
  const auto partial = [&] { return at::empty({args.n_blocks, args.n_cols}, x.options().dtype(at::kFloat)); };
  if (need_dw) {
    dw_out = weight.scalar_type() == out.dw.scalar_type() ? out.dw : at::empty_like(weight);
    args.dw_partial = (dw_partial = partial()).mutable_data_ptr<float>();
    args.dw = dw_out.mutable_data_ptr();
  }
  if (need_db) {
    db_out = bias.scalar_type() == out.db.scalar_type() ? out.db : at::empty_like(bias);
    args.db_partial = (db_partial = partial()).mutable_data_ptr<float>();
    args.db = db_out.mutable_data_ptr();
  }
  check_cuda(cuda::rms_norm_backward(args, device.stream()), centered ? "layer_norm backward" : "rms_norm backward");
  if (need_dw && !dw_out.is_same(out.dw)) out.dw.copy_(dw_out);
  if (need_db && !db_out.is_same(out.db)) out.db.copy_(db_out);
  return out;
}

}  // namespace rms_norm_cuda

TORCH_LIBRARY_IMPL(FK_LIBRARY, FK_CUDA_KEY, m) {
  m.impl("rms_norm_fwd", flat_kernel<&norm_fwd<&rms_norm_cuda::forward>>);
  m.impl("rms_norm_bwd", flat_kernel<&norm_bwd<&rms_norm_cuda::backward>>);
  m.impl("rms_norm_dropout_bwd", flat_kernel<&norm_dropout_bwd<&rms_norm_cuda::backward>>);
  m.impl("layer_norm_fwd", flat_kernel<&layer_fwd<&rms_norm_cuda::forward>>);
  m.impl("layer_norm_bwd", &layer_bwd<&rms_norm_cuda::backward>);
  m.impl("layer_norm_dropout_bwd", &layer_dropout_bwd<&rms_norm_cuda::backward>);
}

}  // namespace foundry
