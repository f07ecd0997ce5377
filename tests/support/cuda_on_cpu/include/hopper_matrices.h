// Matrices in shared memory by wgmma's descriptors, and their product.
#pragma once

#include <algorithm>

#include "half_types.h"
#include "hopper_arena.h"

namespace cuda_on_cpu {
namespace hopper {

// Bits of a descriptor: 0-13 address / 16, 16-29 leading offset / 16, 32-45 stride offset / 16, 49-51 base offset,
// 62-63 the swizzle. All that the kernels do not use is reported.
struct Matrix {
  uint32_t address, leading, stride;
  bool across;    // MN-major: rows of 128 bytes lie along the result's side
  unsigned size;  // along the result's side

  Matrix(uint64_t bits, bool across_, unsigned size_) : across(across_), size(size_) {
    address = uint32_t(bits & 0x3FFF) << 4;
    leading = uint32_t(bits >> 16 & 0x3FFF) << 4;
    stride = uint32_t(bits >> 32 & 0x3FFF) << 4;
    if (bits >> 62 != 1)
      fail("wgmma by a descriptor of swizzle mode " + std::to_string(bits >> 62) + ", not 1 (128 bytes)");
    if (bits >> 49 & 7) fail("wgmma by a descriptor with a base offset");
    if (bits & 0x3FFFC000C000C000ull & ~(7ull << 49))
      fail("wgmma by a descriptor with bits that mean nothing: an address or offset too large");
    if (address % 1024 >= 128)
      fail("wgmma by a descriptor that begins in row " + std::to_string(address / 128 % 8) +
           " of 8 that the swizzle is about");
    if (stride % 1024)
      fail("wgmma by a descriptor of a stride of " + std::to_string(stride) + " bytes, not of a multiple of 1024");
    if (across && address % 128) fail("wgmma by a descriptor of an MN-major matrix that begins within a row");
    if (!across && address % 128 > 96) fail("wgmma by a descriptor of a K-major matrix whose 16 of k leave the row");
    if (across && size > 64 && leading % 1024)
      fail("wgmma by a descriptor of a leading offset of " + std::to_string(leading) +
           " bytes, not of a multiple of 1024");
  }

  unsigned chunks() const { return 2 * size; }
  // The i-th 16 bytes of it.
  uint32_t chunk(unsigned i) const {
    const uint32_t at = across ? row_across(i % (size / 8) * 8, i / (size / 8)) : row_along(i / 2) + i % 2 * 16;
    return swizzled(at);
  }
  // values[mn * 16 + k], or [k * size + mn].
  template <class Value>
  void gather(Arena& arena, const Value& value, bool k_first, float* values) const {
    for (unsigned i = 0; i < chunks(); ++i) {
      uint16_t bits[8];
      std::memcpy(bits, arena.data(chunk(i)), 16);
      for (unsigned e = 0; e < 8; ++e) {
        const unsigned mn = across ? i % (size / 8) * 8 + e : i / 2, k = across ? i / (size / 8) : i % 2 * 8 + e;
        values[k_first ? k * size + mn : mn * 16 + k] = value(bits[e]);
      }
    }
  }

 private:
  uint32_t row_along(unsigned mn) const { return address + mn / 8 * stride + mn % 8 * 128; }
  uint32_t row_across(unsigned mn, unsigned k) const {
    return address + mn / 64 * leading + k / 8 * stride + k % 8 * 128 + mn % 64 * 2;
  }
  static uint32_t swizzled(uint32_t at) { return at ^ (at >> 7 & 7) << 4; }
};

inline const float* half_values() {
  static const std::vector<float> table = [] {
    std::vector<float> values(1 << 16);
    for (unsigned i = 0; i < values.size(); ++i) values[i] = __half2float(__half{uint16_t(i)});
    return values;
  }();
  return table.data();
}

// sums [64, n] += left [64, 16] right [16, n].
FK_HOT inline void multiply_add(float* sums, const float* left, const float* right, unsigned n) {
  typedef float Eight __attribute__((vector_size(32), aligned(4)));
  for (unsigned row = 0; row < 64; ++row)
    for (unsigned c = 0; c < n; c += 8) {
      Eight sum = *reinterpret_cast<Eight*>(sums + row * n + c);
      for (unsigned k = 0; k < 16; ++k) sum += left[row * 16 + k] * *reinterpret_cast<const Eight*>(right + k * n + c);
      *reinterpret_cast<Eight*>(sums + row * n + c) = sum;
    }
}

}  // namespace hopper
}  // namespace cuda_on_cpu
