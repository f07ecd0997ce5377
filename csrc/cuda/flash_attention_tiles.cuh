// What the attention kernels with matrix instructions share.
//
// A block has 4 warps, and a warp 16 rows, or kTilesM times as many, of what the block owns. Of a product's 16x8
// results a lane has, with g = lane / 4 and t = lane % 4, columns 2 t and 2 t + 1 of rows g and g + 8.
#pragma once

#include <type_traits>

#include "flash_attention_scores.cuh"
#include "tiles.cuh"

namespace foundry {
namespace cuda {
namespace tiles {

constexpr int kThreads = 128;
constexpr float kLog2e = 1.4426950408889634f;

// sums[2 d + ..] += left (16 rows) x rows [16 k, 16 k + 16) of a tile, for each 16 columns d of kDim.
template <class T, int kDim, int kTilesM, int kSteps, class Shared>
__device__ __forceinline__ void add_product(float (&sums)[kTilesM][kDim / 8][4],
                                            const uint32_t (&left)[kTilesM][kSteps][4], Shared& shared, uint32_t lane) {
  FK_UNROLL for (int d = 0; d < kDim / 16; ++d) FK_UNROLL for (int k = 0; k < kSteps; ++k) {
    uint32_t right[4];
    ldmatrix_trans(right, shared, (lane ^ (d * 32)) + k * 32 * kDim);
    FK_UNROLL for (int m = 0; m < kTilesM; ++m) {
      mma<T>(sums[m][2 * d], left[m][k], right[0], right[1]);
      mma<T>(sums[m][2 * d + 1], left[m][k], right[2], right[3]);
    }
  }
}

// What the kernels with matrix instructions take: 16-bit numbers, rows of whole chunks of 16 bytes, aligned to them.
inline bool rows_are_aligned(const void* p, const HeadStrides& s, int width, Dtype type) {
  return width % 8 == 0 && aligned(p, type, {s.batch, s.head, s.token});
}

}  // namespace tiles
}  // namespace cuda
}  // namespace foundry
