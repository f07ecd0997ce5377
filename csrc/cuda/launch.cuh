// Kernel launches, and device functions that all kernels use. nvcc compiles this for a GPU. g++ compiles it against
// tests/support/cuda_on_cpu, which runs a block's threads one after another and checks their accesses.
#pragma once

#include <cstdint>

#if defined(FK_CUDA_ON_CPU)
#include <algorithm>

#include "cuda_on_cpu.h"  // defines the CUDA language's names, the macros below and foundry::launch
using std::max;
using std::min;
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

// Arrays in shared memory. A kernel has at most one dynamic array. The checker's versions detect out-of-range indices,
// reads of uninitialised values, and races between threads.
#define FK_SHARED(type, name, count) __shared__ type name[count]
#define FK_DYNAMIC_SHARED(type, name)                                \
  extern __shared__ __align__(16) unsigned char fk_dynamic_shared[]; \
  type* name = reinterpret_cast<type*>(fk_dynamic_shared)
// A GPU faults on a misaligned access by itself; the checker needs this macro.
#define FK_CHECK_ALIGNED(p, bytes)
// Barrier number `id` (1..15) of `count` threads, a multiple of 32.
#define FK_NAMED_BARRIER(id, count) asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(count) : "memory")

namespace foundry {

// kernel<<<grid, block, shared_bytes, stream>>>(...) as a function, because g++ cannot parse that syntax. Returns the
// launch error.
template <class... Params, class... Args>
cudaError_t launch(void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream,
                   Args... args) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, Params(args)...);
}

// How many blocks of a kernel without dynamic shared memory fit on a multiprocessor. A persistent grid with more blocks
// would run the last ones alone.
template <class... Params>
int resident_blocks(void (*kernel)(Params...), int threads) {
  int blocks = 0;
  const cudaError_t error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, 0);
  return error == cudaSuccess && blocks > 0 ? blocks : 1;
}

}  // namespace foundry
#endif

namespace foundry {

// kCount values of T, moved by one instruction.
template <class T, int kCount>
struct alignas(sizeof(T) * kCount) Pack {
  T values[kCount];
};

template <class T, int kCount>
__device__ __forceinline__ Pack<T, kCount> load(const T* p) {
  FK_CHECK_ALIGNED(p, sizeof(Pack<T, kCount>));
  return *reinterpret_cast<const Pack<T, kCount>*>(p);
}

template <class T, int kCount>
__device__ __forceinline__ void store(T* p, const Pack<T, kCount>& v) {
  FK_CHECK_ALIGNED(p, sizeof(Pack<T, kCount>));
  *reinterpret_cast<Pack<T, kCount>*>(p) = v;
}

template <class T> __device__ __forceinline__ float to_float(T v);
template <> __device__ __forceinline__ float to_float(float v) { return v; }
template <> __device__ __forceinline__ float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }
template <> __device__ __forceinline__ float to_float(__half v) { return __half2float(v); }

template <class T> __device__ __forceinline__ T from_float(float v);
template <> __device__ __forceinline__ float from_float(float v) { return v; }
template <> __device__ __forceinline__ __nv_bfloat16 from_float(float v) { return __float2bfloat16_rn(v); }
template <> __device__ __forceinline__ __half from_float(float v) { return __float2half_rn(v); }

// Sums over groups of kThreads neighbouring lanes of a warp. Every lane gets the result.
template <int kThreads>
__device__ __forceinline__ float warp_sum(float v) {
  constexpr int kWidth = kThreads < 32 ? kThreads : 32;
#pragma unroll
  for (int lane = kWidth / 2; lane > 0; lane /= 2) v += __shfl_xor_sync(0xFFFFFFFFu, v, lane);
  return v;
}

// out[c] = sum over blocks of partial[., c], rounded. A block handles 32 columns, with kSumRows threads for each.
constexpr int kSumRows = 16;

template <class W>
__global__ void __launch_bounds__(32 * kSumRows)
    sum_partials_kernel(const float* partial, int n_blocks, int64_t n_cols, W* out) {
  FK_SHARED(float, sums, 32 * kSumRows);
  const int lane = threadIdx.x % 32, part = threadIdx.x / 32;
  const int64_t col = static_cast<int64_t>(blockIdx.x) * 32 + lane;
  float total = 0.f;
  if (col < n_cols) {
#pragma unroll 8  // reads in flight: together they take about as long as one
    for (int b = part; b < n_blocks; b += kSumRows) total += partial[b * n_cols + col];
  }
  sums[threadIdx.x] = total;
  __syncthreads();
  if (part != 0 || col >= n_cols) return;
#pragma unroll
  for (int p = 1; p < kSumRows; ++p) total += sums[p * 32 + lane];
  out[col] = from_float<W>(total);
}

template <class W>
cudaError_t sum_partials(const float* partial, int n_blocks, int64_t n_cols, W* out, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>((n_cols + 31) / 32));
  return launch(sum_partials_kernel<W>, grid, dim3(32 * kSumRows), 0, stream, partial, n_blocks, n_cols, out);
}

}  // namespace foundry
