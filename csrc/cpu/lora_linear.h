// The thin matmuls of linear layers with low-rank adapters on the CPU. One side is r wide, the rank; the other is an
// activation, which is widened to float32 as it is read. Sums are in float32, in an order that depends on neither the
// other rows nor the threads. The caller starts the threads.
#pragma once

#include <cstdint>

#include "../common/dropout.h"
#include "isa.h"

namespace foundry {

// What one task computes: so many rows of `down`; rows and columns of `up`; columns of `outer`.
constexpr int64_t kLoraDownRows = 120, kLoraUpRows = 256, kLoraUpColumns = 256, kLoraOuterColumns = 64;

// A matrix of an adapter, element (i, j) at i * row + j * column; one of the strides is 1.
struct LoraMatrix {
  const void* data;
  int64_t row, column;
  Dtype type;
};

// t = scale drop(x) a
struct LoraDown {
  const void* x;  // [n_rows, width], rows x_row apart
  int64_t x_row, n_rows, width;
  Dtype type;
  LoraMatrix a;  // [width, rank]
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
  LoraMatrix b;  // [rank, width]
  void* y;       // as base, rows y_row apart
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

// The tasks of `up` are numbered along the rows first.
FK_DECLARE_PER_ISA(void, lora_down, const LoraDown& of, int64_t task_begin, int64_t task_end)
FK_DECLARE_PER_ISA(void, lora_up, const LoraUp& of, int64_t task_begin, int64_t task_end)
FK_DECLARE_PER_ISA(void, lora_outer, const LoraOuter& of, int64_t task_begin, int64_t task_end)
