// Vectors of 16 bytes, kept in the 32-bit words that hold them. Taking 16-bit values from a Pack one by one makes the
// compiler unpack each next to its load: the load then waits for memory before the next one is issued, and stores may
// be split into words. These functions avoid both.
#pragma once

#include <cstring>
#include <type_traits>

#include "launch.cuh"

namespace foundry {
namespace cuda {

// How long L1 keeps what is read. Every block reads a weight; one thread reads a row, once.
enum class Reuse { none, by_other_blocks };

// Reads memory that no thread writes while the kernel runs.
template <Reuse kReuse, class T, int kCount>
__device__ __forceinline__ Pack<T, kCount> load_global(const T* p) {
#if !defined(FK_CUDA_ON_CPU)
  if constexpr (sizeof(Pack<T, kCount>) % 16 == 0) {
    constexpr int kWords = sizeof(Pack<T, kCount>) / 4;
    uint32_t w[kWords];
    const char* from = reinterpret_cast<const char*>(p);
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      if constexpr (kReuse == Reuse::none)
        asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(w[i]), "=r"(w[i + 1]), "=r"(w[i + 2]), "=r"(w[i + 3])
                     : "l"(from + i * 4));
      else
        asm("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
            : "=r"(w[i]), "=r"(w[i + 1]), "=r"(w[i + 2]), "=r"(w[i + 3])
            : "l"(from + i * 4));
    }
    Pack<T, kCount> out;
    memcpy(&out, w, sizeof(out));
    return out;
  }
#endif
  return load<T, kCount>(p);
}

// Writes memory that this kernel does not read.
template <class T, int kCount>
__device__ __forceinline__ void store_global(T* p, const Pack<T, kCount>& v) {
#if !defined(FK_CUDA_ON_CPU)
  if constexpr (sizeof(v) % 16 == 0) {
    constexpr int kWords = sizeof(v) / 4;
    uint32_t w[kWords];
    memcpy(w, &v, sizeof(v));
    char* to = reinterpret_cast<char*>(p);
#pragma unroll
    for (int i = 0; i < kWords; i += 4)
      asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to + i * 4), "r"(w[i]), "r"(w[i + 1]),
                   "r"(w[i + 2]), "r"(w[i + 3]));
    return;
  }
#endif
  store(p, v);
}

// Prefetches the cache line at p to L2.
__device__ __forceinline__ void prefetch_to_l2([[maybe_unused]] const void* p) {
#if !defined(FK_CUDA_ON_CPU)
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
#endif
}

// Splits a word into its two 16-bit values, and joins them.
template <class T>
__device__ __forceinline__ void unpack(uint32_t word, float& low, float& high) {
  T values[2];
  memcpy(values, &word, sizeof(word));
  low = to_float(values[0]), high = to_float(values[1]);
}
template <>
__device__ __forceinline__ void unpack<__nv_bfloat16>(uint32_t word, float& low, float& high) {
  low = __uint_as_float(word << 16), high = __uint_as_float(word & 0xFFFF0000u);
}

template <class T>
__device__ __forceinline__ uint32_t packed(float low, float high) {
#if defined(FK_CUDA_ON_CPU)
  const T pair[2] = {from_float<T>(low), from_float<T>(high)};
#else  // one instruction, so the compiler sees one value
  const auto pair = [&] {
    if constexpr (std::is_same<T, __half>::value) return __floats2half2_rn(low, high);
    else return __floats2bfloat162_rn(low, high);
  }();
#endif
  uint32_t word;
  memcpy(&word, &pair, sizeof(word));
  return word;
}

template <class T, int kCount>
__device__ __forceinline__ void to_floats(const Pack<T, kCount>& from, float (&to)[kCount]) {
  if constexpr (sizeof(T) == 2 && kCount % 2 == 0) {
    uint32_t words[kCount / 2];
    memcpy(words, &from, sizeof(words));
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) unpack<T>(words[i], to[2 * i], to[2 * i + 1]);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) to[i] = to_float(from.values[i]);
  }
}

template <class T, int kCount>
__device__ __forceinline__ Pack<T, kCount> from_floats(const float (&from)[kCount]) {
  Pack<T, kCount> to;
  if constexpr (sizeof(T) == 2 && kCount % 2 == 0) {
    uint32_t words[kCount / 2];
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) words[i] = packed<T>(from[2 * i], from[2 * i + 1]);
    memcpy(&to, words, sizeof(words));
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) to.values[i] = from_float<T>(from[i]);
  }
  return to;
}

// kCount times 1.
template <class T, int kCount>
__device__ __forceinline__ Pack<T, kCount> ones() {
  Pack<T, kCount> out;
  if constexpr (sizeof(T) == 2 && kCount % 2 == 0) {
    uint32_t words[kCount / 2];
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) words[i] = std::is_same<T, __half>::value ? 0x3C003C00u : 0x3F803F80u;
    memcpy(&out, words, sizeof(words));
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) out.values[i] = from_float<T>(1.f);
  }
  return out;
}

}  // namespace cuda
}  // namespace foundry
