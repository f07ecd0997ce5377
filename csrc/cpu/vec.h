// A register of floats, with loads and stores as float, bfloat16 and float16.
//
// Uses the vector types of GCC and Clang, so one source works for every instruction set. What they do not express well
// (float16) uses intrinsics. Loads and stores need no alignment.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "../common/rows.h"

#if defined(__SSE2__)
#if defined(__GNUC__) && !defined(__clang__)  // GCC 12 warns of uninitialised values in its own header
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

// For lambdas in inner loops, some of which the compiler would not inline otherwise.
#define FK_INLINE __attribute__((always_inline))

namespace foundry {

// Larger outputs are written with streaming stores, past the caches.
constexpr int64_t kStreamBytes = 16 << 20;

namespace FK_ISA {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef uint32_t VecU __attribute__((vector_size(kLanes * 4)));
typedef int32_t VecI __attribute__((vector_size(kLanes * 4)));
typedef uint16_t VecH __attribute__((vector_size(kLanes * 2)));

// Memory types. bfloat16 and float16 are raw bits; arithmetic is in float.
struct BFloat16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};

// Subtracting +0 changes no v, so the compiler drops it. Adding +0 would change -0 and so cost an addition per
// broadcast.
inline Vec splat(float v) { return v - Vec{}; }

template <class To, class From>
inline To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast needs equal sizes");
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

// Converts lanes to the bits of T, rounding to nearest even, and back.
template <class T> struct Convert;

template <> struct Convert<float> {
  typedef Vec Bits;
  static Vec widen(Bits v) { return v; }
  static Bits round(Vec v) { return v; }
};

template <> struct Convert<BFloat16> {
  typedef VecH Bits;
  static Vec widen(Bits v) {
#if defined(__AVX512F__)  // GCC converts in two halves
    return bit_cast<Vec>((VecU)_mm512_cvtepu16_epi32((__m256i)v) << 16);
#elif defined(__AVX2__)
    return bit_cast<Vec>((VecU)_mm256_cvtepu16_epi32((__m128i)v) << 16);
#else
    return bit_cast<Vec>(__builtin_convertvector(v, VecU) << 16);
#endif
  }
  static Bits round(Vec v) {
#if defined(__AVX512BF16__)
    // The instruction treats subnormal floats as zero, so lanes with a zero exponent take the slow path.
    const __mmask16 has_exponent = _mm512_test_epi32_mask((__m512i)v, _mm512_set1_epi32(0x7F800000));
    if (__builtin_expect(has_exponent == 0xFFFF, 1)) return (Bits)_mm512_cvtneps_pbh((__m512)v);
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    return (Bits)vcvt_bf16_f32((float32x4_t)v);
#endif
    // Rounding could carry a NaN's mantissa into infinity.
    const VecU u = bit_cast<VecU>(v), sum = u + 0x7FFFu + ((u >> 16) & 1u);
#if defined(__AVX512F__)
    const VecU chosen = v == v ? sum >> 16 : (u >> 16) | 0x40u;
    return (Bits)_mm512_cvtepi32_epi16((__m512i)chosen);
#else
    const VecU chosen = (sum | (VecU)(v != v)) >> 16;
#if defined(__AVX2__)
    const __m256i words = (__m256i)chosen;
    return (Bits)_mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
#else
    return __builtin_convertvector(chosen, VecH);
#endif
#endif
  }
};

template <> struct Convert<Half> {
  typedef VecH Bits;
#if defined(__AVX512F__)
  static Vec widen(Bits v) { return (Vec)_mm512_cvtph_ps((__m256i)v); }
  static Bits round(Vec v) { return (Bits)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
#elif defined(__F16C__)
  static Vec widen(Bits v) { return (Vec)_mm256_cvtph_ps((__m128i)v); }
  static Bits round(Vec v) { return (Bits)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
#elif defined(__aarch64__)
  static Vec widen(Bits v) { return (Vec)vcvt_f32_f16((float16x4_t)v); }
  static Bits round(Vec v) { return (Bits)vcvt_f16_f32((float32x4_t)v); }
#else
  static Vec widen(Bits v) {
    Vec out;
    for (int i = 0; i < kLanes; ++i) out[i] = widen_one(v[i]);
    return out;
  }
  static Bits round(Vec v) {
    Bits out;
    for (int i = 0; i < kLanes; ++i) out[i] = round_one(v[i]);
    return out;
  }
  static float widen_one(uint16_t h) {
    const uint32_t sign = (uint32_t)(h & 0x8000u) << 16, magnitude = h & 0x7FFFu;
    if (magnitude >= 0x7C00u)  // infinity, NaN
      return bit_cast<float>(sign | 0x7F800000u | ((magnitude & 0x3FFu) << 13));
    // Rebiases the exponent of a normal half by 127 - 15. Multiplying by 2^112 also handles subnormals.
    const float scaled = bit_cast<float>(magnitude << 13) * bit_cast<float>((127u + 112u) << 23);
    return bit_cast<float>(bit_cast<uint32_t>(scaled) | sign);
  }
  static uint16_t round_one(float f) {
    uint32_t u = bit_cast<uint32_t>(f);
    const uint16_t sign = (uint16_t)((u >> 16) & 0x8000u);
    u &= 0x7FFFFFFFu;
    if (u > 0x7F800000u) return sign | 0x7E00u;
    if (u >= 0x477FF000u) return sign | 0x7C00u;  // rounds to 65536 or more
    if (u < 0x38800000u) {  // subnormal: adding 0.5 leaves the value, rounded to a multiple of 2^-24, in the low bits
      const float shifted = bit_cast<float>(u) + 0.5f;
      return sign | (uint16_t)(bit_cast<uint32_t>(shifted) - 0x3F000000u);
    }
    return sign | (uint16_t)((u + 0xFFFu + ((u >> 13) & 1u) - ((127u - 15u) << 23)) >> 13);
  }
#endif
};

// v as it would be after storing it as T.
template <class T> inline Vec rounded(Vec v) { return Convert<T>::widen(Convert<T>::round(v)); }

// Streaming store: writes past the caches, so the line is not read first. Worth it for outputs larger than the caches.
// `p` must be aligned to sizeof(bits). Without SSE2 this is an ordinary store.
template <class T, class Bits>
inline void stream(T* p, Bits bits) {
#if defined(__AVX512F__)
  if constexpr (sizeof(Bits) == 64) return _mm512_stream_ps(reinterpret_cast<float*>(p), bit_cast<__m512>(bits));
#endif
#if defined(__AVX__)
  if constexpr (sizeof(Bits) == 32) return _mm256_stream_ps(reinterpret_cast<float*>(p), bit_cast<__m256>(bits));
#endif
#if defined(__SSE2__)
  if constexpr (sizeof(Bits) == 16) return _mm_stream_ps(reinterpret_cast<float*>(p), bit_cast<__m128>(bits));
#endif
  std::memcpy(p, &bits, sizeof(bits));
}

// Makes streamed writes visible before later ones.
inline void stream_fence() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

// Access to kLanes elements, or to the first `count` of them (the others read as zero and are not written).
struct Whole {
  template <class T> static Vec load(const T* p) {
    typename Convert<T>::Bits bits;
    std::memcpy(&bits, p, sizeof(bits));
    return Convert<T>::widen(bits);
  }
  template <class T> static void store(T* p, Vec v) {
    const typename Convert<T>::Bits bits = Convert<T>::round(v);
    std::memcpy(p, &bits, sizeof(bits));
  }
  // Returns the stored value, so that v is rounded once.
  template <class T> static Vec store_rounded(T* p, Vec v) {
    const typename Convert<T>::Bits bits = Convert<T>::round(v);
    std::memcpy(p, &bits, sizeof(bits));
    return Convert<T>::widen(bits);
  }
  // Past the caches if `streamed`.
  template <class T> static void store(T* p, Vec v, bool streamed) {
    if (streamed) stream(p, Convert<T>::round(v));
    else store(p, v);
  }
};

struct Part {
  int count;
  template <class T> Vec load(const T* p) const {
    typename Convert<T>::Bits bits{};
    std::memcpy(&bits, p, count * sizeof(T));
    return Convert<T>::widen(bits);
  }
  template <class T> void store(T* p, Vec v) const {
    const typename Convert<T>::Bits bits = Convert<T>::round(v);
    std::memcpy(p, &bits, count * sizeof(T));
  }
  template <class T> Vec store_rounded(T* p, Vec v) const {
    const typename Convert<T>::Bits bits = Convert<T>::round(v);
    std::memcpy(p, &bits, count * sizeof(T));
    return Convert<T>::widen(bits);
  }
  template <class T> void store(T* p, Vec v, bool) const { store(p, v); }
};

// Calls f(i, access, k) for i = 0, kLanes, ... < n. `k` cycles through 0..3 and selects one of four accumulators, so
// that successive additions do not depend on each other.
template <class F>
inline FK_INLINE void for_each_vec(int64_t n, F&& f) {
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    f(i, Whole{}, 0);
    f(i + kLanes, Whole{}, 1);
    f(i + 2 * kLanes, Whole{}, 2);
    f(i + 3 * kLanes, Whole{}, 3);
  }
  for (; i + kLanes <= n; i += kLanes) f(i, Whole{}, 0);
  if (i < n) f(i, Part{(int)(n - i)}, 1);
}

// The same calls, for an f of many instructions: it is compiled twice, not six times. Accumulators lie in memory.
template <class F>
inline FK_INLINE void for_each_vec_of_many(int64_t n, F&& f) {
  const int64_t in_turn = n - n % (4 * kLanes);
  int64_t i = 0;
#pragma GCC unroll 1
  for (; i + kLanes <= n; i += kLanes) f(i, Whole{}, i < in_turn ? (int)(i / kLanes % 4) : 0);
  if (i < n) f(i, Part{(int)(n - i)}, 1);
}

// The sum of the lanes of four registers, added pairwise.
inline float sum(const Vec (&acc)[4]) {
  const Vec v = (acc[0] + acc[1]) + (acc[2] + acc[3]);
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#else
  float lanes[kLanes];
  std::memcpy(lanes, &v, sizeof(v));
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  return lanes[0];
#endif
}

// Calls f(std::bool_constant...) for run-time booleans: a kernel is specialised on each of them.
template <class F>
void with_bools(F&& f) {
  f();
}
template <class F, class... Rest>
void with_bools(F&& f, bool first, Rest... rest) {
  const auto bound = [&](auto constant) { with_bools([&](auto... others) { f(constant, others...); }, rest...); };
  first ? bound(std::true_type{}) : bound(std::false_type{});
}

}  // namespace FK_ISA
}  // namespace foundry
