// Runs CUDA kernels on a CPU, to find what is wrong with them. Self-contained: a C++17 compiler is all it needs.
//
// The threads of a block are fibers that take turns; one runs until it meets a barrier or a warp instruction, which the
// scheduler resolves once all that take part have arrived. Blocks run one after another, every other one with its
// threads in reverse order. What is reported (as std::runtime_error from foundry::launch):
//   - shared memory (FK_SHARED, FK_DYNAMIC_SHARED): an index out of range, a value that the block never wrote, and two
//     threads at one element, one of them writing, without a barrier between them;
//   - __syncthreads met at different places, or after some threads have left; a barrier or warp instruction that can
//     never complete; a mask without the calling lane, with lanes that have left, or that lanes disagree on; a shuffle
//     from a lane outside of the mask;
//   - global memory: an access outside of an allocation, where allocations end at an unmapped page (guarded_memory.h),
//     and misaligned vector accesses (foundry::load and store; also others where compiled with -fsanitize=alignment);
//   - mistakes with matrix instructions and asynchronous copies: matrix_units.h; with those of compute capability 9.0:
//   hopper_*.h, under which several blocks run at the same time and warps in random order.
// What it cannot see: races in global memory, timing, and the memory model between warps beyond barriers.
#pragma once

#include <cmath>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "cuda_runtime_api.h"
#include "fibers.h"
#include "half_types.h"
#include "scheduler.h"
#include "shared_memory.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define threadIdx (::cuda_on_cpu::self().index)
#define blockIdx (::cuda_on_cpu::machine().block_index)
#define blockDim (::cuda_on_cpu::machine().block)
#define gridDim (::cuda_on_cpu::machine().grid)
#define FK_SHARED(type, name, count) static ::cuda_on_cpu::SharedArray<type, count> name
#define FK_DYNAMIC_SHARED(type, name) static ::cuda_on_cpu::DynamicShared<type> name

namespace cuda_on_cpu {

template <class T>
uint64_t pack(T v) {
  static_assert(sizeof(T) <= 8, "warp instructions move up to 8 bytes");
  uint64_t bits = 0;
  std::memcpy(&bits, &v, sizeof(T));
  return bits;
}
template <class T>
T unpack(uint64_t bits) {
  T v;
  std::memcpy(&v, &bits, sizeof(T));
  return v;
}

constexpr uint32_t kRunning = 0x7FD0F1E5u;  // NaN of hopper_warpgroups.h: the result of a product that runs
inline void check_value(float v) {
  if (bits_of(v) == kRunning) fail("the result of a product is read before wgmma_wait");
}

inline float max_of(float a, float b) {  // in which a NaN gets lost
  check_value(a);
  check_value(b);
  return std::fmax(a, b);
}

template <class T>
T shuffle(const char* name, unsigned mask, T v, int lane, int line) {
  check_caller(name, mask);
  if constexpr (std::is_same<T, float>::value) check_value(v);
  if (lane >= 0 && lane < 32 && !(mask >> lane & 1u)) fail(std::string(name) + " reads a lane outside of its mask");
  return unpack<T>(warp_exchange(name, mask, pack(v), unsigned(lane), line));
}

inline void named_barrier(int id, unsigned count, int line) {
  machine().line = line;  // of a failure
  if (id < 1 || id > 15) fail("barrier " + std::to_string(id) + " is none of 1..15");
  if (count == 0 || count % 32 || count > machine().threads.size())
    fail("a barrier of " + std::to_string(count) + " threads");
  machine().line = 0;
  wait_at_barrier(id, count, line);
}

inline int lane_id() { return int(self().id % 32); }

// The lane of a shuffle within segments of `width`; one that falls outside of its segment is the caller itself.
inline int in_segment(int lane, int width) {
  const int first = lane_id() / width * width;
  return lane >= first && lane < first + width ? lane : lane_id();
}

}  // namespace cuda_on_cpu

// --- what kernels call -----------------------------------------------------------------------------------------------

#define __syncthreads() ::cuda_on_cpu::wait_at_barrier(0, blockDim.x* blockDim.y* blockDim.z, __LINE__)
#define fmaxf(...) ::cuda_on_cpu::max_of(__VA_ARGS__)
#define FK_CHECK_ALIGNED(p, bytes) ::cuda_on_cpu::check_aligned(p, bytes)
#define FK_NAMED_BARRIER(id, count) ::cuda_on_cpu::named_barrier(id, count, __LINE__)

inline void __syncwarp(unsigned mask = 0xFFFFFFFFu, int line = __builtin_LINE()) {
  cuda_on_cpu::warp_exchange("__syncwarp", mask, 0, 32, line);
}
template <class T>
T __shfl_sync(unsigned mask, T v, int lane, int width = 32, int line = __builtin_LINE()) {
  const int first = cuda_on_cpu::lane_id() / width * width;
  return cuda_on_cpu::shuffle("__shfl_sync", mask, v, first + (lane & (width - 1)), line);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T v, int bits, int width = 32, int line = __builtin_LINE()) {
  const int lane = cuda_on_cpu::lane_id() ^ bits;
  return cuda_on_cpu::shuffle("__shfl_xor_sync", mask, v, cuda_on_cpu::in_segment(lane, width), line);
}
template <class T>
T __shfl_down_sync(unsigned mask, T v, unsigned delta, int width = 32, int line = __builtin_LINE()) {
  const int lane = cuda_on_cpu::lane_id() + int(delta);
  return cuda_on_cpu::shuffle("__shfl_down_sync", mask, v, cuda_on_cpu::in_segment(lane, width), line);
}
template <class T>
T __shfl_up_sync(unsigned mask, T v, unsigned delta, int width = 32, int line = __builtin_LINE()) {
  const int lane = cuda_on_cpu::lane_id() - int(delta);
  return cuda_on_cpu::shuffle("__shfl_up_sync", mask, v, cuda_on_cpu::in_segment(lane, width), line);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, int line = __builtin_LINE()) {
  return unsigned(cuda_on_cpu::warp_exchange("ballot", mask, predicate != 0, 32, line));
}
inline int __any_sync(unsigned mask, int predicate, int line = __builtin_LINE()) {
  return __ballot_sync(mask, predicate, line) != 0;
}
inline int __all_sync(unsigned mask, int predicate, int line = __builtin_LINE()) {
  return __ballot_sync(mask, !predicate, line) == 0;
}
inline unsigned __reduce_add_sync(unsigned mask, unsigned v, int line = __builtin_LINE()) {
  return unsigned(cuda_on_cpu::warp_exchange("reduce_add", mask, v, 32, line));
}

template <class T>
T atomicAdd(T* to, T v) {  // fibers take turns: nobody is between the read and the write
  const T before = *to;
  *to = before + v;
  return before;
}
inline void __threadfence() {}
inline float rsqrtf(float v) { return 1.f / std::sqrt(v); }
inline float __uint_as_float(unsigned bits) { return cuda_on_cpu::float_of(bits); }
inline unsigned __float_as_uint(float v) { return cuda_on_cpu::bits_of(v); }
inline float __int_as_float(int bits) { return cuda_on_cpu::float_of(uint32_t(bits)); }
// Never a part of a fused product and sum, which g++ makes nowhere without being told to.
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline int __float_as_int(float v) { return int(cuda_on_cpu::bits_of(v)); }

namespace cuda_on_cpu {

// Threads that a multiprocessor holds, in place of the driver's answer for a kernel. A test may change it.
static int resident_threads = 512;

}  // namespace cuda_on_cpu

namespace foundry {

template <class... Params>
int resident_blocks(void (*)(Params...), int threads) {
  const int blocks = cuda_on_cpu::resident_threads / threads;
  return blocks > 0 ? blocks : 1;
}

template <class... Params, class... Args>
cudaError_t launch(void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t, Args... args) {
  using namespace cuda_on_cpu;
  const size_t threads = size_t(block.x) * block.y * block.z;
  const bool fits = threads >= 1 && threads <= kMaxThreads && block.z <= 64 && shared_bytes <= kMaxShared;
  if (!fits || grid.x == 0 || grid.x > 0x7FFFFFFF || grid.y == 0 || grid.y > 65535 || grid.z == 0 || grid.z > 65535)
    return cudaErrorInvalidConfiguration;
  Machine& m = machine();
  m.grid = grid;
  m.block = block;
  m.dynamic_shared = shared_bytes;
  m.error.clear();
  m.kernel = [=] { kernel(Params(args)...); };
  {
    FaultHandler handler;
    bool reverse = false;
    for (unsigned z = 0; z < grid.z; ++z)
      for (unsigned y = 0; y < grid.y; ++y)
        for (unsigned x = 0; x < grid.x && m.error.empty(); ++x, reverse = !reverse) {
          m.block_index = {x, y, z};
          run_block(m, reverse);
        }
  }
  if (!m.error.empty()) throw std::runtime_error("CUDA on CPU: " + m.error);
  return cudaSuccess;
}

}  // namespace foundry

#include "matrix_units.h"  // what csrc/cuda/mma.cuh declares
