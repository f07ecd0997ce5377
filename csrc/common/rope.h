// The arguments of the CPU and GPU kernels of rope and qk_norm_rope: strides, tables, and q and k.
#pragma once

#include "rows.h"

namespace foundry {

// Element strides of a [B, H, T, D] tensor whose last dimension has stride 1.
struct RopeStrides {
  int64_t batch = 0, head = 0, token = 0;

  FK_HOST_DEVICE int64_t offset(int64_t b, int64_t h, int64_t t) const { return b * batch + h * head + t * token; }
};

// The row of cos and sin for each token.
struct RopeTables {
  const void* cos;  // rows of `half` values
  const void* sin;
  Dtype type;
  int64_t n_rows;                                                      // P of [P, R/2], or T of [B, T, R/2]
  int64_t half;                                                        // R / 2
  int64_t cos_batch_stride, cos_stride, sin_batch_stride, sin_stride;  // batch strides of [P, R/2] are 0
  const void* positions;                                               // int64 or int32; null: token t has row t
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

// q or k. Without heads nothing is read or written.
struct RopeHeads {
  const void* x;
  void* y;
  int64_t n_heads;
  RopeStrides x_strides, y_strides;
};

// A call's q and k, as Heads, and what both share.
template <class Heads>
struct RopeCall {
  Heads heads[2];
  RopeTables tables;
  int64_t n_tokens, all_tokens;  // T, B * T
  int64_t width;                 // D
  bool interleaved;
  Dtype type;
};

struct Rope : RopeCall<RopeHeads> {
  bool inverse;
};

// q or k of qk_norm_rope. Each backend adds the weight in the form that its kernels read.
struct NormedHeads : RopeHeads {
  float* rstd;  // [B, H, T] or null
};

struct NormedGradients {
  const void* dy;
  const void* x;
  const float* rstd;  // [B, H, T]
  void* dx;           // or null
  int64_t n_heads;    // 0 if no gradient is needed
  RopeStrides dy_strides, x_strides, dx_strides;
};

template <class Heads>
struct QkNormRopeCall : RopeCall<Heads> {
  bool round_before_weight;
};

}  // namespace foundry
