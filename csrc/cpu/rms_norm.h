// RMSNorm on the CPU over raw pointers. Threads are the caller's: each call does a range of rows or chunks.
#pragma once

#include "../common/rows.h"
#include "isa.h"

namespace foundry {

struct RmsNormForward {
  const void* x;
  const void* residual;  // or null: then h is not written
  const float* weight;   // [n_cols], the offset added, or null
  void* y;               // [rows, n_cols]
  void* h;               // [rows, n_cols]
  float* rstd;           // [rows] or null
  Rows rows;
  RowStrides x_strides, residual_strides;
  int64_t n_cols;
  float eps;
  bool round_before_weight;
  Dtype x_type, y_type;  // y_type is x_type or f32
};

struct RmsNormBackward {
  const void* dy;
  const void* dh;       // gradient of h from elsewhere, or null
  const void* x;        // what was normalised
  const float* weight;  // as in forward
  const float* rstd;
  void* dx;          // [rows, n_cols] or null
  float* dw_chunks;  // [chunks, n_cols] or null; a chunk's sum over its rows
  int64_t chunk_rows;
  Rows rows;
  RowStrides dy_strides, dh_strides, x_strides;
  int64_t n_cols;
  bool round_before_weight;
  Dtype x_type, y_type;
};

// out[c] = sum over chunks of chunks[., c], columns [begin, end).
struct SumChunks {
  const float* chunks;
  int64_t n_chunks, n_cols;
  float* out;
};

// out[i] = float(in[i]) + offset
struct WidenWeight {
  const void* in;
  Dtype type;
  float offset;
  float* out;
  int64_t n;
};

}  // namespace foundry

FK_DECLARE_PER_ISA(void, rms_norm_forward, const RmsNormForward& args, int64_t row_begin, int64_t row_end)
FK_DECLARE_PER_ISA(void, rms_norm_backward, const RmsNormBackward& args, int64_t chunk_begin, int64_t chunk_end)
FK_DECLARE_PER_ISA(void, sum_chunks, const SumChunks& args, int64_t col_begin, int64_t col_end)
FK_DECLARE_PER_ISA(void, widen_weight, const WidenWeight& args)
