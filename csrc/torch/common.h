// What the operators of csrc/torch share.
#pragma once

#include <ATen/core/Tensor.h>
#include <sys/mman.h>

#include <array>
#include <vector>

#include "../common/rows.h"

// The name that operators are registered under; the checker of CUDA kernels on a CPU builds them under another.
#if !defined(FK_LIBRARY)
#define FK_LIBRARY foundry_kernels
#endif
#define FK_STRINGIFY_(name) #name
#define FK_STRINGIFY(name) FK_STRINGIFY_(name)
#define FK_LIBRARY_NAME FK_STRINGIFY(FK_LIBRARY)

namespace foundry {

inline Dtype dtype_of(const at::Tensor& t) {
  switch (t.scalar_type()) {
    case at::kFloat: return Dtype::f32;
    case at::kBFloat16: return Dtype::bf16;
    case at::kHalf: return Dtype::f16;
    default: TORCH_CHECK_TYPE(false, "foundry_kernels: unsupported dtype ", t.scalar_type());
  }
}

// Asks for huge pages behind a large fresh tensor: faulting it in 4 KB at a time costs more than writing it.
inline void advise_huge_pages(const at::Tensor& t) {
#if defined(MADV_HUGEPAGE)
  constexpr uintptr_t kHuge = 2u << 20;
  const size_t bytes = t.nbytes();
  if (bytes < 2 * kHuge) return;
  const uintptr_t start = reinterpret_cast<uintptr_t>(t.data_ptr());
  const uintptr_t first = (start + kHuge - 1) & ~(kHuge - 1), last = (start + bytes) & ~(kHuge - 1);
  madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);  // advice: failing changes nothing
#endif
}

// How the rows of tensors of one shape are reached: undefined tensors get zero strides.
// Returns false where they need more than kRowRank dimensions or a last stride other than 1.
template <size_t N>
bool row_layout(const std::array<const at::Tensor*, N>& tensors, Rows& rows, std::array<RowStrides, N>& strides) {
  const at::Tensor* shape = nullptr;
  for (const at::Tensor* t : tensors) {
    if (!t->defined()) continue;
    if (!shape) shape = t;
    if (t->stride(-1) != 1 && t->size(-1) > 1) return false;
  }
  int rank = 0;  // dimensions so far; the newest is the last of the arrays, so that unused ones lead
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

// As row_layout, after copying what cannot be reached.
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
