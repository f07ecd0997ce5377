// The allowed values of numeric options and sizes. foundry_kernels checks the same ones; a test compares the two.
#pragma once

#include <cmath>
#include <cstdint>

namespace foundry {

constexpr double kSmallest = 0x1p-126, kLargest = 0x1p127;  // float32 has full precision between these
constexpr int64_t kMaxHeadDim = 512;                        // largest head dimension of attention

inline bool is_positive_number(double value) { return value >= kSmallest && value <= kLargest; }
inline bool is_number(double value) { return value == 0.0 || is_positive_number(std::abs(value)); }
inline bool is_not_negative(double value) { return value == 0.0 || is_positive_number(value); }

}  // namespace foundry
