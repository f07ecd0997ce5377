// The third form of what common/score.h computes, for a product of a query and a key in registers: in powers of 2.
#pragma once

#include "../../common/score.h"
#include "../activation.cuh"
#include "products.cuh"

namespace foundry {
namespace cuda {
namespace hopper {

// The logit without ALiBi, in powers of 2, is `scale` times what `bend` returns or, if the score does not bend, times
// the product.
struct Log2Score {
  float scale;
  float curve;   // see slope()
  float edge;    // of the products that the polynomial serves
  float odd[3];  // its coefficients
  float exponent, cap;

  template <class Inputs> void set(const Inputs& a) {
    constexpr float kLog2e = 1.4426950408889634f;
    scale = a.scale * kLog2e;
    if (!FK_BENDS(a)) return;
    const float inner = a.scale / a.softcap, square = inner * inner;
    curve = -square;
    // A smaller interval, error 2^-17, if the last coefficient may underflow. The square of `edge` is finite.
    const float most = (inner < 1e-6f ? 0.0625f : 0.375f) / inner;
    edge = most < 1e18f ? most : 1e18f;
    odd[0] = -0.33332333f * square;
    odd[1] = 0.13289726f * square * square;
    odd[2] = -0.04848729f * square * square * square;
    exponent = 2.f * kLog2e * inner;
    cap = a.softcap / a.scale;
  }

  // cap tanh(product / cap): for |product| / cap up to 3/8 by a polynomial, relative error 2^-22, above by an
  // exponential function, 2^-19.5. There a polynomial would be long; below, 1 - 2 / (1 + e^2x) would cancel.
  __device__ __forceinline__ float bend_small(float product) const {
    const float z = product * product;
    return product * fmaf(z, fmaf(z, fmaf(z, odd[2], odd[1]), odd[0]), 1.f);
  }
  __device__ __forceinline__ float bend(float product) const {
    const float size = fabsf(product);
    const float large = fmaf(fast_reciprocal(1.f + fast_exp2(size * exponent)), -2.f * cap, cap);
    return size <= edge ? bend_small(product) : copysignf(large, product);
  }
  // Of all of them. The same bits, but less work if each of the warp's is small.
  template <int kCount>
  __device__ __forceinline__ void bend(float (&products)[kCount]) const {
    float most[2] = {fabsf(products[0]), fabsf(products[1])};
    FK_UNROLL for (int k = 2; k < kCount; ++k) most[k % 2] = fmaxf(most[k % 2], fabsf(products[k]));
    if (__all_sync(0xFFFFFFFFu, fmaxf(most[0], most[1]) <= edge)) {
      FK_UNROLL for (int k = 0; k < kCount; ++k) products[k] = bend_small(products[k]);
    } else {
      settle(products);  // otherwise the compiler computes both, and spills
      FK_UNROLL for (int k = 0; k < kCount; ++k) products[k] = bend(products[k]);
    }
  }
  // The derivative of the logit from what `bend` returned; `curve` is 0 without bending.
  __device__ __forceinline__ static float slope(float bent, float curve) { return fmaf(bent * curve, bent, 1.f); }
};

}  // namespace hopper
}  // namespace cuda
}  // namespace foundry
