// How the product of a query and a key becomes a logit: the options and their arithmetic for all kernels, those of the
// CPU, of csrc/cuda and of csrc/cuda/hopper. The order is scale, soft cap, ALiBi, bias. Then masks and the window hide
// pairs, and dropout drops weights.
//
// An option that changes the scaled product is a part of "bending", which is the soft cap today. Kernels compute it in
// three ways: of vectors and of one number here, and in powers of 2 in csrc/cuda/hopper/score.cuh.
#pragma once

#include <cmath>

#include "flash_attention.h"

// Always inlined: otherwise the linker would take one copy of a template for all instruction sets.
#if defined(__CUDACC__)
#define FK_SCORE __host__ __device__ __forceinline__
#else
#define FK_SCORE inline __attribute__((always_inline))
#endif

namespace foundry {

// The options of a score that AttentionInputs of the CPU and of the GPU have.
#define FK_SCORE_OPTIONS                                          \
  float scale;                                                    \
  float softcap;                     /* 0 for none */             \
  const float* alibi_slopes;         /* [H] or [B, H], or null */ \
  int64_t alibi_slopes_batch_stride; /* 0 or H */                 \
  const float* sinks;                /* [H] or null */            \
  int64_t window_left, window_right; /* kUnbounded for none */    \
  bool bottom_right;

// Whether a logit without ALiBi and bias is more than the scaled product. As a function it makes Hopper's forward
// kernel of 64 columns spill registers.
#define FK_BENDS(a) ((a).softcap > 0.0f)
// The same of a logit without bias.
template <class Inputs> FK_SCORE bool has_score_options(const Inputs& a) { return FK_BENDS(a) || a.alibi_slopes; }

// Of vectors: that logit, and its derivative from it. `tanh` is that of V.
template <class Inputs, class V, class Tanh>
FK_SCORE V bent(const Inputs& a, V product, Tanh&& tanh) {
  return FK_BENDS(a) ? a.softcap * tanh(product * a.scale * (1.0f / a.softcap)) : product * a.scale;
}
template <class Inputs, class V>
FK_SCORE V bent_slope(const Inputs& a, V logit) {
  const V t = logit * (1.0f / a.softcap);  // its square is at most 1, even if that of the cap underflows
  return 1.0f - t * t;
}

// Of one number: that logit, and d logit / d (scaled product).
template <class Inputs>
FK_SCORE float bent(const Inputs& a, float product, float& derivative) {
  float s = product * a.scale;
  derivative = 1.f;
  if (FK_BENDS(a)) {
    const float t = tanhf(s / a.softcap);
    s = a.softcap * t;
    derivative = 1.f - t * t;
  }
  return s;
}

}  // namespace foundry
