// What the kernels of attention on the CPU and on a GPU are told alike.
#pragma once

#include "rows.h"

namespace foundry {

constexpr int64_t kUnbounded = int64_t(1) << 40;  // a side of the window
constexpr int64_t kMaskTile = 64;                 // queries and keys of a tile of AttentionTiles

// Element strides; the last dimension has stride 1.
struct HeadStrides {
  int64_t batch, head, token;
};

// A tensor of the pairs of queries and keys, of which all may share an element along a dimension: element strides, 0
// where they do.
struct PairStrides {
  int64_t batch, head, query, key;
};

// Which pairs are seen, by tiles of 64 queries and 64 keys.
struct AttentionTiles {
  const int32_t* index;   // of a tile's words, or null; 0 sees nothing, 1 all
  PairStrides strides;    // in tiles
  const uint64_t* words;  // [n, 64]: bit j of a query's is key j
};

}  // namespace foundry
