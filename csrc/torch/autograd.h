// Helpers that the operators' autograd functions share. Saved tensors and needed gradients are read by name, not by
// index.
#pragma once

#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <array>

#include "common.h"

namespace foundry {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The tensors given to save_for_backward, in that order. Use a structured binding: auto [x, weight] =
// saved_tensors<2>(ctx).
template <size_t N>
std::array<Tensor, N> saved_tensors(AutogradContext* ctx) {
  const variable_list saved = ctx->get_saved_variables();
  TORCH_INTERNAL_ASSERT(saved.size() == N);
  std::array<Tensor, N> out;
  std::copy(saved.begin(), saved.end(), out.begin());
  return out;
}

// Which inputs of forward need a gradient. Ask in the order of forward's arguments. Autograd counts only the tensors
// that it was given, so an absent optional tensor has no index.
class NeedsGrad {
 public:
  explicit NeedsGrad(AutogradContext* ctx) : ctx_(ctx) {}
  bool next() { return ctx_->needs_input_grad(index_++); }
  bool next_if(bool was_given) { return was_given && next(); }

 private:
  AutogradContext* ctx_;
  size_t index_ = 0;
};

inline void refuse_second_derivative(const char* op) {
  TORCH_CHECK(!at::GradMode::is_enabled(), op, " has no second derivative: backward was called with create_graph=True");
}

inline bool requires_grad(const Tensor& t) { return t.requires_grad(); }
inline bool requires_grad(at::TensorList ts) {
  return std::any_of(ts.begin(), ts.end(), [](const Tensor& t) { return t.requires_grad(); });
}
inline bool requires_grad(const OptionalTensor& t) { return t.has_value() && t->requires_grad(); }

// Whether autograd must record a call.
template <class... Tensors>
bool any_requires_grad(const Tensors&... tensors) {
  return at::GradMode::is_enabled() && (requires_grad(tensors) || ...);
}

}  // namespace foundry
