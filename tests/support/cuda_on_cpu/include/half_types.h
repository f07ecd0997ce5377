// __nv_bfloat16 and __half with the conversions that kernels use: rounding to nearest even, as on a GPU.
#pragma once

#include <cstdint>
#include <cstring>

namespace cuda_on_cpu {
inline float float_of(uint32_t bits) {
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}
inline uint32_t bits_of(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  return bits;
}
}  // namespace cuda_on_cpu

struct __nv_bfloat16 {
  uint16_t bits;
};
struct __half {
  uint16_t bits;
};

inline float __bfloat162float(__nv_bfloat16 v) { return cuda_on_cpu::float_of(uint32_t(v.bits) << 16); }
inline __nv_bfloat16 __float2bfloat16_rn(float f) {
  const uint32_t u = cuda_on_cpu::bits_of(f);
  if (f != f) return {0x7FFF};
  return {uint16_t((u + 0x7FFFu + ((u >> 16) & 1u)) >> 16)};
}
inline float __half2float(__half v) { return static_cast<float>(*reinterpret_cast<const _Float16*>(&v.bits)); }
inline __half __float2half_rn(float f) {
  const _Float16 h = static_cast<_Float16>(f);
  __half out;
  std::memcpy(&out.bits, &h, 2);
  return out;
}
