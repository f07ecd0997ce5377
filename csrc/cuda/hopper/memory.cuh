// Shared memory, its barriers and the copies of the Tensor Memory Accelerator (TMA) of compute capability 9.0, each
// instruction as a function. The checker's versions are in tests/support/cuda_on_cpu/include/hopper_memory.h.
//
// These instructions take byte addresses in shared memory. A kernel begins with FK_HOPPER_SHARED(base), a multiple of
// 1024, and lays out the rest itself.
#pragma once

#include "../mma.cuh"
#include "tensor_map.cuh"

#if defined(FK_CUDA_ON_CPU)
#include "hopper_memory.h"
#else

#define FK_HOPPER_SHARED(name)                                        \
  extern __shared__ __align__(1024) unsigned char fk_hopper_shared[]; \
  const uint32_t name = static_cast<uint32_t>(__cvta_generic_to_shared(fk_hopper_shared))

namespace foundry {
namespace cuda {
namespace hopper {

// --- mbarriers: 8 bytes of shared memory each ------------------------------------------------------------------------
//
// A phase ends when `arrivals` threads have arrived and all announced bytes have come; the next phase then begins. A
// wait names the phase's parity: 0 for the first, third, ... Waiting for parity 1 on a new barrier returns at once.

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Call after all mbarrier_init of a block, on the thread that made them, before __syncthreads.
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives, and announces bytes that copies will bring.
__device__ __forceinline__ void mbarrier_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ bool mbarrier_try(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}\n"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}
// The loop contains only the try: with a trap in it ptxas serialises every wgmma of the kernel and spills.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  while (!mbarrier_try(barrier, parity)) {
  }
}
// Polls both before it waits for either: one round of latency if both are done.
__device__ __forceinline__ void mbarrier_wait_both(uint32_t first, uint32_t first_parity, uint32_t second,
                                                   uint32_t second_parity) {
  const bool one = mbarrier_try(first, first_parity), two = mbarrier_try(second, second_parity);
  if (one && two) return;
  mbarrier_wait(first, first_parity);
  mbarrier_wait(second, second_parity);
}

// --- copies ----------------------------------------------------------------------------------------------------------

// Copies a box of a tensor map to shared memory, to a multiple of 1024 bytes. What lies outside the tensor becomes
// zero. `barrier` receives all bytes of the box. One thread issues it.
__device__ __forceinline__ void tma_load(uint32_t to, const TensorMap* map, uint32_t barrier, int column, int token,
                                         int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(column), "r"(token), "r"(head), "r"(batch)
      : "memory");
}
__device__ __forceinline__ void tma_prefetch_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
// Copies contiguous bytes, a multiple of 16, between multiples of 16.
__device__ __forceinline__ void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(barrier)
               : "memory");
}
// Copies from shared memory. The threads that wrote it must call fence_proxy_async first. One thread issues, commits
// and waits.
__device__ __forceinline__ void bulk_store(void* to, uint32_t from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(__cvta_generic_to_global(to)),
               "r"(from), "r"(bytes)
               : "memory");
}
// Adds floats.
__device__ __forceinline__ void bulk_add(float* to, uint32_t from, uint32_t bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(__cvta_generic_to_global(to)),
      "r"(from), "r"(bytes)
      : "memory");
}
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until shared memory has been read and may be overwritten.
__device__ __forceinline__ void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
// Waits until the writes have reached global memory.
__device__ __forceinline__ void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// --- fences ----------------------------------------------------------------------------------------------------------

// Makes this thread's ordinary stores to shared memory visible to wgmma and TMA. Without .shared::cta it would also be
// a fence for the whole GPU, which is slow.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// --- ordinary accesses -----------------------------------------------------------------------------------------------

__device__ __forceinline__ void store_shared(uint32_t at, int value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(value) : "memory");
}
__device__ __forceinline__ int load_shared(uint32_t at) {
  int value;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(at) : "memory");
  return value;
}
__device__ __forceinline__ float2 load_shared_pair(uint32_t at) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(at) : "memory");
  return v;
}
__device__ __forceinline__ void store_shared_four(uint32_t at, float a, float b, float c, float d) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(at), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}
__device__ __forceinline__ void clear_shared_16(uint32_t at) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0) : "memory");
}
// Four 8 x 8 matrices of 16-bit values, as ldmatrix of mma.cuh.
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(at)
               : "memory");
}
// Stores four matrices: r[i] is row g, columns 2t, 2t + 1 of matrix i. Lanes 8i .. 8i + 7 hold the addresses of its
// rows.
__device__ __forceinline__ void store_matrices(uint32_t at, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(r[0]), "r"(r[1]),
               "r"(r[2]), "r"(r[3])
               : "memory");
}

// --- between blocks --------------------------------------------------------------------------------------------------

__device__ __forceinline__ int load_acquire(const int* from) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(__cvta_generic_to_global(from)) : "memory");
  return value;
}
// Everything that this thread has seen before is visible to a thread that acquires the sum.
__device__ __forceinline__ void add_release(int* to) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(__cvta_generic_to_global(to)) : "memory");
}
// Waits until *from is `value`.
__device__ __forceinline__ void wait_until(const int* from, int value) {
  while (load_acquire(from) != value) {
  }
}
__device__ __forceinline__ void add_four(float* to, float a, float b, float c, float d) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)), "f"(a),
               "f"(b), "f"(c), "f"(d)
               : "memory");
}
__device__ __forceinline__ void store_four(float* to, float a, float b, float c, float d) {
  asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)), "f"(a), "f"(b), "f"(c),
               "f"(d)
               : "memory");
}
// Lets the next launch begin while this one runs, if it was made by launch_early. The next launch waits for all of this
// one.
__device__ __forceinline__ void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ void wait_for_launch_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// --- registers -------------------------------------------------------------------------------------------------------

// Sets the registers per thread of a warpgroup. What one gives up another can take.
template <int kRegisters>
__device__ __forceinline__ void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// --- launches --------------------------------------------------------------------------------------------------------

// As foundry::launch, for kernels whose blocks may wait for blocks with lower tickets and that need more shared memory
// than the default. `early`: it may begin before the previous launch has ended (launch_dependents).
template <class... Params, class... Args>
cudaError_t launch_hopper(void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream,
                          bool early, const Args&... args) {
  if (shared_bytes > (48 << 10)) {
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
    if (error != cudaSuccess) return error;
  }
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = early ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, Params(args)...);
}

}  // namespace hopper
}  // namespace cuda
}  // namespace foundry
#endif
