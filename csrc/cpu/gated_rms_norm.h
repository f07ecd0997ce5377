// RMSNorm times an activated gate on the CPU over raw pointers. The caller starts the threads; each call handles a
// range of rows or chunks of rows.
#pragma once

#include "../common/activation.h"
#include "../common/rows.h"
#include "isa.h"

namespace foundry {

struct GatedRmsNormForward {
  const void *x, *gate;  // of `type`
  const float* weight;   // [n_cols], or null
  void* y;               // [rows, n_cols] of `type`
  float* rstd;           // [rows], or null
  Rows rows;
  RowStrides x_strides, gate_strides;
  int64_t n_cols;
  float eps;
  bool round_before_weight;
  Activation activation;
  Dtype type;
};

struct GatedRmsNormBackward {
  const void *dy, *x, *gate;
  const float* weight;
  const float* rstd;
  void *dx, *dgate;  // [rows, n_cols], or null
  float* dw_chunks;  // [chunks, n_cols], or null; a chunk's sum over its rows
  int64_t chunk_rows;
  Rows rows;
  RowStrides dy_strides, x_strides, gate_strides;
  int64_t n_cols;
  bool round_before_weight;
  Activation activation;
  Dtype type;
};

}  // namespace foundry

FK_DECLARE_PER_ISA(void, gated_rms_norm_forward, const GatedRmsNormForward& args, int64_t row_begin, int64_t row_end)
FK_DECLARE_PER_ISA(void, gated_rms_norm_backward, const GatedRmsNormBackward& args, int64_t chunk_begin,
                   int64_t chunk_end)
