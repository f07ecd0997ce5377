// The dropout factors of a row. Compiled once per instruction set (see isa.h).
#pragma once

#include "../common/dropout.h"
#include "vec2.h"

namespace foundry {
namespace FK_ISA {

// The four words of a counter, one per register, in the lower halves of 64-bit lanes, where the product of two words
// fits. The upper halves are ignored.
constexpr int kCounters = kLanes / 2;
typedef uint64_t VecL __attribute__((vector_size(kLanes * 4)));
typedef VecL Counters[4];

// Multiplies the lower halves.
inline VecL product(VecL v, uint32_t factor) {
#if defined(__AVX512F__)
  return (VecL)_mm512_mul_epu32((__m512i)v, _mm512_set1_epi64(factor));
#elif defined(__AVX2__)
  return (VecL)_mm256_mul_epu32((__m256i)v, _mm256_set1_epi64x(factor));
#elif defined(__SSE2__)
  return (VecL)_mm_mul_epu32((__m128i)v, _mm_set1_epi64x(factor));
#elif defined(__aarch64__)
  return (VecL)vmull_u32(vmovn_u64((uint64x2_t)v), vdup_n_u32(factor));
#else
  return (v & 0xFFFFFFFFu) * factor;
#endif
}

// Ten rounds of kCount independent batches of counters. Batches hide each other's multiplication latency.
template <int kCount>
inline FK_INLINE void philox(Counters (&counters)[kCount], uint64_t seed) {
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < kPhiloxRounds; ++round) {
    for (Counters& c : counters) {
      const VecL p0 = product(c[0], kPhiloxFactor0), p1 = product(c[2], kPhiloxFactor1);
      c[0] = (p1 >> 32) ^ c[1] ^ key0;
      c[1] = p1;
      c[2] = (p0 >> 32) ^ c[3] ^ key1;
      c[3] = p0;
    }
    key0 += kPhiloxKeyStep0;
    key1 += kPhiloxKeyStep1;
  }
}

// The words in the order of their columns. A counter has four.
template <int... kLane>
inline FK_INLINE void words_in_order(const Counters& c, VecU (&out)[2],
                                                         std::integer_sequence<int, kLane...>) {
  const VecL first = (c[0] & 0xFFFFFFFFu) | (c[1] << 32), second = (c[2] & 0xFFFFFFFFu) | (c[3] << 32);
  constexpr int kHalf = kCounters / 2;
#if defined(__clang__)
  out[0] = (VecU)__builtin_shufflevector(first, second, (kLane / 2 + kLane % 2 * kCounters)...);
  out[1] = (VecU)__builtin_shufflevector(first, second, (kHalf + kLane / 2 + kLane % 2 * kCounters)...);
#else
  out[0] = (VecU)__builtin_shuffle(first, second, VecL{(kLane / 2 + kLane % 2 * kCounters)...});
  out[1] = (VecU)__builtin_shuffle(first, second, VecL{(kHalf + kLane / 2 + kLane % 2 * kCounters)...});
#endif
}

#if defined(__AVX512F__)
constexpr int kBatches = 4;
#else
constexpr int kBatches = 2;  // the state of more would not fit in 16 registers
#endif
constexpr int kDropoutStep = kBatches * 2 * kLanes;

// Buffer size for the factors of a row: they are written in whole steps.
inline int64_t room_for_factors(int64_t n_cols) { return (n_cols + kDropoutStep - 1) / kDropoutStep * kDropoutStep; }

// factors[c] = 0 if column first + c of the row is dropped, else the scale, for c < n_cols. With kSplit in the order of
// a split row. `first` is a multiple of 4.
template <bool kSplit>
__attribute__((noinline)) void dropout_factors(const Dropout& dropout, int64_t row, int64_t first, int64_t n_cols,
                                               float* factors) {
  const VecU least = VecU{} + dropout.threshold, scale = VecU{} + bit_cast<uint32_t>(dropout.scale);
  VecL lane{};
  for (int i = 0; i < kCounters; ++i) lane[i] = i;
  for (int64_t col = 0; col < n_cols; col += kDropoutStep) {
    Counters counters[kBatches];
    for (int b = 0; b < kBatches; ++b) {
      counters[b][0] = lane + static_cast<uint64_t>((first + col) / 4 + b * kCounters);
      counters[b][1] = VecL{} + static_cast<uint32_t>(row);
      counters[b][2] = VecL{} + (static_cast<uint64_t>(row) >> 32);
      counters[b][3] = VecL{};
    }
    philox(counters, static_cast<uint64_t>(*dropout.seed));
    for (int b = 0; b < kBatches; ++b) {
      VecU words[2];
      words_in_order(counters[b], words, std::make_integer_sequence<int, kCounters>{});
      const auto factor = [&](VecU w) FK_INLINE { return bit_cast<Vec>((VecU)(w >= least) & scale); };
      Vec2 both{factor(words[0]), factor(words[1])};
      const int64_t at = col + b * 2 * kLanes;
      if (kSplit && at + 2 * kLanes <= n_cols) both = split(both, std::make_integer_sequence<int, kLanes>{});
      Whole2<false>::store(factors + at, both);
    }
  }
}

// No dropout: elementwise kernels multiply by nothing.
struct NoDropout {
  explicit NoDropout(const Dropout&) {}
  // Calls f(i, columns) for parts of the columns from `col` on. Then `times` knows the factors of that part.
  template <bool, class F> FK_INLINE void each_part(int64_t, int64_t, int64_t columns, F&& f) {
    f(int64_t{0}, columns);
  }
  template <class V, class Access> FK_INLINE V times(V v, Access, int64_t) const { return v; }
};

// Same with dropout. A part is short enough that its factors stay in the L1 cache.
struct DropoutParts {
  explicit DropoutParts(const Dropout& dropout) : dropout(dropout) {}

  template <bool kSplit, class F> FK_INLINE void each_part(int64_t row, int64_t col,
                                                                               int64_t columns, F&& f) {
    for (int64_t i = 0; i < columns; i += kPart) {
      const int64_t n = columns - i < kPart ? columns - i : kPart;
      dropout_factors<kSplit>(dropout, row, col + i, n, factors);
      f(i, n);
    }
  }
  // v times the factors of the columns that Access reads, starting at the i-th of the part.
  template <class V, class Access> FK_INLINE V times(V v, Access at, int64_t i) const {
    return v * at.load(factors + i);
  }

  static constexpr int64_t kPart = 1024;
  static_assert(kPart % kDropoutStep == 0, "factors are written in whole steps");
  const Dropout dropout;
  float factors[kPart];
};

// Calls f(factors, whether to stream results). With dropout, generating the factors takes longer than the stores, so
// streaming does not help.
template <class F>
inline void with_dropout(const Dropout& dropout, bool streamed, F&& f) {
  if (dropout.seed) {
    DropoutParts parts(dropout);
    return f(parts, false);
  }
  NoDropout none(dropout);
  f(none, streamed);
  if (streamed) stream_fence();
}

}  // namespace FK_ISA
}  // namespace foundry
