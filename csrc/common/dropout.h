// Dropout whose mask is a function of a seed: Philox4x32-10 (Salmon et al., SC 2011). What the counter is, and when an
// element is kept, is said in foundry_kernels/core/dropout.py.
#pragma once

#include "rows.h"

namespace foundry {

// What the kernels are given; without a seed nothing is dropped.
struct Dropout {
  const int64_t* seed;  // in the memory of the tensors' device
  uint32_t threshold;   // the least word that keeps its element
  float scale;          // of what is kept
};

constexpr int kPhiloxRounds = 10;
constexpr uint32_t kPhiloxFactor0 = 0xD2511F53u, kPhiloxFactor1 = 0xCD9E8D57u;
constexpr uint32_t kPhiloxKeyStep0 = 0x9E3779B9u, kPhiloxKeyStep1 = 0xBB67AE85u;

}  // namespace foundry
