// The CPU launches of foundry_kernels::rms_norm_fwd and rms_norm_bwd; see rms_norm.cpp for the operators.
#include "rms_norm.h"

#include <torch/library.h>

#include <algorithm>

#include "cpu_common.h"

namespace foundry {
namespace {

std::tuple<Tensor, Tensor, Tensor> fwd_cpu(const Tensor& x_, const OptionalTensor& residual_,
                                           const OptionalTensor& weight_, double eps, double weight_offset,
                                           bool round_before_weight, bool save_rstd) {
  Tensor x = x_, residual = unwrap(residual_);
  const Tensor weight = unwrap(weight_);
  auto [y, h, rstd] = empty_fwd(x, residual, weight, round_before_weight, save_rstd);
  if (x.numel() == 0) return {y, h, rstd};
  advise_huge_pages(y);
  if (residual.defined()) advise_huge_pages(h);

  RmsNormForward args{};
  set_forward(args, x, residual, y, h, rstd, eps, round_before_weight);
  const Tensor scale = float_weight(weight, weight_offset, reads_split(args.x_type, args.y_type));
  args.weight = scale.defined() ? scale.const_data_ptr<float>() : nullptr;
  const auto kernel = FK_CHOOSE_ISA(rms_norm_forward);
  at::parallel_for(0, args.rows.count(), std::max<int64_t>(1, kGrain / args.n_cols),
                   [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
  return {y, h, rstd};
}

std::tuple<Tensor, Tensor> bwd_cpu(const Tensor& dy_, const OptionalTensor& dh_, const Tensor& x_,
                                   const OptionalTensor& weight_, const Tensor& rstd, double weight_offset,
                                   bool round_before_weight, bool need_dx, bool need_dw) {
  Tensor dy = dy_, dh = unwrap(dh_), x = x_;
  const Tensor weight = unwrap(weight_);
  auto [dx, dw] = empty_bwd(x, weight, need_dx, need_dw);
  if (x.numel() == 0) return {dx, dw.zero_()};
  if (!need_dx && !need_dw) return {dx, dw};
  if (need_dx) advise_huge_pages(dx);

  RmsNormBackward args{};
  set_backward(args, dy, dh, x, rstd, dx, round_before_weight);
  const Tensor scale = float_weight(weight, weight_offset, reads_split(args.x_type, args.y_type));
  args.weight = scale.defined() ? scale.const_data_ptr<float>() : nullptr;
  const int64_t n_cols = args.n_cols, n_rows = args.rows.count();
  // Rows are cut into chunks by the shape alone, so that dW does not depend on the number of threads.
  args.chunk_rows = std::max<int64_t>({1, std::min<int64_t>(64, kGrain / n_cols), (n_rows + 127) / 128});
  const int64_t n_chunks = (n_rows + args.chunk_rows - 1) / args.chunk_rows;
  Tensor dw_chunks;
  if (need_dw) {
    dw_chunks = at::empty({n_chunks, n_cols}, x.options().dtype(at::kFloat));
    args.dw_chunks = dw_chunks.mutable_data_ptr<float>();
  }
  const auto kernel = FK_CHOOSE_ISA(rms_norm_backward);
  at::parallel_for(0, n_chunks, std::max<int64_t>(1, kGrain / (args.chunk_rows * n_cols)),
                   [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
  if (need_dw) sum_chunks_into(dw, dw_chunks);
  return {dx, dw};
}

}  // namespace

TORCH_LIBRARY_IMPL(FK_LIBRARY, CPU, m) {
  m.impl("rms_norm_fwd", &fwd_cpu);
  m.impl("rms_norm_bwd", &bwd_cpu);
}

}  // namespace foundry
