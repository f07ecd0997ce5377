// Direct calls (direct.cpp) of the losses.
#include <ATen/ops/linear.h>

#include "direct.h"
#include "direct_calls.h"
#include "torch/cross_entropy.h"
#include "torch/products.h"

namespace foundry {
namespace {

// The limits of _linear_loss/sizes.py, which sets them. Until then no call is direct.
struct {
  int64_t multiplications = 0;  // of a small matmul
  int64_t tokens = 0;
} single_chunk;

// Whether there is one target per token of x [..., N], and the class weights need no gradient.
bool are_targets(const Tensor& x, const Tensor& target, const OptionalTensor& weight, int64_t n_classes) {
  return x.dim() > 0 && x.size(-1) > 0 && target.sizes() == x.sizes().slice(0, x.dim() - 1) &&
         (!weight || (weight->dim() == 1 && weight->size(0) == n_classes && !weight->requires_grad()));
}

}  // namespace

PyObject* call_cross_entropy(const OnAccelerator& served, PyObject* const* arguments, Py_ssize_t given) {
  Arguments in(served, arguments, given, 4 + LossOptions::kArguments);
  const Tensor &logits = in.tensor(), &target = in.indices();
  const OptionalTensor weight = in.optional_tensor();
  LossOptions options;
  options.read_from(in);
  in.need(in.ok() && logits.dim() > 0 && are_targets(logits, target, weight, logits.size(-1)));
  if (!in.ok()) Py_RETURN_NONE;
  return result_of([&] { return std::get<0>(cross_entropy(logits, target, weight, options, false, false)); });
}

// A single chunk without gradients: other strategies cannot save memory there, unless a 16-bit weight is large and its
// gradient is wanted in float32. Small matmuls use float32 copies.
PyObject* call_linear_cross_entropy(const OnAccelerator& served, PyObject* const* arguments, Py_ssize_t given) {
  constexpr int64_t kWorthIt = 1 << 13;  // multiplications that justify the call of another matmul
  Arguments in(served, arguments, given, 7 + LossOptions::kArguments);
  const Tensor &hidden = in.tensor(), &weight = in.tensor(), &target = in.indices();
  const OptionalTensor bias = in.optional_tensor(), class_weight = in.optional_tensor();
  LossOptions options;
  options.read_from(in);
  const double logit_scale = in.real();
  in.need(is_number(logit_scale) && in.ok() && !autocasts(hidden));
  in.need(in.ok() && weight.dim() == 2 && weight.size(0) > 0 && target.numel() > 0 &&
          target.numel() <= single_chunk.tokens && are_targets(hidden, target, class_weight, weight.size(0)) &&
          weight.size(1) == hidden.size(-1) && weight.scalar_type() == hidden.scalar_type());
  in.need(in.ok() && (!bias || (bias->dim() == 1 && bias->size(0) == weight.size(0) &&
                                bias->scalar_type() == hidden.scalar_type())));
  if (!in.ok()) Py_RETURN_NONE;
  const auto type = hidden.scalar_type();
  const bool small = hidden.numel() * weight.size(0) <= single_chunk.multiplications;
  in.need(small || type == at::kFloat || (type == at::kBFloat16 ? fast_bfloat16_products() : fast_float16_products()));
  in.need(in.ok() && !(at::GradMode::is_enabled() &&
                       (hidden.requires_grad() || weight.requires_grad() || (bias && bias->requires_grad()))));
  if (!in.ok()) Py_RETURN_NONE;
  return result_of([&] {
    const auto within = small ? at::kFloat : type;
    const auto cast = [&](const Tensor& t) { return type == within ? t : t.to(within); };
    const Tensor x = cast(hidden), w = cast(weight);
    const OptionalTensor b = bias ? OptionalTensor(cast(*bias)) : bias;
    const bool worth_it = within == at::kFloat && x.numel() * w.size(0) > kWorthIt;
    const Tensor logits = worth_it ? linear_float32(x, w, b) : at::linear(x, w, b);
    return std::get<0>(cross_entropy(logit_scale == 1.0 ? logits : logits.mul(logit_scale), target, class_weight,
                                     options, false, false));
  });
}

void set_single_chunk(int64_t multiplications, int64_t tokens) { single_chunk = {multiplications, tokens}; }
std::pair<int64_t, int64_t> get_single_chunk() { return {single_chunk.multiplications, single_chunk.tokens}; }

}  // namespace foundry
