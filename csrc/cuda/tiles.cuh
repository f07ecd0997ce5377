// Tiles of 16-bit numbers in shared memory, and fragments of them in registers: what kernels with matrix instructions
// share. Of a product's 16x8 results a lane has, with g = lane / 4 and t = lane % 4, columns 2 t and 2 t + 1 of rows g
// and g + 8.
#pragma once

#include "mma.cuh"

namespace foundry {
namespace cuda {
namespace tiles {

constexpr unsigned kAll = 0xFFFFFFFFu;

// Byte of a 16-byte chunk in a tile of rows of kDim 16-bit numbers. 8 rows at one chunk, or the 8 chunks of a line of
// 128 bytes, lie in different banks: neither ldmatrix nor cp.async has a conflict.
template <int kDim>
__device__ __forceinline__ uint32_t swizzled(int row, int chunk) {
  return row * kDim * 2 + ((chunk ^ (row & 7)) << 4);
}

// A lane's address for ldmatrix, of rows `row` on: `x ^ 32 d` is that of columns 16 d on, and 16 rows further it is
// 32 kDim bytes more. A left operand in rows has its 16 rows and then the next 8 columns; a right operand in rows of
// columns (keys for scores) 8 rows, their next 8 columns, and then 8 more rows, so that what a product takes lies in
// neighbouring registers; one in rows of the summed dimension (values) is transposed on the way.
template <int kDim>
__device__ __forceinline__ uint32_t left_lane(int row, int lane) {
  return swizzled<kDim>(row + lane % 16, lane / 16);
}
template <int kDim>
__device__ __forceinline__ uint32_t right_lane(int lane) {
  return swizzled<kDim>(lane % 8 + lane / 16 * 8, lane / 8 % 2);
}
template <int kDim>
__device__ __forceinline__ uint32_t summed_lane(int lane) {
  return swizzled<kDim>(lane % 16, lane / 16);
}

// A thread's share of the copies of tiles of a tensor: a chunk of each kPass-th row.
template <int kDim, int kThreads = 128>
struct Copier {
  static constexpr int kChunks = kDim / 8, kPass = kThreads / kChunks;  // rows at once, so that the swizzle repeats
  static_assert(kPass % 8 == 0 || kPass == 4, "rows of a pass are swizzled alike, or their last bit is");
  const char* from;  // its chunk of row 0
  int64_t row_bytes;
  int row;        // of a pass
  uint32_t to;    // its chunk in a tile
  bool in_width;  // whether the tensor has these columns; else they are zeros

  template <class T>
  __device__ Copier(const T* data, int64_t row_stride, int width)
      : from(reinterpret_cast<const char*>(data + threadIdx.x % kChunks * 8)),
        row_bytes(row_stride * 2),
        row(threadIdx.x / kChunks),
        to(swizzled<kDim>(threadIdx.x / kChunks, threadIdx.x % kChunks)),
        in_width(static_cast<int>(threadIdx.x % kChunks * 8) < width) {}

  // kRows rows from `first` on to the tile at byte `at`; those from `end` on become zeros, if some may be so.
  template <int kRows, bool kCheck, class Shared>
  __device__ __forceinline__ void copy(Shared& shared, uint32_t at, int first, int end) const {
    const char* source = from + (first + row) * row_bytes;
    FK_UNROLL for (int i = 0; i < kRows; i += kPass) {
      const uint32_t place = kPass % 8 == 0 ? to + i * kDim * 2 : swizzled<kDim>(row + i, threadIdx.x % kChunks);
      cp_async(shared, at + place, source, in_width && (!kCheck || first + row + i < end));
      source += row_bytes * kPass;
    }
  }
};

// In the 4 lanes of a quad, which hold columns 2 t, 2 t + 1 of four tiles of 8: afterwards lane t holds all of tile t.
__device__ __forceinline__ void transpose_in_quad(uint32_t (&w)[4], int lane) {
  FK_UNROLL for (int bit = 1; bit <= 2; bit *= 2) FK_UNROLL for (int i = 0; i < 4; ++i) {
    if (i & bit) continue;
    const bool upper = lane & bit;
    const uint32_t other = __shfl_xor_sync(kAll, upper ? w[i] : w[i + bit], bit);
    w[i] = upper ? other : w[i];
    w[i + bit] = upper ? w[i + bit] : other;
  }
}

// Writes one of a lane's two rows of results times a factor, 16 bytes at a time; `to` is the row, or null.
template <class T, int kDim>
__device__ __forceinline__ void write_row(T* to, const float (&results)[kDim / 8][4], int half, float factor, int width,
                                          int lane) {
  FK_UNROLL for (int n = 0; n < kDim / 8; n += 4) {
    uint32_t w[4];
    FK_UNROLL for (int i = 0; i < 4; ++i) w[i] =
        pack<T>(results[n + i][2 * half] * factor, results[n + i][2 * half + 1] * factor);
    transpose_in_quad(w, lane);
    const int column = (n + lane % 4) * 8;
    if (to != nullptr && column < width)
      store(reinterpret_cast<uint32_t*>(to + column), Pack<uint32_t, 4>{w[0], w[1], w[2], w[3]});
  }
}

#if defined(FK_CUDA_ON_CPU)
template <class... Params>
cudaError_t allow_shared(void (*)(Params...), size_t) {
  return cudaSuccess;
}
#else
// More than 48 KB a block has to be asked for.
template <class... Params>
cudaError_t allow_shared(void (*kernel)(Params...), size_t bytes) {
  if (bytes <= (48 << 10)) return cudaSuccess;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
}
#endif

}  // namespace tiles
}  // namespace cuda
}  // namespace foundry
