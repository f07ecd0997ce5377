// What the CPU's and the GPU's kernels of rope and qk_norm_rope are told about heads and tables.
#pragma once

#include "rows.h"

namespace foundry {

// Element strides of a [B, H, T, D] tensor whose last dimension has stride 1.
struct HeadStrides {
  int64_t batch = 0, head = 0, token = 0;

  FK_HOST_DEVICE int64_t offset(int64_t b, int64_t h, int64_t t) const { return b * batch + h * head + t * token; }
};

// The row of cos and of sin that each token takes.
struct RopeTables {
  const void* cos;  // rows of `half` values
  const void* sin;
  Dtype type;
  int64_t n_rows;                                                      // P of [P, R/2], or T of [B, T, R/2]
  int64_t half;                                                        // R / 2
  int64_t cos_batch_stride, cos_stride, sin_batch_stride, sin_stride;  // batch strides of [P, R/2] are 0
  const void* positions;                                               // int64 or int32, or null: token t takes row t
  bool positions_are_64_bit;
  int64_t position_batch_stride, position_stride;

  FK_HOST_DEVICE int64_t row(int64_t b, int64_t t) const {
    if (positions == nullptr) return t;
    const int64_t at = b * position_batch_stride + t * position_stride;
    return positions_are_64_bit ? static_cast<const int64_t*>(positions)[at]
                                : static_cast<const int32_t*>(positions)[at];
  }
  FK_HOST_DEVICE bool has_row(int64_t row) const { return row >= 0 && row < n_rows; }
  FK_HOST_DEVICE int64_t cos_offset(int64_t b, int64_t row) const { return b * cos_batch_stride + row * cos_stride; }
  FK_HOST_DEVICE int64_t sin_offset(int64_t b, int64_t row) const { return b * sin_batch_stride + row * sin_stride; }
};

// q or k; without heads nothing is read or written.
struct RopeHeads {
  const void* x;
  void* y;
  int64_t n_heads;
  HeadStrides x_strides, y_strides;
};

struct Rope {
  RopeHeads heads[2];
  RopeTables tables;
  int64_t n_tokens, all_tokens;  // T, B * T
  int64_t width;                 // D
  bool interleaved, inverse;
  Dtype type;
};

}  // namespace foundry
