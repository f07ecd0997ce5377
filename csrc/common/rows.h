// Rows of a tensor whose last dimension has stride 1. A row number combines the indices of all other dimensions.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define FK_HOST_DEVICE __host__ __device__
#else
#define FK_HOST_DEVICE
#endif

namespace foundry {

constexpr int kRowRank = 3;

// Sizes of the (merged) dimensions that index rows, outermost first. Unused leading ones are 1.
struct Rows {
  int64_t size[kRowRank] = {1, 1, 1};
  FK_HOST_DEVICE int64_t count() const { return size[0] * size[1] * size[2]; }
};

// Element strides of one tensor over these dimensions.
struct RowStrides {
  int64_t stride[kRowRank] = {0, 0, 0};

  FK_HOST_DEVICE int64_t offset(const Rows& rows, int64_t row) const {
    if (rows.size[0] == 1 && rows.size[1] == 1) return row * stride[2];  // rows are evenly spaced
    const int64_t i2 = row % rows.size[2], outer = row / rows.size[2];
    return (outer / rows.size[1]) * stride[0] + (outer % rows.size[1]) * stride[1] + i2 * stride[2];
  }
};

enum class Dtype { f32, bf16, f16 };

}  // namespace foundry
