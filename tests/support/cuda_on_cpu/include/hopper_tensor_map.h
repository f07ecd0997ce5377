// TensorMap of csrc/cuda/hopper/tensor_map.cuh for the checker; encode_map is in hopper_encode_map.h.
#pragma once

#include <array>
#include <cstdint>

namespace foundry {
namespace cuda {
namespace hopper {

// Column, token, head, batch. Strides in bytes: of the last three.
struct alignas(64) TensorMap {
  static constexpr uint64_t kMade = 0x70616D20726F7465ull;
  uint64_t made = 0;
  const unsigned char* data = nullptr;
  std::array<int64_t, 4> sizes{};
  std::array<int64_t, 4> strides{};
  int rows = 0;
};

}  // namespace hopper
}  // namespace cuda
}  // namespace foundry
