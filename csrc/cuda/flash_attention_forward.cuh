// Shared by the forward kernels with tensor cores, and how their key splits are combined.
#pragma once

#include "flash_attention_scores.cuh"
#include "flash_attention_tiles.cuh"

namespace foundry {
namespace cuda {

// Whether the tensor core kernels support the call, and their launch.
bool forward_in_tiles(const AttentionForward& a);
cudaError_t forward_tiles(const AttentionForward& a, const Splits& splits, cudaStream_t stream);

namespace tiles {

// Whether the mask's tiles hide the 32 or 64 keys from `key` on from all these queries, of `pack` heads.
__device__ __forceinline__ bool is_hidden(const AttentionInputs& a, const Head& h, int first_query, int last_query,
                                          int pack, int key) {
  constexpr int kTile = static_cast<int>(kMaskTile);
  for (int g = 0; g < pack; ++g)
    for (int tile = first_query / kTile; tile <= last_query / kTile; ++tile) {
      Head own = h;
      own.head += g;
      if (a.tiles.index[pair_at(a.tiles.strides, own, tile, key / kTile)] != 0) return false;
    }
  return true;
}

// Copies rows of queries [first, first + kRows) to shared memory, zeros from n_rows on; row = query * pack + head in
// group.
template <class T, int kDim, int kRows, class Shared>
__device__ __forceinline__ void copy_queries(Shared& shared, uint32_t at, const AttentionInputs& a, const Head& h,
                                             int first, int n_rows, int pack) {
  constexpr int kChunks = kDim / 8, kPass = kThreads / kChunks;
  const int chunk = threadIdx.x % kChunks, in_pass = threadIdx.x / kChunks;
  const T* q = static_cast<const T*>(a.q) + h.query_at(a.q_strides, 0) + chunk * 8;
  for (int r = in_pass; r < kRows; r += kPass) {
    const int row = first + r;
    const T* from = q + row / pack * a.q_strides.token + row % pack * a.q_strides.head;
    cp_async(shared, at + swizzled<kDim>(r, chunk), from, row < n_rows && chunk * 8 < a.head_dim);
  }
}

// Packs the weights of a lane's two rows, row and row + 8, after dropout.
template <class T, int kTilesN>
__device__ __forceinline__ void drop(const float (&weights)[kTilesN][4], uint32_t (&packed)[kTilesN / 2][4],
                                     const AttentionInputs& a, uint64_t seed, const Head& h, int row, int n_rows,
                                     int pack_heads, int first_key, int lane) {
  FK_UNROLL for (int n = 0; n < kTilesN; n += 4) {
    uint32_t bits[2] = {0, 0};  // of columns 2 t and 2 t + 1, in the order of kept_weights
    FK_UNROLL for (int e = 0; e < 2; ++e) {
      const int j = first_key + n * 8 + lane % 4 * 2 + e;
      if (pack_heads == 1) {
        bits[e] = kept_weights(a.dropout, seed, h, row, j);
        continue;
      }
      for (int half = 0; half < 2; ++half) {
        const int own_row = row + 8 * half, i = own_row / pack_heads;
        if (own_row >= n_rows) continue;
        const Head own(a, h.n, h.head + own_row % pack_heads);
        const uint32_t four = kept_weights(a.dropout, seed, own, i - i % 16 / 8 * 8, j) >> (i % 16 / 8 * 4) & 0xFu;
        bits[e] |= four << (4 * half);
      }
    }
    FK_UNROLL for (int c = 0; c < 4; ++c) FK_UNROLL for (int half = 0; half < 2; ++half) {
      const float* w = weights[n + c] + 2 * half;
      const auto kept = [&](int e) { return bits[e] >> (4 * half + c) & 1u ? w[e] * a.dropout.scale : 0.f; };
      packed[(n + c) / 2][c % 2 * 2 + half] = pack<T>(kept(0), kept(1));
    }
  }
}

// An unfinished row: its sums of values, then RowSums. `to` is null if the row does not exist.
template <int kDim>
__device__ __forceinline__ void write_split(float* to, const float (&sums)[kDim / 8][4], int half, const RowSums& r,
                                            int width, int lane) {
  if (to == nullptr) return;
  FK_UNROLL for (int n = 0; n < kDim / 8; ++n) {
    const int column = n * 8 + lane % 4 * 2;
    if (column < width) store(to + column, Pack<float, 2>{sums[n][2 * half], sums[n][2 * half + 1]});
  }
  if (lane % 4 != 0) return;
  to[width] = r.max;
  to[width + 1] = r.sum;
  to[width + 2] = r.entropy;
}

}  // namespace tiles
}  // namespace cuda
}  // namespace foundry
