// Shapes and checks that the operators' fakes and kernels share.
#pragma once

#include "dropout_options.h"

namespace foundry {

// The dtype of t.
inline at::ScalarType lora_dtype(const Tensor& x) { return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat; }

inline Tensor empty_lora_down(const Tensor& x, const Tensor& a, const DropoutOptions& dropout) {
  TORCH_CHECK_VALUE(x.dim() == 2 && a.dim() == 2 && x.sym_size(1) == a.sym_size(1),
                    "x must be [N, K] and a [r, K]; got ", x.sym_sizes(), " and ", a.sym_sizes());
  check_dropout(x, dropout);
  return at::empty_symint({x.sym_size(0), a.sym_size(0)}, x.options().dtype(lora_dtype(x)));
}

inline void check_lora_up(const Tensor& base, const Tensor& t, const Tensor& b, const DropoutOptions& dropout) {
  TORCH_CHECK_VALUE(base.dim() == 2 && t.dim() == 2 && b.dim() == 2 && t.sym_size(0) == base.sym_size(0) &&
                        b.sym_size(0) == base.sym_size(1) && b.sym_size(1) == t.sym_size(1),
                    "base must be [N, M], t [N, r] and b [M, r]; got ", base.sym_sizes(), ", ", t.sym_sizes(), " and ",
                    b.sym_sizes());
  check_dropout(base, dropout);
}

// [r, K], or [K, r] if `transposed`.
inline Tensor empty_lora_outer(const Tensor& t, const Tensor& x, bool transposed, const DropoutOptions& dropout) {
  TORCH_CHECK_VALUE(t.dim() == 2 && x.dim() == 2 && t.sym_size(0) == x.sym_size(0),
                    "t must be [N, r] and x [N, K]; got ", t.sym_sizes(), " and ", x.sym_sizes());
  check_dropout(x, dropout);
  const auto r = t.sym_size(1), k = x.sym_size(1);
  return at::empty_symint({transposed ? k : r, transposed ? r : k}, t.options());
}

}  // namespace foundry
