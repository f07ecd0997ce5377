// The numbers that options and sizes may be. foundry_kernels has the same for its checks, which a test compares.
#pragma once

#include <cmath>
#include <cstdint>

namespace foundry {

constexpr double kSmallest = 0x1p-126, kLargest = 0x1p127;  // between which float32 has its full precision
constexpr int64_t kMaxHeadDim = 512;                        // of attention

inline bool is_positive_number(double value) { return value >= kSmallest && value <= kLargest; }
inline bool is_number(double value) { return value == 0.0 || is_positive_number(std::abs(value)); }
inline bool is_not_negative(double value) { return value == 0.0 || is_positive_number(value); }

}  // namespace foundry
