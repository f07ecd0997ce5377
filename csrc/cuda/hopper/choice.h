// What the shape of a call decides: whether these kernels compute it, and into how many parts the backward pass is
// split. Batch-invariant calls ask neither. Both count the multiprocessors of an H100 or H200, so that a call has the
// same bits on all GPUs of compute capability 9.0.
#pragma once

#include <algorithm>
#include <cstdint>

namespace foundry {
namespace hopper_choice {

constexpr int64_t kMultiprocessors = 132;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct Shape {
  int64_t heads;    // query heads; of all sequences, unless they are packed
  int64_t group;    // query heads per key-value head
  int64_t queries;  // of a sequence, or of all packed ones
  int64_t longest;  // queries of the longest sequence
  int64_t keys;     // of the longest sequence
  int width;        // the larger head dimension
};

// Whether the forward pass is faster than by mma.sync, which packs the heads of a group into a tile and splits keys
// over blocks: if queries fill half of a tile, and tiles two fifths of the GPU, unless there are too few keys to split.
// `is_faster` of ops/flash_attention/hopper.py is the same function.
inline bool forward_is_faster(const Shape& s) {
  const int64_t rows = s.width <= 64 ? 192 : 128, tiles = s.heads * ceil_div(s.queries, rows);
  return 2 * s.longest >= rows && (s.keys <= 1024 || 5 * tiles >= 2 * kMultiprocessors);
}

// The same of the backward pass: if queries fill half of a tile, and the tiles of keys that wait for each other are not
// many more than the tiles of queries that they visit.
inline bool backward_is_faster(const Shape& s) {
  const int64_t rows = s.width <= 64 ? 128 : 64, tiles = s.group * ceil_div(s.longest, rows);
  return 2 * s.longest >= rows && std::min(ceil_div(s.keys, 128), kMultiprocessors) <= 4 * tiles;
}

// Into how many parts the queries of a key-value head are split. Without splits there are `blocks` blocks, and each
// visits `tiles` tiles of `rows` queries for each head of a group. `uneven`: some visit all and some hardly any, and
// those with the most begin first. A divisor of the group splits its heads, a multiple also each head's tiles.
// By the time until the last block ends, as triton/backward_launch.py does; a tenth of it must be gained.
inline int64_t backward_splits(int64_t blocks, int64_t group, int64_t tiles, int64_t rows, bool uneven) {
  constexpr double kCost = 300;         // of a part's sums in memory, in rows
  constexpr int64_t kMostAtOnce = 512;  // blocks with such sums
  const auto end = [&](int64_t splits) {
    const int64_t heads = std::max<int64_t>(1, group / splits), parts = std::max<int64_t>(1, splits / group);
    const double each = static_cast<double>(heads * ceil_div(tiles, parts) * rows), cost = splits > 1 ? kCost : 0;
    const double waves = static_cast<double>(blocks * splits) / kMultiprocessors;
    if (uneven) return std::max(each, waves * each / 2) + cost * std::max(1.0, waves);
    return (each + cost) * static_cast<double>(ceil_div(blocks * splits, kMultiprocessors));
  };
  int64_t best = 1;
  for (int64_t n = 2; n <= group * tiles && n * blocks <= kMostAtOnce; ++n)
    if ((group % n == 0 || n % group == 0) && end(n) < 0.9 * end(best)) best = n;
  return best;
}

}  // namespace hopper_choice
}  // namespace foundry
