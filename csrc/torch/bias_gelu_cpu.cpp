// The CPU launches of foundry_kernels::bias_act_fwd and bias_act_bwd; see bias_gelu.cpp for the operators.
#include "../cpu/bias_gelu.h"

#include <torch/library.h>

#include <algorithm>

#include "bias_gelu.h"
#include "cpu_common.h"

namespace foundry {
namespace bias_gelu_cpu {

Tensor fwd_cpu(const Tensor& x_, const OptionalTensor& bias, c10::string_view activation,
               const DropoutOptions& dropout) {
  const Activation kind = plain_activation_of(activation);
  const Tensor y = empty_bias_act_fwd(x_, bias, dropout);
  if (y.numel() == 0) return y;
  advise_huge_pages(y);
  Tensor x = x_;
  BiasActForward args{};
  set_forward(args, x, y, kind, dropout);
  const Tensor wide = float_weight(unwrap(bias), 0.0, args.type == Dtype::bf16);
  args.bias = wide.defined() ? wide.const_data_ptr<float>() : nullptr;
  in_parallel(FK_CHOOSE_ISA(bias_act_forward), args, args.rows.count() * tiles_a_row(args.n_cols), kExpGrain,
              std::min(args.n_cols, kTile));
  return y;
}

std::tuple<Tensor, Tensor> bwd_cpu(const Tensor& dy_, const Tensor& x_, const OptionalTensor& bias,
                                   c10::string_view activation, bool need_dx, bool need_dbias,
                                   const DropoutOptions& dropout) {
  const Activation kind = plain_activation_of(activation);
  auto [dx, dbias] = empty_bias_act_bwd(x_, bias, need_dx, need_dbias, dropout);
  if (x_.numel() == 0) return {dx, dbias.zero_()};
  if (!need_dx && !need_dbias) return {dx, dbias};
  advise_huge_pages(dx);
  Tensor dy = dy_, x = x_;
  BiasActBackward args{};
  set_backward(args, dy, x, dx, kind, dropout);
  const Tensor wide = float_weight(unwrap(bias), 0.0, args.type == Dtype::bf16);
  args.bias = wide.defined() ? wide.const_data_ptr<float>() : nullptr;
  const int64_t n_rows = args.rows.count();
  args.chunk_rows = rows_a_chunk(n_rows, args.n_cols);
  const int64_t n_chunks = (n_rows + args.chunk_rows - 1) / args.chunk_rows;
  Tensor chunks;
  if (need_dbias) {
    chunks = at::empty({n_chunks, args.n_cols}, x.options().dtype(at::kFloat));
    args.dbias_chunks = chunks.mutable_data_ptr<float>();
  }
  in_parallel(FK_CHOOSE_ISA(bias_act_backward), args, n_chunks, kExpGrain, args.chunk_rows * args.n_cols);
  if (need_dbias) sum_chunks_into(dbias, chunks);
  return {dx, dbias};
}

}  // namespace bias_gelu_cpu

TORCH_LIBRARY_IMPL(FK_LIBRARY, CPU, m) {
  m.impl("bias_act_fwd", flat_kernel<&bias_gelu_cpu::fwd_cpu>);
  m.impl("bias_act_bwd", flat_kernel<&bias_gelu_cpu::bwd_cpu>);
}

}  // namespace foundry
