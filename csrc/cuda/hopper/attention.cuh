// Shared by the forward and the backward kernel.
#pragma once

#include "../flash_attention_scores.cuh"
#include "../flash_attention_tiles.cuh"
#include "attention.h"
#include "choice.h"
#include "products.cuh"
#include "score.cuh"

namespace foundry {
namespace cuda {
namespace hopper {

using tiles::kLog2e;

// The kernel width for head dimensions; 192 is for values of up to 128. Boxes are padded with zeros.
inline int width_of(const AttentionInputs& a) {
  const int width = max(a.head_dim, a.head_dim_v);
  return width <= 64 ? 64 : width <= 128 ? 128 : a.head_dim <= 192 && a.head_dim_v <= 128 ? 192 : 256;
}

// Whether tensor maps can describe a tensor of the call: 16-byte chunks at multiples of 16 bytes.
inline bool can_map(const void* data, const HeadStrides& s, const AttentionInputs& a, int64_t heads, int width) {
  const bool packed = a.starts_q != nullptr;
  const auto fits = [](int64_t stride, int64_t size) {
    return size <= 1 || (stride > 0 && stride < (int64_t(1) << 39) && stride % 8 == 0);
  };
  return width % 8 == 0 && width <= 256 && reinterpret_cast<uintptr_t>(data) % 16 == 0 && fits(s.token, 2) &&
         fits(s.head, heads) && (packed || fits(s.batch, a.n_sequences));
}

inline hopper_choice::Shape shape_of(const AttentionInputs& a) {
  const bool packed = a.starts_q != nullptr;
  return {(packed ? 1 : a.n_sequences) * a.n_heads,
          a.group,
          packed ? a.total_q : a.n_queries,
          a.n_queries,
          a.n_keys,
          max(a.head_dim, a.head_dim_v)};
}

// What takes() requires of both passes, besides the shape.
inline bool takes_inputs(const AttentionInputs& a) {
  return a.type != Dtype::f32 && a.n_queries > 0 && a.n_keys > 0 && a.n_sequences > 0 && !a.mask && !a.tiles.index &&
         !a.bias && !a.dropout.threshold && can_map(a.q, a.q_strides, a, a.n_heads, a.head_dim) &&
         can_map(a.k, a.k_strides, a, a.n_heads / a.group, a.head_dim) &&
         can_map(a.v, a.v_strides, a, a.n_heads / a.group, a.head_dim_v);
}

inline cudaError_t encode(TensorMap& map, const MapOf& of) {
  const cudaError_t error = encode_map(map, of);
  if (error != cudaSuccess) refused_map = of.data;
  return error;
}
inline cudaError_t map_queries(TensorMap& map, const AttentionInputs& a, const void* data, const HeadStrides& strides,
                               int width, int rows) {
  const bool packed = a.starts_q != nullptr;
  return encode(map, {data, a.type, packed ? 1 : a.n_sequences, a.n_heads, packed ? a.total_q : a.n_queries, width,
                      strides, rows});
}
inline cudaError_t map_keys(TensorMap& map, const AttentionInputs& a, const void* data, const HeadStrides& strides,
                            int width, int rows) {
  const bool packed = a.starts_k != nullptr;
  return encode(map, {data, a.type, packed ? 1 : a.n_sequences, a.n_heads / a.group, packed ? a.total_k : a.n_keys,
                      width, strides, rows});
}
// The batch index of a sequence in a tensor map.
__device__ __forceinline__ int batch_of(const AttentionInputs& a, const Head& h) { return a.starts_q ? 0 : h.n; }

// --- tiles of the tokens of all sequences ----------------------------------------------------------------------------
//
// A packed sequence has as many tiles as its tokens need. Those of sequence n begin at starts[n] / size + n, which
// leaves at most one unused tile after each sequence and needs no table. In a dense batch all sequences have equally
// many.

struct TileOf {
  int sequence, tile;  // the tile may be beyond the end of the sequence
};

inline __host__ __device__ int64_t count_tiles(const int32_t* starts, int64_t total, int64_t n_sequences,
                                               int64_t tokens, int size) {
  return starts ? total / size + n_sequences : n_sequences * ((tokens + size - 1) / size);
}

__device__ __forceinline__ int64_t first_tile_of(const int32_t* starts, int64_t total, int64_t tokens, int n,
                                                 int size) {
  if (!starts) return n * ((tokens + size - 1) / size);
  return Head::bounded(starts[n], total) / size + n;
}

// kWays: sequences that a step compares, whose loads are independent.
template <int kWays = 8>
__device__ __forceinline__ TileOf find_tile(const int32_t* starts, int64_t total, int64_t n_sequences, int64_t tokens,
                                            int size, int64_t index) {
  if (!starts) {
    const int each = static_cast<int>((tokens + size - 1) / size), at = static_cast<int>(index);  // of a grid's blocks
    return {at / each, at % each};
  }
  int low = 0;  // the last sequence that begins at or before `index`
#pragma unroll 1
  for (int count = static_cast<int>(n_sequences); count > 1;) {
    const int step = (count + kWays - 1) / kWays;
    int at = 0;
    FK_UNROLL for (int i = 1; i < kWays; ++i) {
      const int n = min(i * step, count - 1);
      if (first_tile_of(starts, total, tokens, low + n, size) <= index) at = n;
    }
    low += at;
    count = min(step, count - at);
  }
  return {low, static_cast<int>(index - first_tile_of(starts, total, tokens, low, size))};
}

// --- in shared memory ------------------------------------------------------------------------------------------------

// Zeroes rows [begin, end) of a tile of panels, with 128 threads, of which this one is `thread`. Rows beyond the end of
// a packed sequence belong to the next one, and their values, possibly NaN, must not reach a sum. The others wait until
// all have passed fence_proxy_async().
__device__ __forceinline__ void clear_rows(uint32_t tile, int begin, int end, int panels, uint32_t panel_bytes,
                                           int thread) {
  const int chunks = (end - begin) * 8;
#pragma unroll 1
  for (int panel = 0; panel < panels; ++panel)
#pragma unroll 1
    for (int i = thread; i < chunks; i += 128)
      clear_shared_16(tile + panel * panel_bytes + begin * kPanelBytes + i * 16);
  fence_proxy_async();
}

}  // namespace hopper
}  // namespace cuda
}  // namespace foundry
