// Arguments that the attention kernels of the CPU and the GPU share.
#pragma once

#include <cmath>

#include "rows.h"

namespace foundry {

constexpr int64_t kUnbounded = int64_t(1) << 40;  // no limit on this side of the window
constexpr int64_t kMaskTile = 64;                 // queries and keys of a tile of AttentionTiles

// Element strides; the last dimension has stride 1.
struct HeadStrides {
  int64_t batch, head, token;
};

// A tensor over pairs of queries and keys. Pairs may share an element along a dimension: the element stride is then 0.
struct PairStrides {
  int64_t batch, head, query, key;
};

// Which pairs are seen, in tiles of 64 queries and 64 keys.
struct AttentionTiles {
  const int32_t* index;   // of a tile's words, or null; 0: no pair is seen, 1: all are
  PairStrides strides;    // in tiles
  const uint64_t* words;  // [n, 64]: bit j of a query's word is key j
};

// A row's log-sum-exp between the passes, from its largest logit and the logarithm of the sum relative to it. Beside a
// maximum beyond 2^31, which a bias may cause, a double would lose the logarithm, and the backward pass would compute
// weights that are larger by the sum. So the logarithm is scaled with the maximum. It is still too small to change lse
// as a float.
FK_HOST_DEVICE inline double lse_scale(float max) { return std::fmax(1.0, std::fabs(double(max)) * 0x1p-31); }
FK_HOST_DEVICE inline double join_lse(float max, double log_sum) { return max + log_sum * lse_scale(max); }

// The same in two parts: the float, and the rest. A weight is e^((logit - lse) - rest): for large weights the logit and
// lse nearly cancel.
struct SplitLse {
  float lse, rest;
  FK_HOST_DEVICE explicit SplitLse(double joined) : lse(float(joined)), rest(0.0f) {
    if (std::fabs(lse) < INFINITY) rest = float((joined - lse) / lse_scale(lse));
  }
};

}  // namespace foundry
