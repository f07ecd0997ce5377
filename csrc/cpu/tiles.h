// How elementwise kernels divide their work among threads.
#pragma once

#include <cstdint>

namespace foundry {

// Rows are cut into tiles of this many columns (the last one may be shorter), numbered through all rows.
constexpr int64_t kTile = 8192;
inline int64_t tiles_a_row(int64_t n_cols) { return (n_cols + kTile - 1) / kTile; }

}  // namespace foundry
