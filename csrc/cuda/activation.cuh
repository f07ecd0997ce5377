// Activations and their derivatives, for elementwise kernels.
#pragma once

#include "../common/activation.h"
#include "dispatch.cuh"

namespace foundry {
namespace cuda {

// activation(g) and its derivative.
struct Activated {
  float value, derivative;
};

// 2^v and 1 / v by one instruction each, relative error about 2^-22. Subnormal results become 0.
__device__ __forceinline__ float fast_exp2(float v) {
#if defined(FK_CUDA_ON_CPU)
  return exp2f(v);
#else
  float out;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(v));
  return out;
#endif
}
__device__ __forceinline__ float fast_reciprocal(float v) {
#if defined(FK_CUDA_ON_CPU)
  return 1.f / v;
#else
  float out;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(v));
  return out;
#endif
}

// 1 / (1 + e^-v).
template <bool kFast = false>
__device__ __forceinline__ float logistic(float v) {
  if constexpr (kFast) return fast_reciprocal(1.f + fast_exp2(v * -1.44269504f));
  else return 1.f / (1.f + expf(-v));
}

// The cumulative distribution function of the normal distribution (error up to 3e-7), and its density relative to that
// at 0. Formula 7.1.26 of Abramowitz and Stegun: the tail is the density times a polynomial in 1 / (1 + p |g| /
// sqrt(2)).
__device__ __forceinline__ void fast_normal(float g, float& below, float& bell) {
  const float t = fast_reciprocal(fabsf(g) * (0.3275911f * 0.707106781f) + 1.f);
  bell = fast_exp2(g * g * (-0.5f * 1.44269504f));
  float tail = t * (0.5f * 1.061405429f) + 0.5f * -1.453152027f;
  tail = tail * t + 0.5f * 1.421413741f;
  tail = tail * t + 0.5f * -0.284496736f;
  tail = tail * t + 0.5f * 0.254829592f;
  tail = tail * t * bell;
  below = g < 0.f ? tail : 1.f - tail;
}

// Whether results of a type are rounded so coarsely that the error of the fast functions does not show.
template <class X> constexpr bool kRoundedMore = sizeof(X) == 2;

template <Activation kActivation, bool kFast = false>
__device__ __forceinline__ Activated activate(float g) {
  if constexpr (kActivation == Activation::silu) {
    const float s = logistic<kFast>(g);
    return {g * s, s * (1.f + g * (1.f - s))};
  } else if constexpr (kActivation == Activation::gelu) {
    constexpr float kRoot = 0.707106781f, kPeak = 0.398942280f;  // sqrt(1 / 2), 1 / sqrt(2 pi)
    float below, bell;
    if constexpr (kFast) {
      fast_normal(g, below, bell);
    } else {
      below = 0.5f + 0.5f * erff(g * kRoot);
      bell = expf(-0.5f * g * g);
    }
    return {g * below, below + g * (bell * kPeak)};
  } else if constexpr (kActivation == Activation::sigmoid) {
    const float s = logistic<kFast>(g);
    return {s, s * (1.f - s)};
  } else if constexpr (kActivation == Activation::relu) {
    return g <= 0.f ? Activated{0.f, 0.f} : Activated{g, 1.f};  // NaN stays NaN with slope 1, as in PyTorch
  } else {                                                      // (1 + tanh(u)) / 2 is the logistic function of 2u
    constexpr float kScale = 1.59576912f, kCubic = 0.044715f;   // 2 sqrt(2 / pi)
    const float squared = g * g, s = logistic<kFast>(g * (squared * kCubic + 1.f) * kScale);
    return {g * s, s + g * (s * (1.f - s)) * ((squared * (3.f * kCubic) + 1.f) * kScale)};
  }
}

// The gradient of the input. For ReLU it is 0 where the slope is 0, even if the incoming gradient is infinite or NaN.
template <Activation kActivation>
__device__ __forceinline__ float times_slope(float grad, float derivative) {
  if constexpr (kActivation == Activation::relu) return derivative > 0.f ? grad : 0.f;
  else return grad * derivative;
}

// Strides of an output: any two rows are a multiple of `stride` apart.
inline RowStrides row_by_row(int64_t stride) { return {{stride, stride, stride}}; }

// Calls f(Tag<X>, activation, values per read) for one of kActivations.
template <Activation... kActivations, class F>
cudaError_t with_kinds(Dtype type, Activation activation, bool vectors, F&& f) {
  const auto sized = [&](auto x, auto kind) {
    constexpr int kVec = 16 / sizeof(FK_TYPE(x));
    return vectors ? f(x, kind, Constant<kVec>{}) : f(x, kind, Constant<1>{});
  };
  return with_type(type, [&](auto x) {
    cudaError_t result = cudaErrorInvalidValue;
    const auto call = [&](auto kind) {
      result = sized(x, kind);
      return true;
    };
    static_cast<void>(((activation == kActivations && call(Constant<kActivations>{})) || ...));
    return result;
  });
}

}  // namespace cuda
}  // namespace foundry
