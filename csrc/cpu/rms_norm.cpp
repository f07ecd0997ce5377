// Compiled once per instruction set (see isa.h).
#include "rms_norm.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "dispatch.h"
#include "dropout.h"
#include "vec2.h"

namespace foundry {
namespace FK_ISA {

namespace {

// See reads_split.
template <class X, class Y>
constexpr bool kSplit = std::is_same_v<X, BFloat16> && std::is_same_v<Y, BFloat16>;

enum class Sum { none, residual, dropout };

// The input of the norm in one row: x, or x + residual, where x may have dropout. Writes the sum to h while reading it.
template <class X, Sum kSum>
struct Input {
  static constexpr bool kResidual = kSum != Sum::none;
  const X* x;
  const X* residual;
  X* h;

  Input(const RmsNormForward& a, int64_t row) : x(static_cast<const X*>(a.x) + a.x_strides.offset(a.rows, row)) {
    if constexpr (kResidual) {
      residual = static_cast<const X*>(a.residual) + a.residual_strides.offset(a.rows, row);
      h = static_cast<X*>(a.h) + row * a.n_cols;
    }
  }
  // Takes the factors of this row.
  template <class Access>
  FK_INLINE Vec2 first_read(int64_t i, Access at,
                                                                        const float* factors) const {
    if constexpr (!kResidual) return at.load(x + i);
    else if constexpr (kSum == Sum::residual) return at.store_rounded(h + i, at.load(x + i) + at.load(residual + i));
    else return at.store_rounded(h + i, at.load(x + i) * at.load(factors + i) + at.load(residual + i));
  }
  template <class Access>
  FK_INLINE Vec2 second_read(int64_t i, Access at) const {
    return at.load(kResidual ? h + i : x + i);
  }
};

// Whether x / rms is rounded before the multiplication. For float32 that changes nothing.
template <class X>
constexpr bool kRounds = !std::is_same_v<X, float>;

// How a row is scaled. RMSNorm: y = x * rstd * weight. LayerNorm: y = ((x - about) * rstd + shift) * weight + bias.
struct Scale {
  Vec rstd, about, shift;
};

template <class X, class Y, Sum kSum, bool kCentered>
inline FK_INLINE Scale scale_of(const RmsNormForward& a, const Input<X, kSum>& in, int64_t row,
                                                    float total) {
  const float n = static_cast<float>(a.n_cols);
  if constexpr (!kCentered) {
    const float rstd = 1.0f / std::sqrt(total / n + a.eps);
    if (a.rstd) a.rstd[row] = rstd;
    return {splat(rstd), Vec{}, Vec{}};
  } else {  // variance around the rounded mean, then corrected for the rounding: no cancellation far from 0
    const float mean = total / n;
    const Vec about = splat(mean);
    Vec rests[4] = {}, squares[4] = {};
    for_each_vec2<kSplit<X, Y>>(a.n_cols, [&](int64_t i, auto at, int k) FK_INLINE {
      const Vec2 v = at.within(in.second_read(i, at) - about);
      rests[k] += v.a;
      rests[k + 1] += v.b;
      squares[k] += v.a * v.a;
      squares[k + 1] += v.b * v.b;
    });
    const float rest = sum(rests) / n, variance = sum(squares) / n - rest * rest;
    const float rstd = 1.0f / std::sqrt((variance < 0.0f ? 0.0f : variance) + a.eps);
    if (a.rstd) a.rstd[row] = rstd, a.mean[row] = mean + rest;
    return {splat(rstd), about, splat(-rest * rstd)};
  }
}

// A row is read twice: for its sum of squares and, from the L1 cache, for scaling. One loop does the first pass of a
// row and the second pass of the row before. LayerNorm needs one more pass in between, for the variance.
template <class X, class Y, Sum kSum, bool kWeight, bool kRoundFirst, bool kCentered>
void forward_rows(const RmsNormForward& a, int64_t begin, int64_t end, bool streamed) {
  const int64_t n = a.n_cols;
  Vec sums[4] = {};
  std::vector<float> factors(kSum == Sum::dropout ? room_for_factors(n) : 0);  // of the row in its first pass
  const auto drop = [&](int64_t row) {
    if constexpr (kSum == Sum::dropout) dropout_factors<kSplit<X, Y>>(a.dropout, row, 0, n, factors.data());
  };
  const auto read = [&](const Input<X, kSum>& in, int64_t i, auto at, int k) FK_INLINE {
    const Vec2 v = in.first_read(i, at, factors.data());
    sums[k] += kCentered ? v.a : v.a * v.a;
    sums[k + 1] += kCentered ? v.b : v.b * v.b;
  };
  drop(begin);
  Input<X, kSum> in(a, begin);
  for_each_vec2<kSplit<X, Y>>(n, [&](int64_t i, auto at, int k) FK_INLINE { read(in, i, at, k); });
  for (int64_t row = begin; row < end; ++row) {
    const Scale scale = scale_of<X, Y, kSum, kCentered>(a, in, row, sum(sums));
    Y* y = static_cast<Y*>(a.y) + row * n;
    const auto write = [&](int64_t i, auto at) FK_INLINE {
      Vec2 v = in.second_read(i, at);
      if constexpr (kCentered) v = (v - scale.about) * scale.rstd + scale.shift;
      else v = v * scale.rstd;
      if constexpr (kRoundFirst) v = at.template rounded<X>(v);
      if constexpr (kWeight) v = v * at.load(a.weight + i);
      if constexpr (kCentered) v = v + at.load(a.bias + i);
      at.store(y + i, v, streamed);
    };
    if (row + 1 == end) {
      for_each_vec2<kSplit<X, Y>>(n, [&](int64_t i, auto at, int) FK_INLINE { write(i, at); });
      return;
    }
    drop(row + 1);
    const Input<X, kSum> next(a, row + 1);
    for (Vec& each : sums) each = Vec{};
    for_each_vec2<kSplit<X, Y>>(n, [&](int64_t i, auto at, int k) FK_INLINE {
      read(next, i, at, k);
      write(i, at);
    });
    in = next;
  }
}

template <class X, class Y, bool kRoundFirst, bool kCentered, bool kDropout>
void backward_chunks(const RmsNormBackward& a, int64_t chunk_begin, int64_t chunk_end, bool streamed) {
  const int64_t n = a.n_cols, n_rows = a.rows.count();
  std::vector<float> factors(kDropout ? room_for_factors(n) : 0);
  for (int64_t chunk = chunk_begin; chunk < chunk_end; ++chunk) {
    float* dw = a.dw_chunks ? a.dw_chunks + chunk * n : nullptr;
    float* db = kCentered && a.db_chunks ? a.db_chunks + chunk * n : nullptr;
    if (dw) std::fill(dw, dw + n, 0.0f);
    if (db) std::fill(db, db + n, 0.0f);
    const int64_t end = std::min(n_rows, (chunk + 1) * a.chunk_rows);
    for (int64_t row = chunk * a.chunk_rows; row < end; ++row) {
      const X* x = static_cast<const X*>(a.x) + a.x_strides.offset(a.rows, row);
      const Y* dy = static_cast<const Y*>(a.dy) + a.dy_strides.offset(a.rows, row);
      const X* dh = a.dh ? static_cast<const X*>(a.dh) + a.dh_strides.offset(a.rows, row) : nullptr;
      const Vec r = splat(a.rstd[row]), about = kCentered ? splat(a.mean[row]) : Vec{};
      const auto normalized = [&](int64_t i, auto at) FK_INLINE {
        if constexpr (kCentered) return (at.load(x + i) - about) * r;
        else return at.load(x + i) * r;
      };

      // First pass: adds to dW and the bias gradient, and computes the sums over the row that dX needs.
      Vec products[4] = {}, grads[4] = {};
      for_each_vec2<kSplit<X, Y>>(n, [&](int64_t i, auto at, int k) FK_INLINE {
        Vec2 grad = at.load(dy + i);
        const Vec2 normed = normalized(i, at);
        if (dw) at.store(dw + i, at.load(dw + i) + grad * (kRoundFirst ? at.template rounded<X>(normed) : normed));
        if (kCentered && db) at.store(db + i, at.load(db + i) + grad);
        if (a.weight) grad = grad * at.load(a.weight + i);
        products[k] += grad.a * normed.a;
        products[k + 1] += grad.b * normed.b;
        if constexpr (kCentered) grads[k] += grad.a, grads[k + 1] += grad.b;
      });
      if (!a.dx) continue;

      X* dx = static_cast<X*>(a.dx) + row * n;
      X* dresidual = kDropout ? static_cast<X*>(a.dresidual) + row * n : nullptr;
      if constexpr (kDropout) dropout_factors<kSplit<X, Y>>(a.dropout, row, 0, n, factors.data());
      const Vec mean = splat(sum(products) / static_cast<float>(n));
      const Vec grad_mean = kCentered ? splat(sum(grads) / static_cast<float>(n)) : Vec{};
      for_each_vec2<kSplit<X, Y>>(n, [&](int64_t i, auto at, int) FK_INLINE {
        Vec2 grad = at.load(dy + i);
        if (a.weight) grad = grad * at.load(a.weight + i);
        if constexpr (kCentered) grad = grad - grad_mean;
        Vec2 v = (grad - normalized(i, at) * mean) * r;
        if (dh) v = v + at.load(dh + i);
        if constexpr (kDropout) {
          at.store(dresidual + i, v, streamed);
          v = v * at.load(factors.data() + i);
        }
        at.store(dx + i, v, streamed);
      });
    }
    if (kSplit<X, Y> && dw) put_in_order(dw, n);
    if (kSplit<X, Y> && db) put_in_order(db, n);
  }
}

// Calls f(std::integral_constant<Sum, ...>).
template <class F>
void with_sum(const RmsNormForward& a, F&& f) {
  if (!a.residual) return f(std::integral_constant<Sum, Sum::none>{});
  if (!a.dropout.seed) return f(std::integral_constant<Sum, Sum::residual>{});
  f(std::integral_constant<Sum, Sum::dropout>{});
}

template <class X, class Y>
void forward_typed(const RmsNormForward& a, int64_t begin, int64_t end) {
  const bool streamed = worth_streaming(static_cast<const Y*>(a.y), a.rows, a.n_cols);
  with_sum(a, [&](auto sum) {
    if constexpr (std::is_same_v<X, Y>) {
      if (a.centered) return forward_rows<X, X, sum.value, true, false, true>(a, begin, end, streamed);
      if (!a.weight) return forward_rows<X, X, sum.value, false, false, false>(a, begin, end, streamed);
    }
    const auto run = [&](auto round_first) {
      forward_rows<X, Y, sum.value, true, round_first.value && kRounds<X>, false>(a, begin, end, streamed);
    };
    with_bools(run, a.round_before_weight);
  });
  if (streamed) stream_fence();
}

template <class X, class Y>
void backward_typed(const RmsNormBackward& a, int64_t begin, int64_t end) {
  const bool dropout = a.dropout.seed && a.dx;
  const bool streamed = worth_streaming(static_cast<const X*>(a.dx), a.rows, a.n_cols) &&
                        (!dropout || worth_streaming(static_cast<const X*>(a.dresidual), a.rows, a.n_cols));
  const auto run = [&](auto round_first, auto drops) {
    if constexpr (std::is_same_v<X, Y>)
      if (a.centered) return backward_chunks<X, X, false, true, drops.value>(a, begin, end, streamed);
    backward_chunks<X, Y, round_first.value && kRounds<X>, false, drops.value>(a, begin, end, streamed);
  };
  with_bools(run, a.round_before_weight, dropout);
  if (streamed) stream_fence();
}

// Calls f(X*, Y*) for the memory types of x and y. y's type is x's or float.
template <class F>
void with_types(Dtype x, Dtype y, F&& f) {
  with_type(x, [&](auto* x_type) {
    if (y == Dtype::f32) return f(x_type, (float*)nullptr);
    f(x_type, x_type);
  });
}

}  // namespace

void rms_norm_forward(const RmsNormForward& a, int64_t begin, int64_t end) {
  with_types(a.x_type, a.y_type, [&](auto* x, auto* y) {
    forward_typed<std::remove_pointer_t<decltype(x)>, std::remove_pointer_t<decltype(y)>>(a, begin, end);
  });
}

void rms_norm_backward(const RmsNormBackward& a, int64_t begin, int64_t end) {
  with_types(a.x_type, a.y_type, [&](auto* x, auto* y) {
    backward_typed<std::remove_pointer_t<decltype(x)>, std::remove_pointer_t<decltype(y)>>(a, begin, end);
  });
}

void sum_chunks(const SumChunks& a, int64_t begin, int64_t end) {
  for (int64_t chunk = 0; chunk < a.n_chunks; ++chunk) {
    const float* in = a.chunks + chunk * a.n_cols + begin;
    float* out = a.out + begin;
    for_each_vec(end - begin, [&](int64_t i, auto at, int) FK_INLINE {
      const Vec v = at.load(in + i);
      at.store(out + i, chunk == 0 ? v : at.load(out + i) + v);
    });
  }
}

void widen_weight(const WidenWeight& a) {
  const Vec offset = splat(a.offset);
  with_type(a.type, [&](auto* type) {
    const auto* in = static_cast<decltype(type)>(const_cast<void*>(a.in));
    for_each_vec(a.n, [&](int64_t i, auto at, int) FK_INLINE { at.store(a.out + i, at.load(in + i) + offset); });
  });
  if (a.split) split_in_place(a.out, a.n);
}

}  // namespace FK_ISA
}  // namespace foundry
