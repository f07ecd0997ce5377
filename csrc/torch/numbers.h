// The numbers that options may be, as in _checks.py: within these bounds float32 has its full precision.
#pragma once

#include <cmath>

namespace foundry {

inline bool is_positive_number(double value) { return value >= 0x1p-126 && value <= 0x1p127; }
inline bool is_number(double value) { return value == 0.0 || is_positive_number(std::abs(value)); }

}  // namespace foundry
