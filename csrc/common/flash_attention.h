// Arguments that the attention kernels of the CPU and the GPU share.
#pragma once

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

}  // namespace foundry
