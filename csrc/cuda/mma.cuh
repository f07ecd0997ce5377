// Tensor core and asynchronous copy instructions (sm_80 and later) as functions: mma.sync, ldmatrix, cp.async and
// related ones. The checker's versions are in tests/support/cuda_on_cpu/include/matrix_units.h.
//
// A lane of a warp is g = lane / 4, t = lane % 4; a register holds two 16-bit values, the lower half first. `shared` is
// what FK_DYNAMIC_SHARED(uint4, shared) declares, and `byte` an offset in it.
#pragma once

#include "launch.cuh"

#if defined(FK_CUDA_ON_CPU)
#define FK_UNROLL
#else
#include <type_traits>

#define FK_UNROLL _Pragma("unroll")

namespace foundry {
namespace cuda {

__device__ __forceinline__ uint32_t shared_address(const uint4* shared, uint32_t byte) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared)) + byte;
}

// d += a b, where a is 16 x 16, b 16 x 8 and d 16 x 8. The whole warp takes part.
//   a[0]: row g,     columns 2t, 2t + 1      b0: rows 2t, 2t + 1 of column g
//   a[1]: row g + 8, columns 2t, 2t + 1      b1: rows 2t + 8, 2t + 9 of column g
//   a[2]: row g,     columns 2t + 8, 2t + 9  d[0], d[1]: row g, columns 2t, 2t + 1
//   a[3]: row g + 8, columns 2t + 8, 2t + 9  d[2], d[3]: row g + 8, columns 2t, 2t + 1
// b0 and b1 should be neighbours in what ldmatrix loaded, or each mma costs a move of a register.
template <class T>
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  static_assert(std::is_same<T, __nv_bfloat16>::value || std::is_same<T, __half>::value, "16-bit types");
  if constexpr (std::is_same<T, __nv_bfloat16>::value) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// Loads four 8 x 8 matrices of 16-bit values. Lanes 8i .. 8i + 7 hold the addresses of the 8 rows of matrix i,
// multiples of 16 bytes. r[i] becomes row g, columns 2t, 2t + 1 of matrix i. The whole warp takes part.
__device__ __forceinline__ void ldmatrix(uint32_t (&r)[4], const uint4* shared, uint32_t byte) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(shared, byte))
               : "memory");
}

// Same for the transposed matrices: r[i] becomes column g, rows 2t, 2t + 1 of matrix i.
__device__ __forceinline__ void ldmatrix_trans(uint32_t (&r)[4], const uint4* shared, uint32_t byte) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(shared, byte))
               : "memory");
}

// Stores two 16-bit values to shared memory, at a multiple of 4 bytes.
__device__ __forceinline__ void store_pair(uint4* shared, uint32_t byte, uint32_t pair) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(shared_address(shared, byte)), "r"(pair) : "memory");
}

// Rounds two values to nearest even and packs them, `low` in the lower half.
template <class T>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  static_assert(std::is_same<T, __nv_bfloat16>::value || std::is_same<T, __half>::value, "16-bit types");
  uint32_t pair;
  if constexpr (std::is_same<T, __nv_bfloat16>::value)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// Unpacks both values of a register, the lower half into x.
template <class T>
__device__ __forceinline__ float2 unpack(uint32_t pair) {
  static_assert(std::is_same<T, __nv_bfloat16>::value || std::is_same<T, __half>::value, "16-bit types");
  if constexpr (std::is_same<T, __nv_bfloat16>::value)
    return float2{__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000u)};
  else
    return float2{__half2float(__ushort_as_half(static_cast<unsigned short>(pair))),
                  __half2float(__ushort_as_half(static_cast<unsigned short>(pair >> 16)))};
}

// Starts a 16-byte copy from global to shared memory, both aligned to 16 bytes. If not valid it writes zeros and does
// not read `source`. No thread may touch the destination until this thread has waited for the group and a barrier has
// passed.
__device__ __forceinline__ void cp_async(uint4* shared, uint32_t byte, const void* source, bool valid = true) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared, byte)),
               "l"(__cvta_generic_to_global(source)), "r"(valid ? 16 : 0)
               : "memory");
}

// Groups the copies since the last commit. A group may be empty.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most kLeft of this thread's groups, the youngest, are in flight.
template <int kLeft>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

// At the end of a kernel. The checker verifies that every copy was waited for.
__device__ __forceinline__ void cp_async_finished() {}

// 2^x; subnormal arguments and results count as 0.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace cuda
}  // namespace foundry
#endif
