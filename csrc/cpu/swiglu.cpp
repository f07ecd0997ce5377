// Compiled once per instruction set (see isa.h).
#include "swiglu.h"

#include <algorithm>

#include "dispatch.h"
#include "math.h"
#include "vec2.h"

namespace foundry {
namespace FK_ISA {

namespace {

// activation(g), and its derivative.
struct Activated {
  Vec value, slope;
};

// kShort: for results of 16 bits.
template <Activation kActivation, bool kShort>
struct Gate;

template <bool kShort>
struct Gate<Activation::silu, kShort> {
  static FK_INLINE Vec value(Vec g) { return g / logistic_denominator<kShort>(g); }
  static FK_INLINE Activated both(Vec g) {
    const Vec s = 1.0f / logistic_denominator<kShort>(g);
    return {g * s, s * (1.0f + g * (1.0f - s))};
  }
};

template <bool kShort>
struct Gate<Activation::gelu, kShort> {
  static FK_INLINE Vec value(Vec g) { return g * normal<kShort>(g).below; }
  static FK_INLINE Activated both(Vec g) {
    constexpr float kPeak = 0.398942280f;  // 1 / sqrt(2 pi)
    const Normal n = normal<kShort>(g);
    return {g * n.below, n.below + g * (n.density * kPeak)};
  }
};

// (1 + tanh(u)) / 2 is the logistic function of 2u.
template <bool kShort>
struct Gate<Activation::gelu_tanh, kShort> {
  static constexpr float kScale = 1.59576912f, kCubic = 0.044715f;  // 2 sqrt(2 / pi)
  static FK_INLINE Vec twice_u(Vec g) { return g * ((g * g) * (kScale * kCubic) + kScale); }
  static FK_INLINE Vec value(Vec g) { return g / logistic_denominator<kShort>(twice_u(g)); }
  static FK_INLINE Activated both(Vec g) {
    const Vec s = 1.0f / logistic_denominator<kShort>(twice_u(g));
    const Vec inner = (g * g) * (3.0f * kScale * kCubic) + kScale;
    return {g * s, s + g * (s * (1.0f - s)) * inner};
  }
};

// Whether elements are read split (see vec2.h).
template <class X>
constexpr bool kSplit = std::is_same_v<X, BFloat16>;

// Calls f(row, column, columns) for each tile of [begin, end).
template <class F>
inline FK_INLINE void for_each_tile(int64_t n_cols, int64_t begin, int64_t end, F&& f) {
  const int64_t tiles = glu_tiles_a_row(n_cols);
  for (int64_t tile = begin; tile < end; ++tile) {
    const int64_t row = tile / tiles, col = (tile - row * tiles) * kGluTile;
    f(row, col, std::min(kGluTile, n_cols - col));
  }
}

template <class X, class Gate, bool kStream>
void forward_tiles(const GluForward& a, int64_t begin, int64_t end) {
  for_each_tile(a.n_cols, begin, end, [&](int64_t row, int64_t col, int64_t columns) FK_INLINE {
    const X* gate = static_cast<const X*>(a.gate) + a.gate_strides.offset(a.rows, row) + col;
    const X* up = static_cast<const X*>(a.up) + a.up_strides.offset(a.rows, row) + col;
    X* y = static_cast<X*>(a.y) + row * a.n_cols + col;
    for_each_vec2<kSplit<X>>(columns, [&](int64_t i, auto at, int) FK_INLINE {
      const Vec2 g = at.load(gate + i);
      at.template store<kStream>(y + i, Vec2{Gate::value(g.a), Gate::value(g.b)} * at.load(up + i));
    });
  });
}

template <class X, class Gate, bool kStream>
void backward_tiles(const GluBackward& a, int64_t begin, int64_t end) {
  for_each_tile(a.n_cols, begin, end, [&](int64_t row, int64_t col, int64_t columns) FK_INLINE {
    const X* dy = static_cast<const X*>(a.dy) + a.dy_strides.offset(a.rows, row) + col;
    const X* gate = static_cast<const X*>(a.gate) + a.gate_strides.offset(a.rows, row) + col;
    const X* up = static_cast<const X*>(a.up) + a.up_strides.offset(a.rows, row) + col;
    X* dgate = a.dgate ? static_cast<X*>(a.dgate) + row * a.out_stride + col : nullptr;
    X* dup = a.dup ? static_cast<X*>(a.dup) + row * a.out_stride + col : nullptr;
    for_each_vec2<kSplit<X>>(columns, [&](int64_t i, auto at, int) FK_INLINE {
      const Vec2 d = at.load(dy + i), g = at.load(gate + i);
      const Activated one = Gate::both(g.a), two = Gate::both(g.b);
      if (dgate) at.template store<kStream>(dgate + i, d * at.load(up + i) * Vec2{one.slope, two.slope});
      if (dup) at.template store<kStream>(dup + i, d * Vec2{one.value, two.value});
    });
  });
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
    }
  });
}

}  // namespace

void glu_forward(const GluForward& a, int64_t begin, int64_t end) {
  with_kinds(a.type, a.activation, [&](auto* x, auto gate) {
    using X = std::remove_pointer_t<decltype(x)>;
    const bool streamed = worth_streaming(static_cast<const X*>(a.y), a.rows, a.n_cols);
    streamed ? forward_tiles<X, decltype(gate), true>(a, begin, end)
             : forward_tiles<X, decltype(gate), false>(a, begin, end);
    if (streamed) stream_fence();
  });
}

void glu_backward(const GluBackward& a, int64_t begin, int64_t end) {
  with_kinds(a.type, a.activation, [&](auto* x, auto gate) {
    using X = std::remove_pointer_t<decltype(x)>;
    const bool streamed = worth_streaming(static_cast<const X*>(a.dgate ? a.dgate : a.dup), a.rows, a.n_cols);
    streamed ? backward_tiles<X, decltype(gate), true>(a, begin, end)
             : backward_tiles<X, decltype(gate), false>(a, begin, end);
    if (streamed) stream_fence();
  });
}

}  // namespace FK_ISA
}  // namespace foundry
