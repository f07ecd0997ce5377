// Compiled once per instruction set (see isa.h). Rows are short, and a second reading of one finds it in the cache.
#include "gated_rms_norm.h"

#include <algorithm>
#include <cmath>

#include "activation.h"

namespace foundry {
namespace FK_ISA {
namespace {

// The activation of a float gate. Its relative error does not grow with |g|, as that of activation.h does.
template <bool kSilu>
struct FloatGate : Smooth {
  static FK_INLINE Vec logistic(Vec g) { return 1.0f / (1.0f + exp(smaller(splat(88.7f), -g))); }
  static FK_INLINE Vec value(Vec g) { return kSilu ? g * logistic(g) : logistic(g); }
  static FK_INLINE Activated both(Vec g) {
    const Vec s = logistic(g);
    if constexpr (kSilu) return {g * s, s * (1.0f + g * (1.0f - s))};
    return {s, s * (1.0f - s)};
  }
};

template <class X, bool kRoundFirst>
inline FK_INLINE Vec normalized(Vec x, Vec rstd) {
  const Vec n = x * rstd;
  if constexpr (kRoundFirst) return rounded<X>(n);
  return n;
}

template <class X, class Act, bool kRoundFirst>
void forward_rows(const GatedRmsNormForward& a, int64_t begin, int64_t end) {
  const int64_t n = a.n_cols;
  for (int64_t row = begin; row < end; ++row) {
    const X* x = static_cast<const X*>(a.x) + a.x_strides.offset(a.rows, row);
    const X* gate = static_cast<const X*>(a.gate) + a.gate_strides.offset(a.rows, row);
    X* y = static_cast<X*>(a.y) + row * n;
    Vec squares[4] = {};
    for_each_vec(n, [&](int64_t i, auto at, int k) FK_INLINE {
      const Vec v = at.load(x + i);
      squares[k] += v * v;
    });
    const float scale = 1.0f / std::sqrt(sum(squares) / static_cast<float>(n) + a.eps);
    if (a.rstd) a.rstd[row] = scale;
    const Vec rstd = splat(scale);
    for_each_vec(n, [&](int64_t i, auto at, int) FK_INLINE {
      Vec v = normalized<X, kRoundFirst>(at.load(x + i), rstd);
      if (a.weight) v = v * at.load(a.weight + i);
      at.store(y + i, v * Act::value(at.load(gate + i)));
    });
  }
}

template <class X, class Act, bool kRoundFirst>
void backward_chunks(const GatedRmsNormBackward& a, int64_t chunk_begin, int64_t chunk_end) {
  const int64_t n = a.n_cols, n_rows = a.rows.count();
  for (int64_t chunk = chunk_begin; chunk < chunk_end; ++chunk) {
    float* dw = a.dw_chunks ? a.dw_chunks + chunk * n : nullptr;
    if (dw) std::fill(dw, dw + n, 0.0f);
    const int64_t end = std::min(n_rows, (chunk + 1) * a.chunk_rows);
    for (int64_t row = chunk * a.chunk_rows; row < end; ++row) {
      const X* x = static_cast<const X*>(a.x) + a.x_strides.offset(a.rows, row);
      const X* gate = static_cast<const X*>(a.gate) + a.gate_strides.offset(a.rows, row);
      const X* dy = static_cast<const X*>(a.dy) + a.dy_strides.offset(a.rows, row);
      X* dgate = a.dgate ? static_cast<X*>(a.dgate) + row * n : nullptr;
      const Vec rstd = splat(a.rstd[row]);
      // The gradients of the weight and the gate, and the sum over the row that dX needs.
      Vec along[4] = {};
      for_each_vec(n, [&](int64_t i, auto at, int k) FK_INLINE {
        const Vec d = at.load(dy + i), v = at.load(x + i), first = normalized<X, kRoundFirst>(v, rstd);
        const Vec scale = a.weight ? at.load(a.weight + i) : splat(1.0f);
        const Activated act = Act::both(at.load(gate + i));
        const Vec into = d * act.value;
        if (dgate) at.store(dgate + i, Act::times_slope(d * (first * scale), act.slope));
        if (dw) at.store(dw + i, at.load(dw + i) + into * first);
        along[k] += into * scale * (v * rstd);
      });
      if (!a.dx) continue;
      X* dx = static_cast<X*>(a.dx) + row * n;
      const Vec mean = splat(sum(along) / static_cast<float>(n));
      for_each_vec(n, [&](int64_t i, auto at, int) FK_INLINE {
        Vec into = at.load(dy + i) * Act::value(at.load(gate + i));
        if (a.weight) into = into * at.load(a.weight + i);
        at.store(dx + i, (into - at.load(x + i) * rstd * mean) * rstd);
      });
    }
  }
}

// Calls f(X*, Act, std::bool_constant) for the memory type, the activation and the rounding.
template <class F>
void with_norm(Dtype type, Activation activation, bool round_first, F&& f) {
  with_type(type, [&](auto* x) {
    constexpr bool kShort = sizeof(*x) == 2;
    const auto run = [&](auto round) {
      if constexpr (kShort) {
        if (activation == Activation::silu) f(x, Gate<Activation::silu, true>{}, round);
        else f(x, Gate<Activation::sigmoid, true>{}, round);
      } else {
        if (activation == Activation::silu) f(x, FloatGate<true>{}, round);
        else f(x, FloatGate<false>{}, round);
      }
    };
    if (kShort && round_first) run(std::true_type{});
    else run(std::false_type{});
  });
}

}  // namespace

void gated_rms_norm_forward(const GatedRmsNormForward& a, int64_t begin, int64_t end) {
  with_norm(a.type, a.activation, a.round_before_weight, [&](auto* x, auto act, auto round) {
    forward_rows<std::remove_pointer_t<decltype(x)>, decltype(act), decltype(round)::value>(a, begin, end);
  });
}

void gated_rms_norm_backward(const GatedRmsNormBackward& a, int64_t begin, int64_t end) {
  with_norm(a.type, a.activation, a.round_before_weight, [&](auto* x, auto act, auto round) {
    backward_chunks<std::remove_pointer_t<decltype(x)>, decltype(act), decltype(round)::value>(a, begin, end);
  });
}

}  // namespace FK_ISA
}  // namespace foundry
