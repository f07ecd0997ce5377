// Checks and outputs that the schema and the CUDA launches share.
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

// Whether [E, K, N] matrices are stored as [E, N, K]. Same as foundry_kernels/ops/grouped_mm/layout.py.
inline bool is_transposed(const Tensor& weight) { return weight.sym_stride(2) != 1 && weight.sym_stride(1) == 1; }

// The outputs on x's device. The meta device uses them as fakes. The gradient of the matrices has their memory order.
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
