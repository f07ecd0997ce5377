// A product and a sum that every copy of a loop rounds in the same way.
#pragma once

#include "vec.h"

namespace foundry {
namespace FK_ISA {

// a * b + c, rounded once if the instruction set has FMA. Left to the compiler, two copies of one loop may fuse
// different products and so differ in the last bit.
inline Vec multiply_add(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (Vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

}  // namespace FK_ISA
}  // namespace foundry
