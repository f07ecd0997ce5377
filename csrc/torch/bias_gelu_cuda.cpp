// The GPU launches of foundry_kernels::bias_act_fwd and bias_act_bwd; see bias_gelu.cpp for the operators.
#include "../cuda/bias_gelu.h"

#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "bias_gelu.h"
#include "cuda_common.h"

namespace foundry {
namespace bias_gelu_cuda {

// Converts the bias to a dtype that the kernels are compiled for (x's or float) and sets it in `args`.
template <class Args>
Tensor set_bias(Args& args, const OptionalTensor& given, const Tensor& x) {
  args.bias_type = args.type;
  if (!given.has_value()) return Tensor();
  const Tensor bias = (given->scalar_type() == x.scalar_type() ? *given : given->to(at::kFloat)).contiguous();
  args.bias = bias.const_data_ptr();
  args.bias_type = dtype_of(bias);
  return bias;
}

Tensor fwd_cuda(const Tensor& x_, const OptionalTensor& bias_, c10::string_view activation,
                const DropoutOptions& dropout) {
  const Activation kind = plain_activation_of(activation);
  const Tensor y = empty_bias_act_fwd(x_, bias_, dropout);
  if (y.numel() == 0) return y;
  const OnDevice device(x_);
  Tensor x = x_;
  cuda::BiasActForward args{};
  set_forward(args, x, y, kind, dropout);
  const Tensor bias = set_bias(args, bias_, x);
  check_cuda(cuda::bias_act_forward(args, device.stream()), "bias and activation forward");
  return y;
}

std::tuple<Tensor, Tensor> bwd_cuda(const Tensor& dy_, const Tensor& x_, const OptionalTensor& bias_,
                                    c10::string_view activation, bool need_dx, bool need_dbias,
                                    const DropoutOptions& dropout) {
  const Activation kind = plain_activation_of(activation);
  auto [dx, dbias] = empty_bias_act_bwd(x_, bias_, need_dx, need_dbias, dropout);
  if (x_.numel() == 0) return {dx, dbias.zero_()};
  if (!need_dx && !need_dbias) return {dx, dbias};
  const OnDevice device(x_);
  Tensor dy = dy_, x = x_;
  cuda::BiasActBackward args{};
  set_backward(args, dy, x, dx, kind, dropout);
  const Tensor bias = set_bias(args, bias_, x);
  args.n_row_blocks = cuda::bias_act_row_blocks(args, device.multiprocessors());
  Tensor partial, dbias_out;
  if (need_dbias) {
    partial = at::empty({args.n_row_blocks, args.n_cols}, x.options().dtype(at::kFloat));
    dbias_out = bias.scalar_type() == dbias.scalar_type() ? dbias : at::empty_like(bias);
    args.dbias_partial = partial.mutable_data_ptr<float>();
    args.dbias = dbias_out.mutable_data_ptr();
  }
  check_cuda(cuda::bias_act_backward(args, device.stream()), "bias and activation backward");
  if (need_dbias && !dbias_out.is_same(dbias)) dbias.copy_(dbias_out);
  return {dx, dbias};
}

}  // namespace bias_gelu_cuda

TORCH_LIBRARY_IMPL(FK_LIBRARY, FK_CUDA_KEY, m) {
  m.impl("bias_act_fwd", flat_kernel<&bias_gelu_cuda::fwd_cuda>);
  m.impl("bias_act_bwd", flat_kernel<&bias_gelu_cuda::bwd_cuda>);
}

}  // namespace foundry
