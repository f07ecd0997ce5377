// What the operator's schema and the GPU side share: checks and outputs.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <tuple>

#include "common.h"

namespace foundry {

// The operator, for direct.cpp.
Tensor grouped_mm(const Tensor& x, const Tensor& weight, const Tensor& offs, bool batch_invariant);

inline void check_grouped_mm(const Tensor& x, const Tensor& weight, const Tensor& offs) {
  TORCH_CHECK_VALUE(x.dim() == 2, "x must be [M, K]; got shape ", x.sym_sizes());
  TORCH_CHECK_VALUE(weight.dim() == 3 && weight.sym_size(1) == x.sym_size(1),
                    "weight must be [E, K, N], K the width of x; got shape ", weight.sym_sizes());
  TORCH_CHECK_VALUE(offs.dim() == 1 && offs.sym_size(0) == weight.sym_size(0), "offs must be [E]; got shape ",
                    offs.sym_sizes());
}

// Whether [E, K, N] matrices lie in memory as [E, N, K]; the same as foundry_kernels/ops/grouped_mm/layout.py.
inline bool is_transposed(const Tensor& weight) { return weight.sym_stride(2) != 1 && weight.sym_stride(1) == 1; }

// Outputs, on x's device; they are also the fakes of the meta device. The gradient of the matrices is in their order.
inline Tensor empty_grouped_mm_fwd(const Tensor& x, const Tensor& weight, const Tensor& offs) {
  check_grouped_mm(x, weight, offs);
  return at::empty_symint({x.sym_size(0), weight.sym_size(2)}, x.options());
}

inline std::tuple<Tensor, Tensor> empty_grouped_mm_bwd(const Tensor& x, const Tensor& weight, const Tensor& offs,
                                                       bool need_dx, bool need_dweight) {
  check_grouped_mm(x, weight, offs);
  const auto empty_dweight = [&] {
    const auto sizes = weight.sym_sizes();
    if (!is_transposed(weight)) return at::empty_symint(sizes, weight.options());
    return at::empty_symint({sizes[0], sizes[2], sizes[1]}, weight.options()).transpose(1, 2);
  };
  return {need_dx ? at::empty_symint(x.sym_sizes(), x.options()) : absent(x, x.scalar_type()),
          need_dweight ? empty_dweight() : absent(x, x.scalar_type())};
}

}  // namespace foundry
