// Activations and their derivatives, for kernels that do little else.
#pragma once

#include "../common/activation.h"
#include "dispatch.cuh"

namespace foundry {
namespace cuda {

// activation(g), and its derivative.
struct Activated {
  float value, derivative;
};

// 1 / (1 + e^-v).
__device__ __forceinline__ float logistic(float v) { return 1.f / (1.f + expf(-v)); }

template <Activation kActivation>
__device__ __forceinline__ Activated activate(float g) {
  if constexpr (kActivation == Activation::silu) {
    const float s = logistic(g);
    return {g * s, s * (1.f + g * (1.f - s))};
  } else if constexpr (kActivation == Activation::gelu) {
    constexpr float kRoot = 0.707106781f, kPeak = 0.398942280f;  // sqrt(1 / 2), 1 / sqrt(2 pi)
    const float below = 0.5f + 0.5f * erff(g * kRoot);
    return {g * below, below + g * (expf(-0.5f * g * g) * kPeak)};
  } else if constexpr (kActivation == Activation::sigmoid) {
    const float s = logistic(g);
    return {s, s * (1.f - s)};
  } else if constexpr (kActivation == Activation::relu) {
    return g <= 0.f ? Activated{0.f, 0.f} : Activated{g, 1.f};  // NaN stays, with a slope, as in PyTorch
  } else {                                                      // (1 + tanh(u)) / 2 is the logistic function of 2u
    constexpr float kScale = 1.59576912f, kCubic = 0.044715f;   // 2 sqrt(2 / pi)
    const float squared = g * g, s = logistic(g * (squared * kCubic + 1.f) * kScale);
    return {g * s, s + g * (s * (1.f - s)) * ((squared * (3.f * kCubic) + 1.f) * kScale)};
  }
}

// What reaches the input of a gradient: of ReLU nothing where the slope is 0, even if the gradient is infinite or NaN.
template <Activation kActivation>
__device__ __forceinline__ float times_slope(float grad, float derivative) {
  if constexpr (kActivation == Activation::relu) return derivative > 0.f ? grad : 0.f;
  else return grad * derivative;
}

// Of an output: any two rows are a multiple of `stride` apart.
inline RowStrides row_by_row(int64_t stride) { return {{stride, stride, stride}}; }

// Calls f(Tag<X>, activation, values per read), which is one of kActivations.
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
