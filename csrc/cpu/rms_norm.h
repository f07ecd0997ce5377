// RMSNorm and LayerNorm on the CPU over raw pointers. The caller starts the threads: each call does a range of rows or
// chunks.
#pragma once

#include "../common/dropout.h"
#include "../common/rms_norm.h"
#include "isa.h"

namespace foundry {

// Whether rows are read split (see vec2.h). The weight must then be split too.
inline bool reads_split(Dtype x, Dtype y) { return x == Dtype::bf16 && y == Dtype::bf16; }

struct RmsNormForward : RmsNormForwardCall {
  const float* weight;  // [n_cols], the offset added, split where reads_split, or null; never null where `centered`
  const float* bias;    // as the weight; where `centered` only
  Dropout dropout;      // of x, before the residual is added to it
};

struct RmsNormBackward : RmsNormBackwardCall {
  const float* weight;  // as in forward
  float* dw_chunks;     // [chunks, n_cols] or null; a chunk's sum over its rows
  float* db_chunks;     // likewise; where `centered` only
  int64_t chunk_rows;
  Dropout dropout;  // of the forward pass: dx is then the gradient of what was dropped out and added
  void* dresidual;  // [rows, n_cols], that of the residual; written where there is dropout and a dx
};

// out[c] = sum over chunks of chunks[., c], for columns [begin, end).
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
  bool split;  // see vec2.h
};

}  // namespace foundry

FK_DECLARE_PER_ISA(void, rms_norm_forward, const RmsNormForward& args, int64_t row_begin, int64_t row_end)
FK_DECLARE_PER_ISA(void, rms_norm_backward, const RmsNormBackward& args, int64_t chunk_begin, int64_t chunk_end)
FK_DECLARE_PER_ISA(void, sum_chunks, const SumChunks& args, int64_t col_begin, int64_t col_end)
FK_DECLARE_PER_ISA(void, widen_weight, const WidenWeight& args)
