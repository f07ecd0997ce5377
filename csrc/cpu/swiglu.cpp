// Compiled once per instruction set (see isa.h).
#include "swiglu.h"

#include <limits>

#include "activation.h"
#include "dropout.h"
#include "vec2.h"

namespace foundry {
namespace FK_ISA {

namespace {

// Computes, for a register of gates and one of ups, the activated product, and the gradients of both from the gradient
// d.
template <class Gate>
struct Product {
  static constexpr bool kClamps = false;
  FK_INLINE Vec value(Vec g, Vec u) const { return Gate::value(g) * u; }
  FK_INLINE Activated both(Vec g) const { return Gate::both(g); }
  FK_INLINE Vec into_gate(Vec d, Vec, Vec u, Vec slope) const {
    return Gate::times_slope(d * u, slope);
  }
  FK_INLINE Vec into_up(Vec d, Vec, Vec value) const { return d * value; }
};

// Same with the options of swiglu.
template <bool kShort>
struct ClampedProduct {
  static constexpr bool kClamps = true;
  Vec alpha, limit, up_offset;
  VecI unlimited;  // all bits or none

  explicit ClampedProduct(const GluOptions& o)
      : alpha(splat(o.alpha)),
        limit(splat(o.limited ? o.limit : std::numeric_limits<float>::infinity())),
        up_offset(splat(o.up_offset)),
        unlimited(VecI{} - static_cast<int32_t>(!o.limited)) {}

  FK_INLINE Vec clamped_gate(Vec g) const { return smaller(limit, g); }
  FK_INLINE Vec shifted_up(Vec u) const { return smaller(limit, larger(-limit, u)) + up_offset; }

  FK_INLINE Vec value(Vec g, Vec u) const {
    g = clamped_gate(g);
    return g / logistic_denominator<kShort>(alpha * g) * shifted_up(u);
  }
  FK_INLINE Activated both(Vec g) const {
    g = clamped_gate(g);
    const Vec s = 1.0f / logistic_denominator<kShort>(alpha * g);
    return {g * s, s + g * (s * (1.0f - s)) * alpha};  // in this order alpha cannot cause an infinity
  }
  FK_INLINE Vec into_gate(Vec d, Vec g, Vec u, Vec slope) const {
    return (g <= limit) | unlimited ? d * shifted_up(u) * slope : Vec{};
  }
  FK_INLINE Vec into_up(Vec d, Vec u, Vec value) const {
    return ((u <= limit) & (u >= -limit)) | unlimited ? d * value : Vec{};
  }
};

template <class X, class Unit, class Drop>
void forward_tiles(const GluForward& a, const Unit& unit, Drop& drop, int64_t begin, int64_t end, bool streamed) {
  for_each_tile(a.n_cols, begin, end, [&](int64_t row, int64_t col, int64_t columns) FK_INLINE {
    drop.template each_part<kSplit<X>>(row, col, columns, [&](int64_t first, int64_t n) FK_INLINE {
      const X* gate = static_cast<const X*>(a.gate) + a.gate_strides.offset(a.rows, row) + col + first;
      const X* up = static_cast<const X*>(a.up) + a.up_strides.offset(a.rows, row) + col + first;
      X* y = static_cast<X*>(a.y) + row * a.n_cols + col + first;
      for_each_vec2_alone<kSplit<X>>(n, [&](int64_t i, auto at) FK_INLINE {
        const Vec2 g = at.load(gate + i), u = at.load(up + i);
        at.store(y + i, drop.times(Vec2{unit.value(g.a, u.a), unit.value(g.b, u.b)}, at, i), streamed);
      });
    });
  });
}

template <class X, class Unit, class Drop>
void backward_tiles(const GluBackward& a, const Unit& unit, Drop& drop, int64_t begin, int64_t end, bool streamed) {
  for_each_tile(a.n_cols, begin, end, [&](int64_t row, int64_t col, int64_t columns) FK_INLINE {
    drop.template each_part<kSplit<X>>(row, col, columns, [&](int64_t first, int64_t n) FK_INLINE {
      const X* dy = static_cast<const X*>(a.dy) + a.dy_strides.offset(a.rows, row) + col + first;
      const X* gate = static_cast<const X*>(a.gate) + a.gate_strides.offset(a.rows, row) + col + first;
      const X* up = static_cast<const X*>(a.up) + a.up_strides.offset(a.rows, row) + col + first;
      X* dgate = a.dgate ? static_cast<X*>(a.dgate) + row * a.out_stride + col + first : nullptr;
      X* dup = a.dup ? static_cast<X*>(a.dup) + row * a.out_stride + col + first : nullptr;
      for_each_vec2_alone<kSplit<X>>(n, [&](int64_t i, auto at) FK_INLINE {
        const Vec2 d = drop.times(at.load(dy + i), at, i), g = at.load(gate + i);
        const Activated one = unit.both(g.a), two = unit.both(g.b);
        if (dgate) {
          const Vec2 u = at.load(up + i);
          at.store(dgate + i, Vec2{unit.into_gate(d.a, g.a, u.a, one.slope), unit.into_gate(d.b, g.b, u.b, two.slope)},
                   streamed);
        }
        if (dup) {
          Vec2 u{};
          if constexpr (Unit::kClamps) u = at.load(up + i);
          const Vec2 into{unit.into_up(d.a, u.a, one.value), unit.into_up(d.b, u.b, two.value)};
          at.store(dup + i, into, streamed);
        }
      });
    });
  });
}

// Access to interleaved pairs: loads a register of gates and one of ups from neighbouring columns, and stores them. In
// bfloat16 a pair is a 32-bit word.
using Lanes = std::make_integer_sequence<int, kLanes>;

struct WholePairs : Whole {
  template <class X> static Vec2 load_pairs(const X* p) {
    const Vec2 v = Whole2<true>::load(p);
    if constexpr (kSplit<X>) return v;
    else return split(v, Lanes{});
  }
  template <class X> static void store_pairs(X* p, Vec2 v, bool streamed) {
    if constexpr (!kSplit<X>) v = in_order(v, Lanes{});
    Whole2<true>::store(p, v, streamed);
  }
};

struct PartPairs : Part {
  template <class X> Vec2 load_pairs(const X* p) const { return split(Part2{2 * count}.load(p), Lanes{}); }
  template <class X> void store_pairs(X* p, Vec2 v, bool) const { Part2{2 * count}.store(p, in_order(v, Lanes{})); }
};

// Calls f(i, access) for pairs i = 0, kLanes, ... < n.
template <class F>
inline FK_INLINE void for_each_pairs(int64_t n, F&& f) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) f(i, WholePairs{});
  if (i < n) f(i, PartPairs{{static_cast<int>(n - i)}});
}

template <class X, class Unit, class Drop>
void forward_pairs(const GluForward& a, const Unit& unit, Drop& drop, int64_t begin, int64_t end, bool streamed) {
  for_each_tile(a.n_cols, begin, end, [&](int64_t row, int64_t col, int64_t columns) FK_INLINE {
    drop.template each_part<false>(row, col, columns, [&](int64_t first, int64_t n) FK_INLINE {
      const X* packed = static_cast<const X*>(a.gate) + a.gate_strides.offset(a.rows, row) + 2 * (col + first);
      X* y = static_cast<X*>(a.y) + row * a.n_cols + col + first;
      for_each_pairs(n, [&](int64_t i, auto at) FK_INLINE {
        const Vec2 v = at.load_pairs(packed + 2 * i);
        at.store(y + i, drop.times(unit.value(v.a, v.b), at, i), streamed);
      });
    });
  });
}

template <class X, class Unit, class Drop>
void backward_pairs(const GluBackward& a, const Unit& unit, Drop& drop, int64_t begin, int64_t end, bool streamed) {
  for_each_tile(a.n_cols, begin, end, [&](int64_t row, int64_t col, int64_t columns) FK_INLINE {
    drop.template each_part<false>(row, col, columns, [&](int64_t first, int64_t n) FK_INLINE {
      const X* dy = static_cast<const X*>(a.dy) + a.dy_strides.offset(a.rows, row) + col + first;
      const X* packed = static_cast<const X*>(a.gate) + a.gate_strides.offset(a.rows, row) + 2 * (col + first);
      X* dpacked = static_cast<X*>(a.dgate) + row * a.out_stride + 2 * (col + first);
      for_each_pairs(n, [&](int64_t i, auto at) FK_INLINE {
        const Vec d = drop.times(at.load(dy + i), at, i);
        const Vec2 v = at.load_pairs(packed + 2 * i);
        const Activated gated = unit.both(v.a);
        const Vec2 grads{unit.into_gate(d, v.a, v.b, gated.slope), unit.into_up(d, v.b, gated.value)};
        at.store_pairs(dpacked + 2 * i, grads, streamed);
      });
    });
  });
}

// Calls f(X*, unit, whether pairs are interleaved).
template <class F>
void with_units(Dtype type, Activation activation, const GluOptions& o, F&& f) {
  if (!o.changed && !o.interleaved)
    return with_kinds(type, activation,
                      [&](auto* x, auto gate) { f(x, Product<decltype(gate)>{}, std::false_type{}); });
  with_type(type, [&](auto* x) {
    constexpr bool kShort = sizeof(*x) == 2;
    const ClampedProduct<kShort> clamped(o);
    if (!o.changed) return f(x, Product<Gate<Activation::silu, kShort>>{}, std::true_type{});
    o.interleaved ? f(x, clamped, std::true_type{}) : f(x, clamped, std::false_type{});
  });
}

}  // namespace

void glu_forward(const GluForward& a, const GluOptions& options, int64_t begin, int64_t end) {
  with_units(a.type, a.activation, options, [&](auto* x, const auto& unit, auto pairs) {
    using X = std::remove_pointer_t<decltype(x)>;
    const bool large = worth_streaming(static_cast<const X*>(a.y), a.rows, a.n_cols);
    with_dropout(a.dropout, large, [&](auto& drop, bool streamed) {
      if constexpr (pairs.value) forward_pairs<X>(a, unit, drop, begin, end, streamed);
      else forward_tiles<X>(a, unit, drop, begin, end, streamed);
    });
  });
}

void glu_backward(const GluBackward& a, const GluOptions& options, int64_t begin, int64_t end) {
  with_units(a.type, a.activation, options, [&](auto* x, const auto& unit, auto pairs) {
    using X = std::remove_pointer_t<decltype(x)>;
    const bool large = worth_streaming(static_cast<const X*>(a.dgate ? a.dgate : a.dup), a.rows, a.n_cols);
    with_dropout(a.dropout, large, [&](auto& drop, bool streamed) {
      if constexpr (pairs.value) backward_pairs<X>(a, unit, drop, begin, end, streamed);
      else backward_tiles<X>(a, unit, drop, begin, end, streamed);
    });
  });
}

}  // namespace FK_ISA
}  // namespace foundry
