// The order of packed sequences in the forward pass: those with the most keys first. Each block finds it for itself.
#pragma once

#include "attention.cuh"

namespace foundry {
namespace cuda {
namespace hopper {
namespace forward {

constexpr int kMostOrdered = 128;  // sequences; more keep their order

inline __host__ __device__ bool has_order(const AttentionInputs& a) {
  return a.starts_q && a.n_sequences <= kMostOrdered;
}
// Bytes of shared memory: the sequence at each place and the tiles of rows before it; after the last, all tiles.
inline uint32_t order_bytes(const AttentionInputs& a) {
  return has_order(a) ? 8 * (static_cast<uint32_t>(a.n_sequences) + 1) : 0;
}

// By a warpgroup, with a thread per sequence.
template <int kRows>
__device__ __forceinline__ void order_sequences(const AttentionInputs& a, uint32_t to) {
  const auto length = [](const int32_t* starts, int64_t total, int n) {
    return static_cast<int>(max(Head::bounded(starts[n + 1], total) - Head::bounded(starts[n], total), int64_t(0)));
  };
  const auto tiles_of = [&](int n) { return (length(a.starts_q, a.total_q, n) + kRows - 1) / kRows; };
  const int n = threadIdx.x % 128, n_sequences = static_cast<int>(a.n_sequences);
  if (n < n_sequences) {
    const int keys = length(a.starts_k, a.total_k, n);
    int place = 0, before = 0;
#pragma unroll 4  // whose loads are in flight together
    for (int other = 0; other < n_sequences; ++other) {
      const int of_other = length(a.starts_k, a.total_k, other), tiles = tiles_of(other);
      const bool first = of_other > keys || (of_other == keys && other < n);
      place += first;
      before += first ? tiles : 0;
    }
    store_shared(to + 8 * place, n);
    store_shared(to + 8 * place + 4, before);
    if (place == n_sequences - 1) store_shared(to + 8 * place + 12, before + tiles_of(n));
  }
  FK_NAMED_BARRIER(2, 128);
}

// The tile of rows at a position of the order; a sequence's last rows first. Beyond the end it is none of a sequence's.
__device__ __forceinline__ TileOf tile_at(const AttentionInputs& a, uint32_t order, int position) {
  int low = 0, high = static_cast<int>(a.n_sequences) - 1;  // the last place with at most `position` tiles before it
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (load_shared(order + 8 * middle + 4) <= position) low = middle;
    else high = middle - 1;
  }
  const int end = load_shared(order + 8 * low + 12);
  return {load_shared(order + 8 * low), position < end ? end - 1 - position : kFar};
}

}  // namespace forward
}  // namespace hopper
}  // namespace cuda
}  // namespace foundry
