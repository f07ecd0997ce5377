// Shared by the attention kernels with tensor cores: tiles in shared memory, and fragments in registers.
//
// A block has 4 warps, and a warp has 16 rows (or kTilesM times as many) of what the block owns. Of a 16x8 result a
// lane holds, with g = lane / 4 and t = lane % 4, columns 2 t and 2 t + 1 of rows g and g + 8.
#pragma once

#include <type_traits>

#include "flash_attention_scores.cuh"
#include "tiles.cuh"

namespace foundry {
namespace cuda {
namespace tiles {

constexpr int kThreads = 128;
constexpr float kLog2e = 1.4426950408889634f;

// blockIdx.x, hidden from the compiler, so that it recomputes what follows from it instead of keeping it through a
// loop.
__device__ __forceinline__ unsigned block_index_again() {
#if defined(FK_CUDA_ON_CPU)
  return blockIdx.x;
#else
  unsigned index;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(index));
  return index;
#endif
}

// x, hidden from the compiler, which would otherwise keep derived values in registers across tiles, and spill.
__device__ __forceinline__ uint32_t hidden(uint32_t x) {
#if !defined(FK_CUDA_ON_CPU)
  asm volatile("" : "+r"(x));
#endif
  return x;
}

// from - step, in bytes, hidden from the compiler, which would otherwise keep an address for each copy of a tile, and
// spill.
__device__ __forceinline__ void step_back(const char*& from, int64_t step) {
#if defined(FK_CUDA_ON_CPU)
  from -= step;
#else
  asm volatile("sub.s64 %0, %0, %1;" : "+l"(from) : "l"(step));
#endif
}

// As Copier, but from the last tile to the first: to save registers it keeps its position, not the tensor's start.
// Chunks beyond the tensor's columns are zeroed by clear() and never copied to. kFull: rows have all kDim numbers.
template <int kDim, bool kFull = false>
struct Walker {
  static constexpr int kChunks = kDim / 8, kPass = kThreads / kChunks;  // rows per pass
  static constexpr bool kRepeats = kPass % 8 == 0;                      // whether all passes have the same swizzle
  const char* from;                                                     // this thread's chunk of the next row to copy
  int64_t pass_bytes;                                                   // distance between passes
  bool in_width;                                                        // whether the tensor has this chunk

  // For tiles of rows that end at `end` and, after move(), of other rows.
  template <class T>
  __device__ Walker(const T* data, int64_t row_stride, int width, int end)
      : from(reinterpret_cast<const char*>(data + chunk() * 8 + (end - kPass + row()) * row_stride)),
        pass_bytes(row_stride * (2 * kPass)),
        in_width(kFull || chunk() * 8 < width) {}

  __device__ static int row() { return threadIdx.x / kChunks; }
  __device__ static int chunk() { return threadIdx.x % kChunks; }
  __device__ static uint32_t place(int i) {
    return kRepeats ? swizzled<kDim>(row(), chunk()) + i * kDim * 2 : swizzled<kDim>(row() + i, chunk());
  }
  // Moves from the end of `rows` rows to the end of others.
  __device__ void move(int rows) { from += pass_bytes / kPass * rows; }

  template <int kRows, class Shared>
  __device__ __forceinline__ void clear(Shared& shared, uint32_t at) const {
    if (kFull || in_width) return;
    FK_UNROLL for (int i = 0; i < kRows; i += kPass) cp_async(shared, at + place(i), from, false);
  }

  // Copies the previous kRows rows to the tile at byte `at` and steps back. Rows from the n-th on become zero, with
  // kCheck.
  template <int kRows, bool kCheck, class Shared>
  __device__ __forceinline__ void copy(Shared& shared, uint32_t at, int n = 0) {
    if (!kFull && !in_width) return;
    FK_UNROLL for (int i = kRows - kPass; i >= 0; i -= kPass) {
      cp_async(shared, at + place(i), from, !kCheck || row() + i < n);
      step_back(from, pass_bytes);
    }
  }
};

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

// What the tensor core kernels support: 16-bit numbers, with rows that are aligned to 16 bytes and consist of 16-byte
// chunks.
inline bool rows_are_aligned(const void* p, const HeadStrides& s, int width, Dtype type) {
  return width % 8 == 0 && aligned(p, type, {s.batch, s.head, s.token});
}

}  // namespace tiles
}  // namespace cuda
}  // namespace foundry
