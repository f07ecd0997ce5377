// The GPU launches of foundry_kernels::rms_norm_* and layer_norm_*; see rms_norm.cpp and layer_norm.cpp for the
// operators. Its functions are those of rms_norm_cpu.cpp; their signatures are those of the operators.
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

template <class Args>
void set_weight(Args& args, const Tensor& weight, double offset) {
  args.weight = weight.defined() ? weight.const_data_ptr() : nullptr;
  args.weight_type = weight.defined() ? dtype_of(weight) : args.x_type;
  if (args.y_type != args.x_type) args.weight_type = Dtype::f32;  // without a weight the type only selects a template
  args.weight_offset = static_cast<float>(offset);
}

std::tuple<Tensor, Tensor, Tensor> fwd_cuda(const Tensor& x_, const OptionalTensor& residual_,
                                            const OptionalTensor& weight_, double eps, const WeightOptions& options,
                                            bool save_rstd, const DropoutOptions& dropout) {
  Tensor x = x_, residual = unwrap(residual_);
  check_dropout(x, residual, dropout);
  auto [y, h, rstd] = empty_fwd(x, residual, unwrap(weight_), options.round_before_weight, save_rstd);
  if (x.numel() == 0) return {y, h, rstd};
  const OnDevice device(x);
  const Tensor weight = weight_of_compiled_dtype(unwrap(weight_), x);

  cuda::RmsNormForward args{};
  set_forward(args, x, residual, y, h, rstd, eps, options.round_before_weight);
  set_weight(args, weight, options.weight_offset);
  args.dropout = make_dropout(dropout);
  check_cuda(cuda::rms_norm_forward(args, device.stream()), "rms_norm forward");
  return {y, h, rstd};
}

// Dropout in backward. Without dx nothing is dropped.
template <class Args>
void set_dropout(Args& args, const Dropout& dropout, const Tensor& dresidual) {
  if (args.dx == nullptr || dropout.seed == nullptr) return;
  args.dropout = dropout;
  args.dresidual = dresidual.mutable_data_ptr();
}

// Returns (dx, dresidual, dw). Without dropout dresidual is dx itself.
std::tuple<Tensor, Tensor, Tensor> run_bwd(const Tensor& dy_, const OptionalTensor& dh_, const Tensor& x_,
                                           const OptionalTensor& weight_, const Tensor& rstd,
                                           const WeightOptions& options, bool need_dx, bool need_dw,
                                           const Dropout& dropout) {
  Tensor dy = dy_, dh = unwrap(dh_), x = x_;
  auto [dx, dw] = empty_bwd(x, unwrap(weight_), need_dx, need_dw);
  const Tensor dresidual = dropout.seed ? empty_dresidual(dx) : dx;
  if (x.numel() == 0) return {dx, dresidual, dw.zero_()};
  if (!need_dx && !need_dw) return {dx, dresidual, dw};
  const OnDevice device(x);
  const Tensor weight = weight_of_compiled_dtype(unwrap(weight_), x);

  cuda::RmsNormBackward args{};
  set_backward(args, dy, dh, x, rstd, dx, options.round_before_weight);
  set_weight(args, weight, options.weight_offset);
  set_dropout(args, dropout, dresidual);
  args.n_blocks = cuda::rms_norm_backward_blocks(args, device.multiprocessors());
  Tensor partial, dw_out;
  if (need_dw) {
    partial = at::empty({args.n_blocks, args.n_cols}, x.options().dtype(at::kFloat));
    dw_out = weight.scalar_type() == dw.scalar_type() ? dw : at::empty_like(weight);
    args.dw_partial = partial.mutable_data_ptr<float>();
    args.dw = dw_out.mutable_data_ptr();
  }
  check_cuda(cuda::rms_norm_backward(args, device.stream()), "rms_norm backward");
  if (need_dw && !dw_out.is_same(dw)) dw.copy_(dw_out);
  return {dx, dresidual, dw};
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
void set_affine(Args& args, const Tensor& weight, const Tensor& bias) {
  args.weight = weight.defined() ? weight.const_data_ptr() : nullptr;
  args.weight_type = weight.defined() ? dtype_of(weight) : bias.defined() ? dtype_of(bias) : args.x_type;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> layer_fwd_cuda(const Tensor& x_, const OptionalTensor& residual_,
                                                          const OptionalTensor& weight_, const OptionalTensor& bias_,
                                                          double eps, bool save_stats, const DropoutOptions& dropout) {
  Tensor x = x_, residual = unwrap(residual_);
  check_dropout(x, residual, dropout);
  auto [y, h, mean, rstd] = empty_layer_fwd(x, residual, unwrap(weight_), unwrap(bias_), save_stats);
  if (x.numel() == 0) return {y, h, mean, rstd};
  const OnDevice device(x);
  const auto [weight, bias] = affine_of_compiled_dtype(unwrap(weight_), unwrap(bias_), x);

  cuda::RmsNormForward args{};
  set_forward(args, x, residual, y, h, rstd, eps, /*round_before_weight=*/false);
  set_centered(args, mean);
  set_affine(args, weight, bias);
  args.bias = bias.defined() ? bias.const_data_ptr() : nullptr;
  args.dropout = make_dropout(dropout);
  check_cuda(cuda::rms_norm_forward(args, device.stream()), "layer_norm forward");
  return {y, h, mean, rstd};
}

// Returns (dx, dresidual, dw, db), as run_bwd.
std::tuple<Tensor, Tensor, Tensor, Tensor> run_layer_bwd(const Tensor& dy_, const OptionalTensor& dh_, const Tensor& x_,
                                                         const OptionalTensor& weight_, const OptionalTensor& bias_,
                                                         const Tensor& mean, const Tensor& rstd, bool need_dx,
                                                         bool need_dw, bool need_db, const Dropout& dropout) {
  Tensor dy = dy_, dh = unwrap(dh_), x = x_;
  auto [dx, dw, db] = empty_layer_bwd(x, unwrap(weight_), unwrap(bias_), need_dx, need_dw, need_db);
  const Tensor dresidual = dropout.seed ? empty_dresidual(dx) : dx;
  if (x.numel() == 0) return {dx, dresidual, dw.zero_(), db.zero_()};
  if (!need_dx && !need_dw && !need_db) return {dx, dresidual, dw, db};
  const OnDevice device(x);
  const auto [weight, bias] = affine_of_compiled_dtype(unwrap(weight_), unwrap(bias_), x);

  cuda::RmsNormBackward args{};
  set_backward(args, dy, dh, x, rstd, dx, /*round_before_weight=*/false);
  set_centered(args, mean);
  set_affine(args, weight, bias);
  set_dropout(args, dropout, dresidual);
  args.n_blocks = cuda::rms_norm_backward_blocks(args, device.multiprocessors());
  Tensor dw_partial, db_partial, dw_out, db_out;
  const auto partial = [&] { return at::empty({args.n_blocks, args.n_cols}, x.options().dtype(at::kFloat)); };
  if (need_dw) {
    dw_out = weight.scalar_type() == dw.scalar_type() ? dw : at::empty_like(weight);
    args.dw_partial = (dw_partial = partial()).mutable_data_ptr<float>();
    args.dw = dw_out.mutable_data_ptr();
  }
  if (need_db) {
    db_out = bias.scalar_type() == db.scalar_type() ? db : at::empty_like(bias);
    args.db_partial = (db_partial = partial()).mutable_data_ptr<float>();
    args.db = db_out.mutable_data_ptr();
  }
  check_cuda(cuda::rms_norm_backward(args, device.stream()), "layer_norm backward");
  if (need_dw && !dw_out.is_same(dw)) dw.copy_(dw_out);
  if (need_db && !db_out.is_same(db)) db.copy_(db_out);
  return {dx, dresidual, dw, db};
}

}  // namespace rms_norm_cuda

TORCH_LIBRARY_IMPL(FK_LIBRARY, FK_CUDA_KEY, m) {
  m.impl("rms_norm_fwd", flat_kernel<&rms_norm_cuda::fwd_cuda>);
  m.impl("rms_norm_bwd", flat_kernel<&norm_bwd<&rms_norm_cuda::run_bwd>>);
  m.impl("rms_norm_dropout_bwd", flat_kernel<&norm_dropout_bwd<&rms_norm_cuda::run_bwd>>);
  m.impl("layer_norm_fwd", flat_kernel<&rms_norm_cuda::layer_fwd_cuda>);
  m.impl("layer_norm_bwd", &layer_bwd<&rms_norm_cuda::run_layer_bwd>);
  m.impl("layer_norm_dropout_bwd", &layer_dropout_bwd<&rms_norm_cuda::run_layer_bwd>);
}

}  // namespace foundry
