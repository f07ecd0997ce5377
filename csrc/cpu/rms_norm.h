// RMSNorm and LayerNorm on the CPU over raw pointers. The caller starts the threads; each call handles a range of rows
// or chunks.
#pragma once

#include "../common/dropout.h"
#include "../common/rms_norm.h"
#include "isa.h"

namespace foundry {

// Whether rows are read split (see vec2.h). Then the weight must be split too.
inline bool reads_split(Dtype x, Dtype y) { return x == Dtype::bf16 && y == Dtype::bf16; }

struct RmsNormForward : RmsNormForwardCall {
  const float* weight;  // [n_cols], offset added, split if reads_split; may be null unless `centered`
  const float* bias;    // same layout; only if `centered`
  Dropout dropout;      // of x, before the residual is added
};

struct RmsNormBackward : RmsNormBackwardCall {
  const float* weight;  // as in forward
  float* dw_chunks;     // [chunks, n_cols] or null; a chunk's sum over its rows
  float* db_chunks;     // same; only if `centered`
  int64_t chunk_rows;
  Dropout dropout;  // of the forward pass: dx is then the gradient of x before dropout
  void* dresidual;  // [rows, n_cols], the residual's gradient; written if there is dropout and a dx
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
