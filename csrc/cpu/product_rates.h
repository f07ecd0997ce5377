// Measures bfloat16 matmuls with dot products of pairs against matmuls widened to float32.
// foundry_kernels/core/bfloat16.py chooses by these times if it does not know the processor.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

#include "isa.h"

namespace foundry {

// Seconds for kProductCalls matmuls [kProductSize, kProductSize]^2 on one thread: the fastest of kProductRounds rounds
// of about 0.1 ms. Negative if there is no such matmul.
struct ProductSeconds {
  double float32, pairs;
};
constexpr int64_t kProductSize = 64;
constexpr int kProductCalls = 32, kProductRounds = 25;

template <class F>
double fastest_round(F&& product) {
  double best = 1e9;
  for (int round = 0; round < kProductRounds; ++round) {
    const auto begin = std::chrono::steady_clock::now();
    for (int call = 0; call < kProductCalls; ++call) product();
    best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
  return best;
}

}  // namespace foundry

FK_DECLARE_PER_ISA(::foundry::ProductSeconds, product_seconds)
