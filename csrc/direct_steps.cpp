// Direct calls (direct.cpp) of steps of decoding, which overwrite a state and have no gradients.
#include <cmath>

#include "direct.h"
#include "direct_calls.h"
#include "torch/autograd.h"

namespace foundry {
namespace {

// The limits of the public functions.
constexpr int64_t kMaxKeyWidth = 256, kMaxValueWidth = 512;
constexpr int64_t kMaxTaps = 8;

// g or beta: one number for each head of v, or of g, for each of its `keys` too.
bool are_numbers(const OptionalTensor& x, const Tensor& v, int64_t keys = -1) {
  return !x || ((x->dim() == 2 || (keys > 0 && x->dim() == 3 && x->size(2) == keys)) && x->size(0) == v.size(0) &&
                x->size(1) == v.size(1) && (x->scalar_type() == at::kFloat || x->scalar_type() == v.scalar_type()));
}

// The gates' parameters: one number for each head of v, or a bias for each number of g.
bool are_gates(const Tensor& v, const OptionalTensor& g, const OptionalTensor& A_log, const OptionalTensor& dt_bias) {
  const auto is_kind = [&](const Tensor& x) {
    return x.scalar_type() == at::kFloat || x.scalar_type() == v.scalar_type();
  };
  if (!A_log) return !dt_bias;
  if (!g || A_log->dim() != 1 || A_log->size(0) != v.size(1) || !is_kind(*A_log)) return false;
  return !dt_bias || (dt_bias->dim() == g->dim() - 1 && dt_bias->size(0) == v.size(1) &&
                      (g->dim() == 2 || dt_bias->size(1) == g->size(2)) && is_kind(*dt_bias));
}

// Whether the state [B, H_v, D_k, D_v] is contiguous in its last two dimensions and no head shares the memory of
// another one.
bool is_delta_state(const Tensor& state, const Tensor& k, const Tensor& v) {
  const int64_t keys = k.size(2), values = v.size(2);
  if (state.scalar_type() != at::kFloat || state.dim() != 4 || state.size(0) != v.size(0) ||
      state.size(1) != v.size(1) || state.size(2) != keys || state.size(3) != values)
    return false;
  return (state.stride(3) == 1 || values == 1) && (state.stride(2) == values || keys == 1) &&
         (state.stride(0) != 0 || state.size(0) == 1) && (state.stride(1) != 0 || state.size(1) == 1);
}

bool is_delta_step(const Tensor& q, const Tensor& k, const Tensor& v) {
  return q.dim() == 3 && v.dim() == 3 && k.sizes() == q.sizes() && k.scalar_type() == q.scalar_type() &&
         v.scalar_type() == q.scalar_type() && v.size(0) == q.size(0) && q.size(1) > 0 && v.size(1) % q.size(1) == 0 &&
         0 < q.size(2) && q.size(2) <= kMaxKeyWidth && 0 < v.size(2) && v.size(2) <= kMaxValueWidth;
}

}  // namespace

PyObject* call_gated_delta_rule_step(const OnAccelerator& served, PyObject* const* arguments, Py_ssize_t given) {
  Arguments in(served, arguments, given, 12);
  const Tensor &q = in.tensor(), &k = in.tensor(), &v = in.tensor();
  const OptionalTensor g = in.optional_tensor(), beta = in.optional_tensor();
  const Tensor& state = in.tensor();
  const OptionalTensor A_log = in.optional_tensor(), dt_bias = in.optional_tensor();
  double scale = 0.0;
  in.optional_positive(scale);
  const bool qk_l2norm = in.boolean();
  std::optional<double> beta_limit;
  in.optional_positive(beta_limit);
  in.need(in.ok() && !autocasts(q) && is_delta_step(q, k, v));
  in.need(in.ok() && are_numbers(g, v, q.size(2)) && are_numbers(beta, v) && is_delta_state(state, k, v));
  in.need(in.ok() && are_gates(v, g, A_log, dt_bias) && (!beta_limit || beta));
  in.need(in.ok() && !any_requires_grad(q, k, v, g, beta, state, A_log, dt_bias));
  if (!in.ok()) Py_RETURN_NONE;
  if (scale == 0.0) scale = std::pow(static_cast<double>(q.size(2)), -0.5);
  return result_of(
      [&] { return gated_delta_rule_step(q, k, v, g, beta, state, A_log, dt_bias, scale, qk_l2norm, beta_limit); });
}

PyObject* call_short_conv1d_step(const OnAccelerator& served, PyObject* const* arguments, Py_ssize_t given) {
  Arguments in(served, arguments, given, 7);
  const Tensor &x = in.tensor(), &state = in.tensor(), &weight = in.tensor();
  const OptionalTensor bias = in.optional_tensor();
  const bool silu = in.optional_word("silu", "swish");
  const OptionalTensor residual = in.optional_tensor();
  in.need(in.ok() && x.dim() == 2 && weight.dim() == 2 && weight.size(0) == x.size(1) && 0 < weight.size(1) &&
          weight.size(1) <= kMaxTaps && (!bias || (bias->dim() == 1 && bias->size(0) == x.size(1))));
  in.need(in.ok() && state.dim() == 3 && state.size(0) == x.size(0) && state.size(1) == x.size(1) &&
          state.size(2) >= weight.size(1) - 1 && state.scalar_type() == x.scalar_type());
  in.need(in.ok() && (!residual || (residual->sizes() == x.sizes() && residual->scalar_type() == x.scalar_type())));
  in.need(in.ok() && !any_requires_grad(x, state, weight, bias, residual));
  if (!in.ok()) Py_RETURN_NONE;
  return result_of([&] { return short_conv1d_step(x, state, weight, bias, silu ? "silu" : "none", residual); });
}

}  // namespace foundry
