// Attention by warps, for any dtype, width and alignment: what the tensor core kernels do not support. A warp has kRows
// queries (or keys) and reads 32 keys (or queries) at a time. For dot products each lane has one of the 32; for the
// sums over them each lane has every 32nd column. Fused multiply-adds in float, in a fixed order.
#pragma once

#include "flash_attention_scores.cuh"

namespace foundry {
namespace cuda {
namespace rows {

constexpr int kWarps = 2, kRows = 4;  // two rows of 512 floats for each fit in 48 KB of shared memory
constexpr int kMaxDim = 512;
constexpr unsigned kAll = 0xFFFFFFFFu;

// Loads `width` numbers of each of the warp's rows within [first, end) as floats; zeros for the other rows.
template <class T, class Shared>
__device__ __forceinline__ void read_rows(Shared& shared, int at, int stride, const T* from, int64_t step, int first,
                                          int end, int width) {
  for (int r = 0; r < kRows; ++r)
    for (int d = threadIdx.x % 32; d < width; d += 32)
      shared[at + r * stride + d] = first + r < end ? to_float(from[r * step + d]) : 0.f;
}

// products[r] = row r in shared memory times the lane's row.
template <class T, class Shared>
__device__ __forceinline__ void multiply(float (&products)[kRows], Shared& shared, int at, int stride, const T* own,
                                         int width) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) products[r] = 0.f;
  for (int d = 0; d < width; ++d) {
    const float x = to_float(own[d]);
#pragma unroll
    for (int r = 0; r < kRows; ++r) products[r] = fmaf(shared[at + r * stride + d], x, products[r]);
  }
}

// sums[r][c] += weights[r][j] * column 32 c + lane of row j, over n rows `step` apart.
template <int kCols, class T, class Shared>
__device__ __forceinline__ void accumulate(float (&sums)[kRows][kCols], Shared& weights, int at, const T* from,
                                           int64_t step, int n, int width) {
  const int lane = threadIdx.x % 32;
  for (int j = 0; j < n; ++j, from += step) {
    float w[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) w[r] = weights[at + r * 32 + j];
#pragma unroll
    for (int c = 0; c < kCols; ++c) {
      if (32 * c + lane >= width) break;
      const float x = to_float(from[32 * c + lane]);
#pragma unroll
      for (int r = 0; r < kRows; ++r) sums[r][c] = w[r] != 0.f ? fmaf(w[r], x, sums[r][c]) : sums[r][c];
    }
  }
}

template <int kCols, class T>
__device__ __forceinline__ void write_row(T* to, const float (&sums)[kCols], float factor, int width) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int c = 0; c < kCols; ++c)
    if (32 * c + lane < width) to[32 * c + lane] = from_float<T>(sums[c] * factor);
}

__device__ __forceinline__ float warp_max(float v) {
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) v = fmaxf(v, __shfl_xor_sync(kAll, v, lane));
  return v;
}

}  // namespace rows
}  // namespace cuda
}  // namespace foundry
