// The CPU launches of foundry_kernels::rms_norm_* and layer_norm_*; see rms_norm.cpp and layer_norm.cpp for the
// operators.
#include "rms_norm.h"

#include <ATen/ops/full.h>
#include <torch/library.h>

#include <algorithm>

#include "cpu_common.h"

namespace foundry {
namespace rms_norm_cpu {

// A weight or bias. The kernels of layer_norm always read one: a constant if it is absent.
Tensor float_vector(const Tensor& vector, const Tensor& x, double offset, float otherwise, bool centered, bool split) {
  if (vector.defined() || !centered) return float_weight(vector, offset, split);
  return at::full({x.size(-1)}, otherwise, x.options().dtype(at::kFloat));
}

NormOutputs forward(const Tensor& x_, const Tensor& residual_, const Tensor& weight, const Tensor& bias, double eps,
                    const WeightOptions& options, bool save, const DropoutOptions& dropout, bool centered) {
  Tensor x = x_, residual = residual_;
  NormOutputs out = meta_forward(x, residual, weight, bias, eps, options, save, dropout, centered);
  if (x.numel() == 0) return out;
  advise_huge_pages(out.y);
  if (residual.defined()) advise_huge_pages(out.h);

  RmsNormForward args{};
  set_forward(args, x, residual, out, eps, options.round_before_weight);
  args.dropout = make_dropout(dropout);
  const bool split = reads_split(args.x_type, args.y_type);
  const Tensor scale = float_vector(weight, x, options.weight_offset, 1.0f, centered, split);
  const Tensor shift = centered ? float_vector(bias, x, 0.0, 0.0f, centered, split) : Tensor();
  args.weight = scale.defined() ? scale.const_data_ptr<float>() : nullptr;
  if (centered) args.bias = shift.const_data_ptr<float>();
  in_parallel(FK_CHOOSE_ISA(rms_norm_forward), args, args.rows.count(), kGrain, args.n_cols);
  return out;
}

NormGradients backward(NormSaved saved, const WeightOptions& options, bool need_dx, bool need_dw, bool need_db,
                       const DropoutOptions& dropout_options) {
  const Tensor& x = saved.x;
  const Dropout dropout = make_dropout(dropout_options);
  NormGradients out = meta_backward(saved, options, need_dx, need_dw, need_db, dropout_options);
  if (x.numel() == 0) {
    out.dw.zero_();
    if (out.db.defined()) out.db.zero_();
    return out;
  }
  if (!need_dx && !need_dw && !need_db) return out;
  if (need_dx) advise_huge_pages(out.dx);
  if (need_dx && dropout.seed) advise_huge_pages(out.dresidual);

  RmsNormBackward args{};
  set_backward(args, saved, out.dx, options.round_before_weight);
  args.dropout = dropout;
  args.dresidual = out.dresidual.mutable_data_ptr();
  const Tensor scale = float_weight(saved.weight, options.weight_offset, reads_split(args.x_type, args.y_type));
  args.weight = scale.defined() ? scale.const_data_ptr<float>() : nullptr;
  // One thread sums the gradients of weight and bias over a chunk of rows.
  args.chunk_rows = rows_a_chunk(args.rows.count(), args.n_cols);
  const int64_t n_chunks = (args.rows.count() + args.chunk_rows - 1) / args.chunk_rows;
  const auto chunks = [&] { return at::empty({n_chunks, args.n_cols}, x.options().dtype(at::kFloat)); };
  Tensor dw_chunks, db_chunks;
  if (need_dw) args.dw_chunks = (dw_chunks = chunks()).mutable_data_ptr<float>();
  if (need_db) args.db_chunks = (db_chunks = chunks()).mutable_data_ptr<float>();
  in_parallel(FK_CHOOSE_ISA(rms_norm_backward), args, n_chunks, kGrain, args.chunk_rows * args.n_cols);
  if (need_dw) sum_chunks_into(out.dw, dw_chunks);
  if (need_db) sum_chunks_into(out.db, db_chunks);
  return out;
}

}  // namespace rms_norm_cpu

TORCH_LIBRARY_IMPL(FK_LIBRARY, CPU, m) {
  m.impl("rms_norm_fwd", flat_kernel<&norm_fwd<&rms_norm_cpu::forward>>);
  m.impl("rms_norm_bwd", flat_kernel<&norm_bwd<&rms_norm_cpu::backward>>);
  m.impl("rms_norm_dropout_bwd", flat_kernel<&norm_dropout_bwd<&rms_norm_cpu::backward>>);
  m.impl("layer_norm_fwd", flat_kernel<&layer_fwd<&rms_norm_cpu::forward>>);
  m.impl("layer_norm_bwd", &layer_bwd<&rms_norm_cpu::backward>);
  m.impl("layer_norm_dropout_bwd", &layer_dropout_bwd<&rms_norm_cpu::backward>);
}

}  // namespace foundry
