// Tiles of 16-bit numbers in shared memory, and their fragments in registers, for kernels with tensor cores. Of a 16x8
// result a lane holds, with g = lane / 4 and t = lane % 4, columns 2 t and 2 t + 1 of rows g and g + 8.
#pragma once

#include "mma.cuh"

namespace foundry {
namespace cuda {
namespace tiles {

constexpr unsigned kAll = 0xFFFFFFFFu;

// The byte offset of a 16-byte chunk in a tile of rows of kDim 16-bit numbers. The same chunk of 8 rows, and the 8
// chunks of a 128-byte line, lie in different banks: neither ldmatrix nor cp.async has bank conflicts.
template <int kDim>
__device__ __forceinline__ uint32_t swizzled(int row, int chunk) {
  return row * kDim * 2 + ((chunk ^ (row & 7)) << 4);
}

// A lane's ldmatrix address for rows from `row` on. `x ^ 32 d` is the address for columns from 16 d on; 16 rows further
// is 32 kDim bytes more. The order of the four matrices: a left operand takes 16 rows, then the next 8 columns. A right
// operand stored by columns (keys for scores) takes 8 rows, their next 8 columns, then 8 more rows, so that each mma's
// operands lie in neighbouring registers. One stored by the summed dimension (values) is transposed while loading.
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

// A thread's share of the copies of a tensor's tiles: one chunk of each kPass-th row.
template <int kDim, int kThreads = 128>
struct Copier {
  static constexpr int kChunks = kDim / 8, kPass = kThreads / kChunks;  // rows per pass; the swizzle repeats
  static_assert(kPass % 8 == 0 || kPass == 4, "rows of a pass are swizzled alike, or their last bit is");
  const char* from;  // this thread's chunk of row 0
  int64_t row_bytes;
  int row;        // within a pass
  uint32_t to;    // its chunk's offset in a tile
  bool in_width;  // whether the tensor has these columns; else they are zero

  template <class T>
  __device__ Copier(const T* data, int64_t row_stride, int width)
      : from(reinterpret_cast<const char*>(data + threadIdx.x % kChunks * 8)),
        row_bytes(row_stride * 2),
        row(threadIdx.x / kChunks),
        to(swizzled<kDim>(threadIdx.x / kChunks, threadIdx.x % kChunks)),
        in_width(static_cast<int>(threadIdx.x % kChunks * 8) < width) {}

  // Copies kRows rows from `first` on to the tile at byte `at`. Rows from `end` on become zero, with kCheck.
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

// Transposes within a quad. Its 4 lanes hold columns 2 t, 2 t + 1 of four tiles of 8; afterwards lane t holds all of
// tile t.
__device__ __forceinline__ void transpose_in_quad(uint32_t (&w)[4], int lane) {
  FK_UNROLL for (int bit = 1; bit <= 2; bit *= 2) FK_UNROLL for (int i = 0; i < 4; ++i) {
    if (i & bit) continue;
    const bool upper = lane & bit;
    const uint32_t other = __shfl_xor_sync(kAll, upper ? w[i] : w[i + bit], bit);
    w[i] = upper ? other : w[i];
    w[i + bit] = upper ? w[i + bit] : other;
  }
}

// Writes one of a lane's two result rows times a factor, 16 bytes at a time. `to` is the row, or null.
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
// Blocks with more than 48 KB of shared memory must request it.
template <class... Params>
cudaError_t allow_shared(void (*kernel)(Params...), size_t bytes) {
  if (bytes <= (48 << 10)) return cudaSuccess;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
}
#endif

}  // namespace tiles
}  // namespace cuda
}  // namespace foundry
