// Activations and their derivatives, one register at a time, for elementwise kernels. Compiled once per instruction
// set.
#pragma once

#include <algorithm>

#include "../common/activation.h"
#include "dispatch.h"
#include "math.h"
#include "tiles.h"

namespace foundry {

namespace FK_ISA {

// activation(g) and its derivative.
struct Activated {
  Vec value, slope;
};

// The input's gradient from the output's gradient d.
struct Smooth {
  static FK_INLINE Vec times_slope(Vec d, Vec slope) { return d * slope; }
};

// kShort: the result has 16 bits, so less precision is enough.
template <Activation kActivation, bool kShort>
struct Gate;

template <bool kShort>
struct Gate<Activation::silu, kShort> : Smooth {
  static FK_INLINE Vec value(Vec g) { return g / logistic_denominator<kShort>(g); }
  static FK_INLINE Activated both(Vec g) {
    const Vec s = 1.0f / logistic_denominator<kShort>(g);
    return {g * s, s * (1.0f + g * (1.0f - s))};
  }
};

template <bool kShort>
struct Gate<Activation::gelu, kShort> : Smooth {
  static FK_INLINE Vec value(Vec g) { return g * normal<kShort>(g).below; }
  static FK_INLINE Activated both(Vec g) {
    constexpr float kPeak = 0.398942280f;  // 1 / sqrt(2 pi)
    const Normal n = normal<kShort>(g);
    return {g * n.below, n.below + g * (n.density * kPeak)};
  }
};

// (1 + tanh(u)) / 2 is the logistic function of 2u.
template <bool kShort>
struct Gate<Activation::gelu_tanh, kShort> : Smooth {
  static constexpr float kScale = 1.59576912f, kCubic = 0.044715f;  // 2 sqrt(2 / pi)
  static FK_INLINE Vec twice_u(Vec g) { return g * ((g * g) * (kScale * kCubic) + kScale); }
  static FK_INLINE Vec value(Vec g) { return g / logistic_denominator<kShort>(twice_u(g)); }
  static FK_INLINE Activated both(Vec g) {
    const Vec s = 1.0f / logistic_denominator<kShort>(twice_u(g));
    const Vec inner = (g * g) * (3.0f * kScale * kCubic) + kScale;
    return {g * s, s + g * (s * (1.0f - s)) * inner};
  }
};

template <bool kShort>
struct Gate<Activation::sigmoid, kShort> : Smooth {
  static FK_INLINE Vec value(Vec g) { return 1.0f / logistic_denominator<kShort>(g); }
  static FK_INLINE Activated both(Vec g) {
    const Vec s = 1.0f / logistic_denominator(g);  // exact beside 1 too; small slopes need that
    return {s, s * (1.0f - s)};
  }
};

// As in PyTorch: NaN stays NaN, and where the slope is 0 the gradient is 0 even if d is infinite or NaN.
template <bool kShort>
struct Gate<Activation::relu, kShort> {
  static FK_INLINE Vec value(Vec g) { return larger(Vec{}, g); }
  static FK_INLINE Activated both(Vec g) { return {value(g), g <= 0.0f ? Vec{} : splat(1.0f)}; }
  static FK_INLINE Vec times_slope(Vec d, Vec slope) { return slope > 0.0f ? d : Vec{}; }
};

// Whether elements are read split (see vec2.h).
template <class X>
constexpr bool kSplit = std::is_same_v<X, BFloat16>;

// Calls f(row, column, columns) for each tile of [begin, end).
template <class F>
inline FK_INLINE void for_each_tile(int64_t n_cols, int64_t begin, int64_t end, F&& f) {
  const int64_t tiles = tiles_a_row(n_cols);
  for (int64_t tile = begin; tile < end; ++tile) {
    const int64_t row = tile / tiles, col = (tile - row * tiles) * kTile;
    f(row, col, std::min(kTile, n_cols - col));
  }
}

// Calls f(X*, Gate) for the memory type and the activation.
template <class F>
void with_kinds(Dtype type, Activation activation, F&& f) {
  with_type(type, [&](auto* x) {
    constexpr bool kShort = sizeof(*x) == 2;
    switch (activation) {
      case Activation::silu: return f(x, Gate<Activation::silu, kShort>{});
      case Activation::gelu: return f(x, Gate<Activation::gelu, kShort>{});
      case Activation::gelu_tanh: return f(x, Gate<Activation::gelu_tanh, kShort>{});
      case Activation::sigmoid: return f(x, Gate<Activation::sigmoid, kShort>{});
      case Activation::relu: return f(x, Gate<Activation::relu, kShort>{});
    }
  });
}

}  // namespace FK_ISA
}  // namespace foundry
