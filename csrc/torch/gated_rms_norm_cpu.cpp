// The CPU launches of foundry_kernels::gated_rms_norm_fwd and _bwd; see gated_rms_norm.cpp for the operators.
#include "../cpu/gated_rms_norm.h"

#include <torch/library.h>

#include <algorithm>

#include "cpu_common.h"
#include "gated_rms_norm.h"

namespace foundry {
namespace gated_rms_norm_cpu {

Activation activation_of(c10::string_view name) {
  TORCH_CHECK_VALUE(name == "silu" || name == "sigmoid", "activation must be silu or sigmoid; got ", name);
  return name == "silu" ? Activation::silu : Activation::sigmoid;
}

std::tuple<Tensor, Tensor> fwd_cpu(const Tensor& x_, const Tensor& gate_, const OptionalTensor& weight, double eps,
                                   c10::string_view activation, bool round_before_weight, bool save_rstd) {
  const auto [y, rstd] = empty_gated_rms_norm_fwd(x_, gate_, weight, save_rstd);
  if (x_.numel() == 0) return {y, rstd};
  Tensor x = x_, gate = gate_;
  GatedRmsNormForward args{};
  std::array<RowStrides, 2> strides{};
  make_row_layout<2>({&x, &gate}, args.rows, strides);
  const Tensor scale = float_weight(weight.value_or(Tensor()), 0.0);
  args.x = x.const_data_ptr();
  args.gate = gate.const_data_ptr();
  args.weight = scale.defined() ? scale.const_data_ptr<float>() : nullptr;
  args.y = y.mutable_data_ptr();
  args.rstd = save_rstd ? rstd.mutable_data_ptr<float>() : nullptr;
  args.x_strides = strides[0];
  args.gate_strides = strides[1];
  args.n_cols = x.size(-1);
  args.eps = static_cast<float>(eps);
  args.round_before_weight = round_before_weight;
  args.activation = activation_of(activation);
  args.type = dtype_of(x);
  advise_huge_pages(y);
  in_parallel(FK_CHOOSE_ISA(gated_rms_norm_forward), args, args.rows.count(), kGrain, args.n_cols);
  return {y, rstd};
}

std::tuple<Tensor, Tensor, Tensor> bwd_cpu(const Tensor& dy_, const Tensor& x_, const Tensor& gate_,
                                           const OptionalTensor& weight, const Tensor& rstd,
                                           c10::string_view activation, bool round_before_weight, bool need_dx,
                                           bool need_dgate, bool need_dw) {
  const auto [dx, dgate, dw] = empty_gated_rms_norm_bwd(x_, gate_, weight, need_dx, need_dgate, need_dw);
  TORCH_CHECK_VALUE(dy_.sizes() == x_.sizes() && dy_.scalar_type() == x_.scalar_type(),
                    "dy must have x's shape and dtype; got ", dy_.sizes());
  TORCH_CHECK_VALUE(rstd.sizes() == x_.sizes().slice(0, x_.dim() - 1), "rstd must be x's without the last dimension");
  if (x_.numel() == 0) {
    if (need_dw) dw.zero_();
    return {dx, dgate, dw};
  }
  Tensor dy = dy_, x = x_, gate = gate_;
  GatedRmsNormBackward args{};
  std::array<RowStrides, 3> strides{};
  make_row_layout<3>({&dy, &x, &gate}, args.rows, strides);
  const Tensor scale = float_weight(weight.value_or(Tensor()), 0.0), dense = rstd.contiguous();
  args.dy = dy.const_data_ptr();
  args.x = x.const_data_ptr();
  args.gate = gate.const_data_ptr();
  args.weight = scale.defined() ? scale.const_data_ptr<float>() : nullptr;
  args.rstd = dense.const_data_ptr<float>();
  args.dx = need_dx ? dx.mutable_data_ptr() : nullptr;
  args.dgate = need_dgate ? dgate.mutable_data_ptr() : nullptr;
  args.dy_strides = strides[0];
  args.x_strides = strides[1];
  args.gate_strides = strides[2];
  args.n_cols = x.size(-1);
  args.chunk_rows = rows_a_chunk(args.rows.count(), args.n_cols);
  args.round_before_weight = round_before_weight;
  args.activation = activation_of(activation);
  args.type = dtype_of(x);
  const int64_t chunks = (args.rows.count() + args.chunk_rows - 1) / args.chunk_rows;
  Tensor dw_chunks;
  if (need_dw) {
    dw_chunks = at::empty({chunks, args.n_cols}, x.options().dtype(at::kFloat));
    args.dw_chunks = dw_chunks.mutable_data_ptr<float>();
  }
  in_parallel(FK_CHOOSE_ISA(gated_rms_norm_backward), args, chunks, kGrain, args.chunk_rows * args.n_cols);
  if (need_dw) sum_chunks_into(dw, dw_chunks);
  return {dx, dgate, dw};
}

}  // namespace gated_rms_norm_cpu

TORCH_LIBRARY_IMPL(FK_LIBRARY, CPU, m) {
  m.impl("gated_rms_norm_fwd", &gated_rms_norm_cpu::fwd_cpu);
  m.impl("gated_rms_norm_bwd", &gated_rms_norm_cpu::bwd_cpu);
}

}  // namespace foundry
