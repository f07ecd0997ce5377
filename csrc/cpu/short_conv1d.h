// Causal depthwise convolutions along time on the CPU, with a bias and SiLU. The caller starts the threads; each call
// handles a range of tasks.
#pragma once

#include <algorithm>

#include "../common/rows.h"
#include "isa.h"

namespace foundry {

constexpr int kMaxTaps = 8;
constexpr int64_t kConvTile = 1024;  // channels of a task

// The inputs before the first token of each document, the newest last; without data they are zeros.
struct ConvState {
  void* data;
  int64_t length;                           // inputs of a document
  int64_t stride_n, stride_c, stride_time;  // in elements
};

// The tokens of all documents, as rows. A document is a row of the batch or, if there are bounds, rows bounds[n] to
// bounds[n + 1].
struct ConvInput {
  const void* x;
  int64_t stride_batch, stride_time;  // the channels' stride is 1
  const int64_t* bounds;
  int64_t n_documents, length, n_rows, n_channels;  // length: of a row of the batch
  ConvState initial;
  Dtype type;

  int64_t first(int64_t document) const { return bounds ? bounds[document] : document * length; }
  // The document of a row. Some before it may be empty.
  int64_t document_of(int64_t row) const {
    return bounds ? std::upper_bound(bounds + 1, bounds + n_documents, row) - (bounds + 1) : row / length;
  }
  int64_t tiles() const { return (n_channels + kConvTile - 1) / kConvTile; }
};

struct ConvFilter {
  const float* weight;  // [taps, n_channels]
  const float* bias;    // [n_channels] or null
  int taps;
  bool silu;
};

// A task is a chunk of rows and a tile of channels; the channels of a chunk follow each other.
struct ConvForward {
  ConvInput in;
  ConvFilter filter;
  const void* residual;  // like x, added to the result, or null
  int64_t residual_stride_batch, residual_stride_time;
  void* y;  // [n_rows, n_channels]
  int64_t chunk_rows;
};

struct ConvBackward {
  ConvInput in;
  ConvFilter filter;
  const void* dy;
  int64_t dy_stride_batch, dy_stride_time;
  ConvState dfinal;    // without data: no gradient
  void* dx;            // [n_rows, n_channels] or null
  ConvState dinitial;  // without data: not requested; what belongs to empty documents is not written
  float* sums;         // [chunks, taps + 1, n_channels] or null: the gradients of the taps and of the bias
  int64_t chunk_rows;
};

// Writes the last inputs of each document; a task is a document and a tile of channels. `final` may be `in.initial`.
struct ConvFinal {
  ConvInput in;
  ConvState final;
};

// One token of each row. A task is a tile of channels, of all rows.
constexpr int64_t kConvStepTile = 256;
struct ConvStep {
  const void* x;
  int64_t x_stride_n, x_stride_c;
  ConvState state;     // of x's type; shifted by one, with x as the newest
  const void* weight;  // of weight_type
  int64_t weight_stride_c, weight_stride_tap;
  const float* bias;     // or null
  const void* residual;  // [n_rows, n_channels], added to the result, or null
  int64_t residual_stride_n;
  void* y;  // [n_rows, n_channels]
  int64_t n_rows, n_channels;
  int taps;
  bool silu;
  Dtype type, weight_type;

  int64_t tiles() const { return (n_channels + kConvStepTile - 1) / kConvStepTile; }
};

}  // namespace foundry

FK_DECLARE_PER_ISA(void, short_conv1d_forward, const ConvForward& args, int64_t task_begin, int64_t task_end)
FK_DECLARE_PER_ISA(void, short_conv1d_backward, const ConvBackward& args, int64_t task_begin, int64_t task_end)
FK_DECLARE_PER_ISA(void, short_conv1d_final, const ConvFinal& args, int64_t task_begin, int64_t task_end)
FK_DECLARE_PER_ISA(void, short_conv1d_step, const ConvStep& args, int64_t task_begin, int64_t task_end)
