// Matmuls of a warpgroup (wgmma) of compute capability 9.0: d [64, N] += a [64, 16] b [16, N], 16-bit numbers summed in
// float32. The checker's versions are in tests/support/cuda_on_cpu/include/hopper_products.h.
//
// Thread t of the warpgroup's 128 holds, with w = t / 32, g = t % 32 / 4 and c = t % 4, of d
//   d[4 j], d[4 j + 1]:     row 16 w + g,     columns 8 j + 2 c and 8 j + 2 c + 1
//   d[4 j + 2], d[4 j + 3]: row 16 w + g + 8, the same columns
// and of an `a` in registers four pairs, as in mma.cuh: rows g, g + 8, g, g + 8 of its 16 rows, columns 2 c and 2 c + 1
// of the first 8, twice, then of the last 8.
//
// They are asynchronous: call wgmma_fence(), issue any number of them, and group them with wgmma_commit(). d, `a` in
// registers and shared memory may be touched again once wgmma_wait<k>(), which leaves at most the last k groups
// running, has waited for their group. All threads of the warpgroup make the same calls.
#pragma once

#include "memory.cuh"

namespace foundry {
namespace cuda {
namespace hopper {

// A matrix in shared memory, in panels of 64 columns (128 bytes) with TMA's 128-byte swizzle, each at a multiple of
// 1024 bytes. Bits of the descriptor: 0-13 address / 16, 16-29 leading offset / 16, 32-45 stride offset / 16, 62-63 the
// swizzle (1: 128 bytes).
//   Columns along k ("K-major"): 16 of k are 32 bytes further; the stride offset, 1024, is that of the next 8 rows, and
//   the leading offset is not used.
//   Columns along the result's side ("MN-major", k along rows): 16 of k are 2048 bytes further; the stride offset,
//   1024, is that of the next 8 of k, and the leading one that of the next panel.
__device__ __forceinline__ uint64_t matrix(uint32_t address, uint32_t panel_bytes = 16) {
  const uint32_t low = ((address >> 4) & 0x3FFFu) | (panel_bytes >> 4) << 16;
  constexpr uint32_t kHigh = (kSwizzleBytes >> 4) | 1u << 30;
  return static_cast<uint64_t>(kHigh) << 32 | low;
}
// The same matrix, `bytes` further.
__device__ __forceinline__ uint64_t further(uint64_t matrix, uint32_t bytes) { return matrix + (bytes >> 4); }

}  // namespace hopper
}  // namespace cuda
}  // namespace foundry

#if defined(FK_CUDA_ON_CPU)
#include "hopper_products.h"
#else

namespace foundry {
namespace cuda {
namespace hopper {

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kGroups>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kGroups) : "memory");
}
// Registers that a wait made final: no use of them moves above this, no change below it.
template <class T, int kCount>
__device__ __forceinline__ void settle(T (&r)[kCount]) {
  static_assert(sizeof(T) == 4, "registers");
  FK_UNROLL for (int i = 0; i < kCount; ++i) {
    if constexpr (std::is_same<T, float>::value) asm volatile("" : "+f"(r[i])::"memory");
    else asm volatile("" : "+r"(r[i])::"memory");
  }
}
// A store that never happens (x is never negative) but depends on x. Without it ptxas moves the wait for a matmul above
// the computation of x, and the two do not overlap. `at`: any word of shared memory.
__device__ __forceinline__ void needed_before_wait(float x, uint32_t at) {
  asm volatile("{\n.reg .pred p;\nsetp.lt.f32 p, %0, 0f00000000;\n@p st.shared.f32 [%1], %0;\n}\n" ::"f"(x), "r"(at)
               : "memory");
}

// The result has kColumns columns in `d`, kColumns / 2 registers. Without `add` d's values are not read. kAcross: the
// operand is MN-major (see matrix()).
//   shared:    a and b in shared memory
//   registers: a[0 .. 3] in registers
template <int kColumns> struct Wgmma;

#define FK_D8(i)                                                                                              \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define FK_D32 FK_D8(0), FK_D8(8), FK_D8(16), FK_D8(24)
#define FK_D40 FK_D32, FK_D8(32)
#define FK_D48 FK_D40, FK_D8(40)
#define FK_D56 FK_D48, FK_D8(48)
#define FK_D64 FK_D56, FK_D8(56)
#define FK_D96 FK_D64, FK_D8(64), FK_D8(72), FK_D8(80), FK_D8(88)
#define FK_D128 FK_D96, FK_D8(96), FK_D8(104), FK_D8(112), FK_D8(120)
#define FK_TEXT32                                         \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15" \
  ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define FK_TEXT40 FK_TEXT32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define FK_TEXT48 FK_TEXT40 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define FK_TEXT56 FK_TEXT48 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define FK_TEXT64 FK_TEXT56 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define FK_TEXT96                                                    \
  FK_TEXT64                                                          \
  ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79" \
  ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define FK_TEXT128                                                               \
  FK_TEXT96                                                                      \
  ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111" \
  ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

#define FK_WGMMA_SHARED(COLUMNS, COUNT, TYPE, N0, N1, N2, N3, N4)                                                      \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #N2 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #COLUMNS             \
               "k16.f32." TYPE "." TYPE " {" FK_TEXT##COUNT "}, %" #N0 ", %" #N1 ", p, 1, 1, %" #N3 ", %" #N4 ";\n}\n" \
               : FK_D##COUNT                                                                                           \
               : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(kAcrossA ? 1 : 0), "n"(kAcrossB ? 1 : 0))
#define FK_WGMMA_REGISTERS(COLUMNS, COUNT, TYPE, N0, N1, N2, N3, N4, N5, N6)                                      \
  asm volatile(                                                                                                   \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %" #N5 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32." TYPE \
      "." TYPE " {" FK_TEXT##COUNT "}, {%" #N0 ",%" #N1 ",%" #N2 ",%" #N3 "}, %" #N4 ", p, 1, 1, %" #N6 ";\n}\n"  \
      : FK_D##COUNT                                                                                               \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)), "n"(kAcrossB ? 1 : 0))

// The numbers are those of the operands after d's.
#define FK_WGMMA(COLUMNS, COUNT, N0, N1, N2, N3, N4, N5, N6)                                                       \
  template <> struct Wgmma<COLUMNS> {                                                                              \
    template <class T, bool kAcrossA, bool kAcrossB>                                                               \
    static __device__ __forceinline__ void shared(float (&d)[COUNT], uint64_t a, uint64_t b, bool add) {           \
      if constexpr (std::is_same<T, __half>::value) FK_WGMMA_SHARED(COLUMNS, COUNT, "f16", N0, N1, N2, N3, N4);    \
      else FK_WGMMA_SHARED(COLUMNS, COUNT, "bf16", N0, N1, N2, N3, N4);                                            \
    }                                                                                                              \
    template <class T, bool kAcrossB>                                                                              \
    static __device__ __forceinline__ void registers(float (&d)[COUNT], const uint32_t* a, uint64_t b, bool add) { \
      if constexpr (std::is_same<T, __half>::value)                                                                \
        FK_WGMMA_REGISTERS(COLUMNS, COUNT, "f16", N0, N1, N2, N3, N4, N5, N6);                                     \
      else FK_WGMMA_REGISTERS(COLUMNS, COUNT, "bf16", N0, N1, N2, N3, N4, N5, N6);                                 \
    }                                                                                                              \
  };
FK_WGMMA(64, 32, 32, 33, 34, 35, 36, 37, 38)
FK_WGMMA(80, 40, 40, 41, 42, 43, 44, 45, 46)
FK_WGMMA(96, 48, 48, 49, 50, 51, 52, 53, 54)
FK_WGMMA(112, 56, 56, 57, 58, 59, 60, 61, 62)
FK_WGMMA(128, 64, 64, 65, 66, 67, 68, 69, 70)
FK_WGMMA(192, 96, 96, 97, 98, 99, 100, 101, 102)
FK_WGMMA(256, 128, 128, 129, 130, 131, 132, 133, 134)
#undef FK_WGMMA
#undef FK_WGMMA_REGISTERS
#undef FK_WGMMA_SHARED

}  // namespace hopper
}  // namespace cuda
}  // namespace foundry
#endif
