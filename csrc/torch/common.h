// Helpers that all operators of csrc/torch share.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <sys/mman.h>

#include <array>
#include <optional>
#include <utility>
#include <vector>

#include "../common/rows.h"

// The library name under which operators are registered. The checker that runs CUDA kernels on a CPU uses another one.
#if !defined(FK_LIBRARY)
#define FK_LIBRARY foundry_kernels
#endif
#define FK_STRINGIFY_(name) #name
#define FK_STRINGIFY(name) FK_STRINGIFY_(name)
#define FK_LIBRARY_NAME FK_STRINGIFY(FK_LIBRARY)

namespace foundry {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

inline Tensor unwrap(const OptionalTensor& t) { return t.has_value() ? *t : Tensor(); }
inline OptionalTensor wrap(const Tensor& t) { return t.defined() ? OptionalTensor(t) : std::nullopt; }

inline Dtype dtype_of(const at::Tensor& t) {
  switch (t.scalar_type()) {
    case at::kFloat: return Dtype::f32;
    case at::kBFloat16: return Dtype::bf16;
    case at::kHalf: return Dtype::f16;
    default: TORCH_CHECK_TYPE(false, "foundry_kernels: unsupported dtype ", t.scalar_type());
  }
}

// Requests huge pages for a large new tensor: page faults of 4 KB cost more than writing it.
inline void advise_huge_pages(const at::Tensor& t) {
#if defined(MADV_HUGEPAGE)
  constexpr uintptr_t kHuge = 2u << 20;
  const size_t bytes = t.nbytes();
  if (bytes < 2 * kHuge) return;
  const uintptr_t start = reinterpret_cast<uintptr_t>(t.data_ptr());
  const uintptr_t first = (start + kHuge - 1) & ~(kHuge - 1), last = (start + bytes) & ~(kHuge - 1);
  madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);  // only advice: a failure changes nothing
#endif
}

// The dimensions of a tensor from outermost to innermost in memory. The last one always counts as innermost. Dimensions
// of size 1 or stride 0 have no memory order and stay where they are in the shape. Same as
// foundry_kernels/core/layout.py.
inline std::vector<int64_t> storage_order(const Tensor& x) {
  std::vector<int64_t> order(x.dim());
  for (int64_t d = 0; d < x.dim(); ++d) order[d] = d;
  if (x.is_contiguous()) return order;
  std::vector<int64_t> slots, ranked;
  for (int64_t d = 0; d + 1 < x.dim(); ++d)
    if (x.sym_size(d) > 1 && x.sym_stride(d) > 0) slots.push_back(d);
  for (const int64_t d : slots) {
    auto at = ranked.end();
    while (at != ranked.begin() && x.sym_stride(*(at - 1)) < x.sym_stride(d)) --at;
    ranked.insert(at, d);
  }
  for (size_t i = 0; i < slots.size(); ++i) order[slots[i]] = ranked[i];
  return order;
}

// A new tensor of x's shape and dtype, dense with its dimensions in the given order in memory.
inline Tensor empty_in_order(const Tensor& x, at::IntArrayRef order) {
  const auto sizes = x.sym_sizes();
  std::vector<c10::SymInt> strides(sizes.size());
  c10::SymInt stride = 1;
  for (size_t i = order.size(); i-- > 0;) {
    strides[order[i]] = stride;
    stride = stride * sizes[order[i]].max(1);
  }
  return at::empty_strided_symint(sizes, strides, x.options());
}

inline Tensor empty_in_storage_order(const Tensor& x) { return empty_in_order(x, storage_order(x)); }

// A new tensor on x's device. Kernels only: their tensors are real, never fake. A call has several of them, and
// at::empty spends a third of a microsecond on finding out what is known here.
inline Tensor empty_beside(const Tensor& x, c10::SymIntArrayRef sizes, at::ScalarType dtype) {
  return x.is_cpu() ? Tensor(at::detail::empty_cpu(C10_AS_INTARRAYREF_SLOW(sizes), dtype))
                    : at::empty_symint(sizes, x.options().dtype(dtype));
}

// A placeholder for an output that was not requested.
inline Tensor absent(const Tensor& x, at::ScalarType dtype) { return empty_beside(x, {0}, dtype); }

// The strides that describe the rows of tensors of one shape. Undefined tensors get zeros. Returns false if that takes
// more than kRowRank dimensions or if a last stride is not 1.
template <size_t N>
bool row_layout(const std::array<const at::Tensor*, N>& tensors, Rows& rows, std::array<RowStrides, N>& strides) {
  const at::Tensor* shape = nullptr;
  for (const at::Tensor* t : tensors) {
    if (!t->defined()) continue;
    if (!shape) shape = t;
    if (t->stride(-1) != 1 && t->size(-1) > 1) return false;
  }
  int rank = 0;  // dimensions so far; the newest is last in the arrays, so the unused ones come first
  for (int64_t axis = 0; axis < shape->dim() - 1; ++axis) {
    const int64_t size = shape->size(axis);
    if (size == 1) continue;
    bool merges = rank > 0;
    for (size_t t = 0; t < N && merges; ++t)
      if (tensors[t]->defined()) merges = strides[t].stride[kRowRank - 1] == size * tensors[t]->stride(axis);
    if (!merges && ++rank > kRowRank) return false;
    if (!merges) {
      for (int d = 0; d + 1 < kRowRank; ++d) rows.size[d] = rows.size[d + 1];
      rows.size[kRowRank - 1] = 1;
    }
    rows.size[kRowRank - 1] *= size;
    for (size_t t = 0; t < N; ++t) {
      auto& stride = strides[t].stride;
      if (!merges)
        for (int d = 0; d + 1 < kRowRank; ++d) stride[d] = stride[d + 1];
      stride[kRowRank - 1] = tensors[t]->defined() ? tensors[t]->stride(axis) : 0;
    }
  }
  return true;
}

// As row_layout, but copies the tensors if it returns false.
template <size_t N>
void make_row_layout(const std::array<at::Tensor*, N>& tensors, Rows& rows, std::array<RowStrides, N>& strides) {
  std::array<const at::Tensor*, N> view;
  for (size_t i = 0; i < N; ++i) view[i] = tensors[i];
  if (row_layout(view, rows, strides)) return;
  for (at::Tensor* t : tensors)
    if (t->defined()) *t = t->contiguous();
  rows = Rows{};
  strides = {};
  TORCH_INTERNAL_ASSERT(row_layout(view, rows, strides));
}

}  // namespace foundry
