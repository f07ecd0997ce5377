// The operators foundry_kernels::lora_down, lora_up, lora_up_ and lora_outer: the thin matmuls of linear layers with
// low-rank adapters. ops/lora_linear composes them; there is no gradient here. lora_linear_cpu.cpp launches the
// kernels.
//
// x is [N, K] of a 16- or 32-bit dtype. t, [N, r], is float32, and so is the result of lora_outer. The adapter's
// matrices may be transposed views, of x's dtype or float32.
#include "lora_linear.h"

#include <torch/library.h>

#include "autograd.h"

namespace foundry {
namespace lora_linear_schema {

Tensor down_meta(const Tensor& x, const Tensor& a, double, const DropoutOptions& dropout) {
  return empty_lora_down(x, a, dropout);
}

Tensor up_meta(const Tensor& base, const Tensor& t, const Tensor& b, double, const DropoutOptions& dropout) {
  check_lora_up(base, t, b, dropout);
  return at::empty_symint(base.sym_sizes(), base.options());
}

void up_in_place_meta(const Tensor& base, const Tensor& t, const Tensor& b, double, const DropoutOptions& dropout) {
  check_lora_up(base, t, b, dropout);
}

Tensor outer_meta(const Tensor& t, const Tensor& x, double, bool transposed, const DropoutOptions& dropout) {
  return empty_lora_outer(t, x, transposed, dropout);
}

}  // namespace lora_linear_schema

TORCH_LIBRARY_FRAGMENT(FK_LIBRARY, m) {
  const std::string end = "float scale, " + DropoutOptions::schema() + ")";
  define_operator(m, "lora_down(Tensor x, Tensor a, " + end + " -> Tensor down");
  define_operator(m, "lora_up(Tensor base, Tensor t, Tensor b, " + end + " -> Tensor");
  define_operator(m, "lora_up_(Tensor(a!) base, Tensor t, Tensor b, " + end + " -> ()");
  define_operator(m, "lora_outer(Tensor t, Tensor x, float scale, bool transposed, " + DropoutOptions::schema() +
                         ") -> Tensor douter");
}

TORCH_LIBRARY_IMPL(FK_LIBRARY, Meta, m) {
  m.impl("lora_down", flat_kernel<&lora_linear_schema::down_meta>);
  m.impl("lora_up", flat_kernel<&lora_linear_schema::up_meta>);
  m.impl("lora_up_", flat_kernel<&lora_linear_schema::up_in_place_meta>);
  m.impl("lora_outer", flat_kernel<&lora_linear_schema::outer_meta>);
}

}  // namespace foundry
