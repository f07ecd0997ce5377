// The dropout factors, which kernels compute while they read or write.
#pragma once

#include "../common/dropout.h"
#include "dispatch.cuh"
#include "launch.cuh"

namespace foundry {
namespace cuda {

// The four words of a counter.
__device__ __forceinline__ void philox(uint32_t (&c)[4], uint64_t seed) {
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
#pragma unroll
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t p0 = static_cast<uint64_t>(kPhiloxFactor0) * c[0], p1 = static_cast<uint64_t>(kPhiloxFactor1) * c[2];
    c[0] = static_cast<uint32_t>(p1 >> 32) ^ c[1] ^ key0;
    c[1] = static_cast<uint32_t>(p1);
    c[2] = static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ key1;
    c[3] = static_cast<uint32_t>(p0);
    key0 += kPhiloxKeyStep0;
    key1 += kPhiloxKeyStep1;
  }
}

// The factors of kVec neighbouring columns of a row from `col` (a multiple of kVec) on: all words of whole counters, or
// one or two words of one counter.
template <int kVec>
__device__ __forceinline__ void dropout_factors(float (&factors)[kVec], const Dropout& dropout, uint64_t seed,
                                                int64_t row, int64_t col) {
  static_assert(kVec == 1 || kVec == 2 || kVec % 4 == 0, "whole counters, or words of one");
#pragma unroll
  for (int first = 0; first < kVec; first += 4) {
    uint32_t words[4] = {static_cast<uint32_t>((col + first) / 4), static_cast<uint32_t>(row),
                         static_cast<uint32_t>(static_cast<uint64_t>(row) >> 32), 0u};
    philox(words, seed);
    if constexpr (kVec == 1) {
      const int word = static_cast<int>(col % 4);
      words[0] = word == 0 ? words[0] : word == 1 ? words[1] : word == 2 ? words[2] : words[3];
    } else if constexpr (kVec == 2) {
      const bool first_half = col % 4 == 0;
      words[0] = first_half ? words[0] : words[2];
      words[1] = first_half ? words[1] : words[3];
    }
#pragma unroll
    for (int i = 0; i < 4 && i < kVec; ++i) factors[first + i] = words[i] >= dropout.threshold ? dropout.scale : 0.f;
  }
}

// Calls f(Constant<whether there is dropout>).
template <class F>
cudaError_t with_dropout(const Dropout& dropout, F&& f) {
  return dropout.seed ? f(Constant<true>{}) : f(Constant<false>{});
}

// The factor of kVec neighbouring columns in elementwise kernels; no factor without kDropout.
template <bool kDropout, int kVec>
struct DropoutFactors {
  float values[kVec];

  __device__ __forceinline__ DropoutFactors(const Dropout& dropout, int64_t row, int64_t col) {
    dropout_factors<kVec>(values, dropout, static_cast<uint64_t>(*dropout.seed), row, col);
  }
  __device__ __forceinline__ float times(float v, int i) const { return v * values[i]; }
};
template <int kVec>
struct DropoutFactors<false, kVec> {
  __device__ __forceinline__ DropoutFactors(const Dropout&, int64_t, int64_t) {}
  __device__ __forceinline__ float times(float v, int) const { return v; }
};

}  // namespace cuda
}  // namespace foundry
