// Turns what is known at run time (memory types, sizes, alignment) into template arguments of kernels.
#pragma once

#include <initializer_list>

#include "../common/rows.h"
#include "launch.cuh"

namespace foundry {
namespace cuda {

// A type, or a value, as an argument of a generic lambda.
template <class T> struct Tag {
  using type = T;
};
template <auto kValue> struct Constant {
  static constexpr auto value = kValue;
};

// The type of a Tag argument.
#define FK_TYPE(tag) typename decltype(tag)::type

// Calls f(Tag<T>) for the memory type.
template <class F>
cudaError_t with_type(Dtype type, F&& f) {
  if (type == Dtype::f32) return f(Tag<float>{});
  return type == Dtype::bf16 ? f(Tag<__nv_bfloat16>{}) : f(Tag<__half>{});
}

inline int size_of(Dtype type) { return type == Dtype::f32 ? 4 : 2; }

// Whether 16-byte accesses are aligned at p and at any sum of multiples of these element strides from it. A null
// pointer is never accessed, so it counts as aligned.
inline bool aligned(const void* p, Dtype type = Dtype::f32, std::initializer_list<int64_t> strides = {}) {
  if (p == nullptr) return true;
  if (reinterpret_cast<uintptr_t>(p) % 16 != 0) return false;
  for (const int64_t stride : strides)
    if (stride * size_of(type) % 16 != 0) return false;
  return true;
}

// Same for every row.
inline bool aligned(const void* p, Dtype type, const Rows& rows, const RowStrides& strides) {
  const auto used = [&](int d) { return rows.size[d] == 1 ? 0 : strides.stride[d]; };
  static_assert(kRowRank == 3, "a stride for each dimension");
  return aligned(p, type, {used(0), used(1), used(2)});
}

constexpr int64_t kMaxBlocks = 0x7FFFFFFF;  // of a grid's first dimension

}  // namespace cuda
}  // namespace foundry
