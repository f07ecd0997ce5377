// The thin matmuls of linear layers with low-rank adapters on the CPU. One side is r wide, the rank; the other is an
// activation, which is widened to float32 as it is read. Sums are in float32, in an order that depends on neither the
// other rows nor the threads. The caller starts the threads.
#pragma once

#include <cstdint>

#include "../common/dropout.h"
#include "isa.h"

namespace foundry {

// Rows of packed matrices have a multiple of this many columns, the rest zero.
constexpr int64_t kLoraPad = 16;
constexpr int64_t kLoraRows = 24, kLoraColumns = 64;  // that one task computes

inline int64_t lora_padded(int64_t n) { return (n + kLoraPad - 1) / kLoraPad * kLoraPad; }

// in [rows, columns] of any strides as a float matrix `out`, rows lora_padded(columns) apart.
struct LoraPack {
  const void* in;
  int64_t in_row, in_col;
  Dtype type;
  int64_t rows, columns;
  float* out;
};

// t = scale drop(x) a
struct LoraDown {
  const void* x;  // [n_rows, width], rows x_row apart
  int64_t x_row, n_rows, width;
  Dtype type;
  const float* a;  // [width, rank], packed
  int64_t rank;
  float* t;  // [n_rows, rank]
  float scale;
  Dropout dropout;
};

// y = base + drop(scale t b), which may overwrite base
struct LoraUp {
  const void* base;  // [n_rows, width], rows base_row apart
  int64_t base_row, n_rows, width;
  Dtype type;
  const float* t;  // [n_rows, rank], rows t_row apart
  int64_t t_row, rank;
  const float* b;  // [rank, width], packed
  void* y;         // as base, rows y_row apart
  int64_t y_row;
  float scale;
  Dropout dropout;
};

// out = scale t^T drop(x)
struct LoraOuter {
  const float* t;  // [n_rows, rank], rows t_row apart
  int64_t t_row, rank;
  const void* x;  // [n_rows, width], rows x_row apart
  int64_t x_row, n_rows, width;
  Dtype type;
  float* out;  // [rank, width], element (r, k) at r * out_row + k * out_col
  int64_t out_row, out_col;
  float scale;
  Dropout dropout;
};

}  // namespace foundry

FK_DECLARE_PER_ISA(void, lora_pack, const LoraPack& of)
// Blocks of kLoraRows rows; of kLoraColumns columns.
FK_DECLARE_PER_ISA(void, lora_down, const LoraDown& of, int64_t block_begin, int64_t block_end)
FK_DECLARE_PER_ISA(void, lora_up, const LoraUp& of, int64_t block_begin, int64_t block_end)
FK_DECLARE_PER_ISA(void, lora_outer, const LoraOuter& of, int64_t block_begin, int64_t block_end)
