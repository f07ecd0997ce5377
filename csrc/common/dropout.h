// Dropout whose mask is a function of a seed: Philox4x32-10 (Salmon et al., SC 2011). foundry_kernels/core/dropout.py
// defines the counter and when an element is kept.
#pragma once

#include "rows.h"

namespace foundry {

// Kernel arguments. Without a seed nothing is dropped.
struct Dropout {
  const int64_t* seed;  // in the memory of the tensors' device
  uint32_t threshold;   // the smallest word that keeps its element
  float scale;          // of kept elements
};

constexpr int kPhiloxRounds = 10;
constexpr uint32_t kPhiloxFactor0 = 0xD2511F53u, kPhiloxFactor1 = 0xCD9E8D57u;
constexpr uint32_t kPhiloxKeyStep0 = 0x9E3779B9u, kPhiloxKeyStep1 = 0xBB67AE85u;

}  // namespace foundry
