// The CPU launches of foundry_kernels::rms_norm_* and layer_norm_*; see rms_norm.cpp and layer_norm.cpp for the
// operators.
#include "rms_norm.h"

#include <ATen/ops/full.h>
#include <torch/library.h>

#include <algorithm>

#include "cpu_common.h"

namespace foundry {
namespace rms_norm_cpu {

void run_forward(const RmsNormForward& args) {
  const auto kernel = FK_CHOOSE_ISA(rms_norm_forward);
  at::parallel_for(0, args.rows.count(), std::max<int64_t>(1, kGrain / args.n_cols),
                   [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
}

// Chunks of rows. One thread sums the gradients of weight and bias over each chunk.
class Chunks {
 public:
  explicit Chunks(RmsNormBackward& args) : args_(args) {
    args.chunk_rows = rows_a_chunk(args.rows.count(), args.n_cols);
    count_ = (args.rows.count() + args.chunk_rows - 1) / args.chunk_rows;
  }
  Tensor empty(const Tensor& x) const { return at::empty({count_, args_.n_cols}, x.options().dtype(at::kFloat)); }
  void run() const {
    const auto kernel = FK_CHOOSE_ISA(rms_norm_backward);
    at::parallel_for(0, count_, std::max<int64_t>(1, kGrain / (args_.chunk_rows * args_.n_cols)),
                     [&](int64_t begin, int64_t end) { kernel(args_, begin, end); });
  }

 private:
  RmsNormBackward& args_;
  int64_t count_;
};

std::tuple<Tensor, Tensor, Tensor> fwd_cpu(const Tensor& x_, const OptionalTensor& residual_,
                                           const OptionalTensor& weight_, double eps, const WeightOptions& options,
                                           bool save_rstd, const DropoutOptions& dropout) {
  Tensor x = x_, residual = unwrap(residual_);
  const Tensor weight = unwrap(weight_);
  check_dropout(x, residual, dropout);
  auto [y, h, rstd] = empty_fwd(x, residual, weight, options.round_before_weight, save_rstd);
  if (x.numel() == 0) return {y, h, rstd};
  advise_huge_pages(y);
  if (residual.defined()) advise_huge_pages(h);

  RmsNormForward args{};
  set_forward(args, x, residual, y, h, rstd, eps, options.round_before_weight);
  args.dropout = make_dropout(dropout);
  const Tensor scale = float_weight(weight, options.weight_offset, reads_split(args.x_type, args.y_type));
  args.weight = scale.defined() ? scale.const_data_ptr<float>() : nullptr;
  run_forward(args);
  return {y, h, rstd};
}

// Returns (dx, dresidual, dw). Without dropout dresidual is dx itself.
std::tuple<Tensor, Tensor, Tensor> run_bwd(const Tensor& dy_, const OptionalTensor& dh_, const Tensor& x_,
                                           const OptionalTensor& weight_, const Tensor& rstd,
                                           const WeightOptions& options, bool need_dx, bool need_dw,
                                           const Dropout& dropout) {
  Tensor dy = dy_, dh = unwrap(dh_), x = x_;
  const Tensor weight = unwrap(weight_);
  auto [dx, dw] = empty_bwd(x, weight, need_dx, need_dw);
  const Tensor dresidual = dropout.seed ? empty_dresidual(dx) : dx;
  if (x.numel() == 0) return {dx, dresidual, dw.zero_()};
  if (!need_dx && !need_dw) return {dx, dresidual, dw};
  if (need_dx) advise_huge_pages(dx);
  if (need_dx && dropout.seed) advise_huge_pages(dresidual);

  RmsNormBackward args{};
  set_backward(args, dy, dh, x, rstd, dx, options.round_before_weight);
  args.dropout = dropout;
  args.dresidual = dresidual.mutable_data_ptr();
  const Tensor scale = float_weight(weight, options.weight_offset, reads_split(args.x_type, args.y_type));
  args.weight = scale.defined() ? scale.const_data_ptr<float>() : nullptr;
  const Chunks chunks(args);
  Tensor dw_chunks;
  if (need_dw) {
    dw_chunks = chunks.empty(x);
    args.dw_chunks = dw_chunks.mutable_data_ptr<float>();
  }
  chunks.run();
  if (need_dw) sum_chunks_into(dw, dw_chunks);
  return {dx, dresidual, dw};
}

// A weight or bias, or a constant one if absent: these kernels always read one.
Tensor float_vector(const Tensor& vector, const Tensor& x, float otherwise, bool split) {
  if (vector.defined()) return float_weight(vector, 0.0, split);
  return at::full({x.size(-1)}, otherwise, x.options().dtype(at::kFloat));
}

std::tuple<Tensor, Tensor, Tensor, Tensor> layer_fwd_cpu(const Tensor& x_, const OptionalTensor& residual_,
                                                         const OptionalTensor& weight, const OptionalTensor& bias,
                                                         double eps, bool save_stats, const DropoutOptions& dropout) {
  Tensor x = x_, residual = unwrap(residual_);
  check_dropout(x, residual, dropout);
  auto [y, h, mean, rstd] = empty_layer_fwd(x, residual, unwrap(weight), unwrap(bias), save_stats);
  if (x.numel() == 0) return {y, h, mean, rstd};
  advise_huge_pages(y);
  if (residual.defined()) advise_huge_pages(h);

  RmsNormForward args{};
  set_forward(args, x, residual, y, h, rstd, eps, /*round_before_weight=*/false);
  set_centered(args, mean);
  args.dropout = make_dropout(dropout);
  const bool split = reads_split(args.x_type, args.y_type);
  const Tensor scale = float_vector(unwrap(weight), x, 1.0f, split), shift = float_vector(unwrap(bias), x, 0.0f, split);
  args.weight = scale.const_data_ptr<float>();
  args.bias = shift.const_data_ptr<float>();
  run_forward(args);
  return {y, h, mean, rstd};
}

// Returns (dx, dresidual, dw, db), as run_bwd.
std::tuple<Tensor, Tensor, Tensor, Tensor> run_layer_bwd(const Tensor& dy_, const OptionalTensor& dh_, const Tensor& x_,
                                                         const OptionalTensor& weight_, const OptionalTensor& bias,
                                                         const Tensor& mean, const Tensor& rstd, bool need_dx,
                                                         bool need_dw, bool need_db, const Dropout& dropout) {
  Tensor dy = dy_, dh = unwrap(dh_), x = x_;
  const Tensor weight = unwrap(weight_);
  auto [dx, dw, db] = empty_layer_bwd(x, weight, unwrap(bias), need_dx, need_dw, need_db);
  const Tensor dresidual = dropout.seed ? empty_dresidual(dx) : dx;
  if (x.numel() == 0) return {dx, dresidual, dw.zero_(), db.zero_()};
  if (!need_dx && !need_dw && !need_db) return {dx, dresidual, dw, db};
  if (need_dx) advise_huge_pages(dx);
  if (need_dx && dropout.seed) advise_huge_pages(dresidual);

  RmsNormBackward args{};
  set_backward(args, dy, dh, x, rstd, dx, /*round_before_weight=*/false);
  set_centered(args, mean);
  args.dropout = dropout;
  args.dresidual = dresidual.mutable_data_ptr();
  const Tensor scale = float_weight(weight, 0.0, reads_split(args.x_type, args.y_type));
  args.weight = scale.defined() ? scale.const_data_ptr<float>() : nullptr;
  const Chunks chunks(args);
  Tensor dw_chunks, db_chunks;
  if (need_dw) args.dw_chunks = (dw_chunks = chunks.empty(x)).mutable_data_ptr<float>();
  if (need_db) args.db_chunks = (db_chunks = chunks.empty(x)).mutable_data_ptr<float>();
  chunks.run();
  if (need_dw) sum_chunks_into(dw, dw_chunks);
  if (need_db) sum_chunks_into(db, db_chunks);
  return {dx, dresidual, dw, db};
}

}  // namespace rms_norm_cpu

TORCH_LIBRARY_IMPL(FK_LIBRARY, CPU, m) {
  m.impl("rms_norm_fwd", flat_kernel<&rms_norm_cpu::fwd_cpu>);
  m.impl("rms_norm_bwd", flat_kernel<&norm_bwd<&rms_norm_cpu::run_bwd>>);
  m.impl("rms_norm_dropout_bwd", flat_kernel<&norm_dropout_bwd<&rms_norm_cpu::run_bwd>>);
  m.impl("layer_norm_fwd", flat_kernel<&rms_norm_cpu::layer_fwd_cpu>);
  m.impl("layer_norm_bwd", &layer_bwd<&rms_norm_cpu::run_layer_bwd>);
  m.impl("layer_norm_dropout_bwd", &layer_dropout_bwd<&rms_norm_cpu::run_layer_bwd>);
}

}  // namespace foundry
