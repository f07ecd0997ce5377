// Shapes, checks, outputs and kernel arguments that the CPU and CUDA launches share.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <tuple>

#include "../common/cross_entropy.h"
#include "common.h"
#include "options.h"

namespace foundry {

#define FK_LOSS_OPTIONS(OPTION)                  \
  OPTION(int64_t, ignore_index, integer)         \
  OPTION(c10::string_view, reduction, reduction) \
  OPTION(double, label_smoothing, fraction)      \
  OPTION(double, z_loss, not_negative)           \
  OPTION(std::optional<double>, softcap, optional_positive)

struct LossOptions {
  FK_OPTIONS(FK_LOSS_OPTIONS)
};

// The operator, for direct.cpp. Returns (loss, lse, z_loss).
std::tuple<Tensor, Tensor, Tensor> cross_entropy(const Tensor& logits, const Tensor& target,
                                                 const OptionalTensor& weight, const LossOptions& options,
                                                 bool return_lse, bool return_z_loss);

enum class Reduction { none, mean, sum };

inline Reduction reduction_of(c10::string_view name) {
  if (name == "none") return Reduction::none;
  if (name == "mean") return Reduction::mean;
  TORCH_CHECK_VALUE(name == "sum", "reduction must be one of none, mean, sum; got ", name);
  return Reduction::sum;
}

inline void check_cross_entropy(const Tensor& logits, const Tensor& target, const OptionalTensor& weight) {
  TORCH_CHECK_VALUE(logits.dim() >= 1 && logits.sym_size(-1) > 0, "logits must have a last dimension of at least 1");
  const auto shape = logits.sym_sizes();
  TORCH_CHECK_VALUE(target.sym_sizes() == shape.slice(0, shape.size() - 1), "target must have shape ",
                    shape.slice(0, shape.size() - 1), ", that of logits without the last dimension; got ",
                    target.sym_sizes());
  TORCH_CHECK_TYPE(target.scalar_type() == at::kLong || target.scalar_type() == at::kInt,
                   "target must be int32 or int64; got ", target.scalar_type());
  TORCH_CHECK_VALUE(!weight || (weight->dim() == 1 && weight->sym_size(0) == logits.sym_size(-1)),
                    "weight must have shape [", logits.sym_size(-1), "], a value for each class");
}

// Checks the targets before any row is read at its target. CPU only; in backward too, because the memory may have
// changed.
inline void check_targets(const Tensor& target, int64_t n_classes, int64_t ignore_index) {
  const int64_t* t = target.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < target.numel(); ++i)
    TORCH_CHECK_INDEX((t[i] >= 0 && t[i] < n_classes) || t[i] == ignore_index, "target must be in 0 .. ", n_classes - 1,
                      " or ignore_index ", ignore_index, "; got ", t[i]);
}

// The outputs (loss, lse, lse_low, z_loss, total_weight) on logits' device. The meta device uses them as fakes. An
// output that was not requested has shape [0].
using CrossEntropyOutputs = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

inline CrossEntropyOutputs empty_cross_entropy_fwd(const Tensor& logits, const Tensor& target,
                                                   const OptionalTensor& weight, Reduction reduction, bool save_lse,
                                                   bool save_z_loss, bool save_stats) {
  check_cross_entropy(logits, target, weight);
  const auto rows = target.sym_sizes(), losses = reduction == Reduction::none ? rows : c10::SymIntArrayRef();
  const auto wanted = [&](bool is, c10::SymIntArrayRef sizes) {
    return is ? empty_beside(logits, sizes, at::kFloat) : absent(logits, at::kFloat);
  };
  return {wanted(true, losses), wanted(save_lse, rows), wanted(save_stats, rows), wanted(save_z_loss, losses),
          wanted(save_stats && reduction == Reduction::mean, {})};
}

inline Tensor empty_cross_entropy_bwd(const Tensor& logits, const Tensor& target, const OptionalTensor& weight) {
  check_cross_entropy(logits, target, weight);
  return empty_beside(logits, logits.sym_sizes(), logits.scalar_type());
}

// Calls of the operators below autograd, for a node that records them. total_weight: only of a mean.
namespace cross_entropy_schema {
inline const LossOptions kUsualLoss{-100, "mean", 0.0, 0.0, std::nullopt};
CrossEntropyOutputs call_fwd(const Tensor& logits, const Tensor& target, const OptionalTensor& weight,
                             const LossOptions& options, bool save_lse, bool save_z_loss, bool save_stats);
Tensor call_bwd(const Tensor& dloss, const Tensor& logits, const Tensor& target, const OptionalTensor& weight,
                const Tensor& lse, const Tensor& lse_low, const OptionalTensor& total_weight,
                const LossOptions& options);
}  // namespace cross_entropy_schema

// The options as the kernels take them.
inline CrossEntropyOptions cross_entropy_options(const LossOptions& o) {
  return {o.ignore_index, static_cast<float>(o.label_smoothing), static_cast<float>(o.z_loss),
          static_cast<float>(o.softcap.value_or(0.0))};
}

// Owns the tensors that the kernels' pointers point into: logits, target and weight, or copies if a kernel does not
// support their layout.
struct CrossEntropyInputs {
  Tensor logits, target, weight, weight_sum;

  CrossEntropyInputs(const Tensor& logits_, const Tensor& target_, const OptionalTensor& weight_,
                     double label_smoothing)
      : logits(logits_),
        target(target_.to(at::kLong).contiguous()),
        weight(unwrap(weight_)) {
    if (!weight.defined()) return;
    weight = weight.to(at::kFloat).contiguous();
    if (label_smoothing > 0.0) weight_sum = weight.sum(at::kDouble).to(at::kFloat);
  }

  // Sets the members that forward and backward share.
  template <class Args>
  Args args(const CrossEntropyOptions& options) {
    Args args{};
    std::array<RowStrides, 1> strides{};
    make_row_layout<1>({&logits}, args.rows, strides);
    args.logits = logits.const_data_ptr();
    args.target = target.const_data_ptr<int64_t>();
    args.weight = weight.defined() ? weight.const_data_ptr<float>() : nullptr;
    args.weight_sum = weight_sum.defined() ? weight_sum.const_data_ptr<float>() : nullptr;
    args.logits_strides = strides[0];
    args.n_cols = logits.size(-1);
    args.options = options;
    args.type = dtype_of(logits);
    return args;
  }
};

// What the forward kernel writes for each row. Without a reduction these are the outputs themselves.
struct CrossEntropyRows {
  Tensor losses, zs;

  CrossEntropyRows(const CrossEntropyOutputs& outputs, const Tensor& target, Reduction reduction, bool save_z_loss)
      : losses(std::get<0>(outputs)),
        zs(std::get<3>(outputs)) {
    if (reduction == Reduction::none) return;
    losses = empty_beside(losses, target.sym_sizes(), at::kFloat);
    if (save_z_loss) zs = empty_beside(losses, target.sym_sizes(), at::kFloat);
  }
};

// Empty outputs are not written. There is at least one row.
inline CrossEntropyForward cross_entropy_forward_args(CrossEntropyInputs& in, const CrossEntropyOptions& options,
                                                      const CrossEntropyRows& rows,
                                                      const CrossEntropyOutputs& outputs) {
  const auto written = [](const Tensor& t) { return t.numel() ? t.mutable_data_ptr<float>() : nullptr; };
  const auto& [loss, lse, lse_low, z, total_weight] = outputs;
  auto args = in.args<CrossEntropyForward>(options);
  args.loss = written(rows.losses);
  args.lse = written(lse);
  args.lse_low = written(lse_low);
  args.z_loss = written(rows.zs);
  return args;
}

// `dloss`, `lse` and `lse_low` are contiguous.
inline CrossEntropyBackward cross_entropy_backward_args(CrossEntropyInputs& in, const CrossEntropyOptions& options,
                                                        const Tensor& dloss, const Tensor& lse, const Tensor& lse_low,
                                                        const OptionalTensor& total_weight, Reduction reduction,
                                                        const Tensor& dlogits) {
  const int64_t rows = in.target.numel(), losses = reduction == Reduction::none ? rows : 1;
  TORCH_CHECK_VALUE(dloss.numel() == losses && lse.numel() == rows && lse_low.numel() == rows,
                    "dloss must have a value for each loss, lse and lse_low one for each token");
  auto args = in.args<CrossEntropyBackward>(options);
  args.dloss = dloss.const_data_ptr<float>();
  args.dloss_a_row = reduction == Reduction::none;
  args.total_weight = total_weight.has_value() ? total_weight->const_data_ptr<float>() : nullptr;
  args.lse = lse.const_data_ptr<float>();
  args.lse_low = lse_low.const_data_ptr<float>();
  args.dlogits = dlogits.mutable_data_ptr();
  args.n_classes = args.n_cols;
  return args;
}

}  // namespace foundry
