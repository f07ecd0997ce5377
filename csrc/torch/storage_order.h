// The order in which a tensor's dimensions lie in memory, as foundry_kernels/_layout.py has it.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_strided.h>

#include <vector>

namespace foundry {

// The dimensions from the outermost to the innermost in memory, the last one always counted as innermost; those without
// a place of their own (of size 1 or stride 0) keep the one that they have in the shape.
inline std::vector<int64_t> storage_order(const at::Tensor& x) {
  std::vector<int64_t> order(x.dim());
  for (int64_t d = 0; d < x.dim(); ++d) order[d] = d;
  if (x.is_contiguous()) return order;
  std::vector<int64_t> placed, ranked;
  for (int64_t d = 0; d + 1 < x.dim(); ++d)
    if (x.sym_size(d) > 1 && x.sym_stride(d) > 0) placed.push_back(d);
  for (const int64_t d : placed) {
    auto at = ranked.end();
    while (at != ranked.begin() && x.sym_stride(*(at - 1)) < x.sym_stride(d)) --at;
    ranked.insert(at, d);
  }
  for (size_t i = 0; i < placed.size(); ++i) order[placed[i]] = ranked[i];
  return order;
}

// A new tensor of these sizes and x's dtype, dense with its dimensions in x's storage order.
inline at::Tensor empty_in_storage_order(const at::Tensor& x, at::SymIntArrayRef sizes) {
  const auto order = storage_order(x);
  std::vector<c10::SymInt> strides(sizes.size());
  c10::SymInt stride = 1;
  for (size_t i = order.size(); i-- > 0;) {
    strides[order[i]] = stride;
    stride = stride * sizes[order[i]].max(1);
  }
  return at::empty_strided_symint(sizes, strides, x.options());
}

inline at::Tensor empty_in_storage_order(const at::Tensor& x) { return empty_in_storage_order(x, x.sym_sizes()); }

}  // namespace foundry
