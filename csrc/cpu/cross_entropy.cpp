// Compiled once per instruction set (see isa.h).
#include "cross_entropy.h"

#include <algorithm>
#include <cmath>

#include "dispatch.h"
#include "logits.h"
#include "multiply_add.h"

namespace foundry {
namespace FK_ISA {

namespace {

// The maximum m of a row's logits and, over all classes but the target, the sum of exp(y - m). With label smoothing
// also the sum of w (y - center). The caller starts with the target's logit as the maximum.
template <class X, bool kCap, bool kSmooth>
struct LogitSums {
  const X* x;
  const float* weight;
  Cap<kCap> cap;
  float max, center;
  Vec exps[4] = {}, offsets[4] = {};

  void add(int64_t begin, int64_t end) {
    for (int64_t col = begin; col < end; col += kBlock) add_block(col, std::min(kBlock, end - col));
  }

  void add_block(int64_t first, int64_t count) {
    const X* in = x + first;
    const float* w = kSmooth && weight ? weight + first : nullptr;
    Vec top[4] = {splat(-kInfinity), splat(-kInfinity), splat(-kInfinity), splat(-kInfinity)};
    for_each_vec(count, [&](int64_t i, auto at, int k) FK_INLINE {
      const Vec v = masked(at, at.load(in + i), -kInfinity);
      top[k] = larger(v, top[k]);  // never NaN: that would hide larger values
    });
    const float found = cap(largest(top));
    if (found > max) {
      const Vec scale = splat(std::exp(max - found));
      for (Vec& v : exps) v *= scale;
      max = found;
    }
    const Vec shift = splat(max == -kInfinity ? 0.0f : max), middle = splat(center);
    for_each_vec(count, [&](int64_t i, auto at, int k) FK_INLINE {
      __builtin_prefetch(in + i + kBlock);
      const Vec y = cap(at.load(in + i));
      exps[k] += exp(masked(at, y - shift, -kInfinity));
      if constexpr (kSmooth) offsets[k] += masked(at, w ? at.load(w + i) * (y - middle) : y - middle, 0.0f);
    });
  }
};

template <class X, bool kCap, bool kSmooth>
void forward_rows(const CrossEntropyForward& a, int64_t begin, int64_t end) {
  const CrossEntropyOptions& o = a.options;
  const Cap<kCap> cap(o.softcap);
  const float total = a.weight_sum ? *a.weight_sum : static_cast<float>(a.n_cols);
  for (int64_t row = begin; row < end; ++row) {
    const int64_t target = a.target[row];
    float loss = 0.0f, lse = 0.0f, low = 0.0f, z = 0.0f;
    if (target != o.ignore_index) {
      const X* x = static_cast<const X*>(a.logits) + a.logits_strides.offset(a.rows, row);
      const float picked = cap(load_one(x + target)), weight = a.weight ? a.weight[target] : 1.0f;
      const float center = std::isfinite(picked) ? picked : 0.0f;
      LogitSums<X, kCap, kSmooth> sums{x, a.weight, cap, picked, center};
      sums.add(0, target);
      sums.add(target + 1, a.n_cols);
      const float rest = sum(sums.exps), max = sums.max;
      const float log_sum = max == picked ? std::log1p(rest) : std::log(rest + std::exp(picked - max));
      const float whole = max + log_sum, part = whole - max;
      low = (max - (whole - part)) + (log_sum - part);  // the rounding error of the sum
      lse = max == kInfinity ? max : whole;             // if the maximum is infinite, the sum is NaN
      z = o.z_loss * weight * lse * lse;
      loss = weight * (1.0f - o.label_smoothing) * ((max - picked) + log_sum) + z;
      if constexpr (kSmooth) {
        const float offset = sum(sums.offsets) + weight * (picked - center);
        loss += o.label_smoothing / static_cast<float>(a.n_cols) * (total * ((max - center) + log_sum) - offset);
      }
    }
    a.loss[row] = loss;
    if (a.lse) a.lse[row] = lse;
    if (a.lse_low) a.lse_low[row] = low;
    if (a.z_loss) a.z_loss[row] = z;
  }
}

template <class X, bool kCap, bool kSmooth>
void backward_rows(const CrossEntropyBackward& a, int64_t begin, int64_t end, bool streamed) {
  const CrossEntropyOptions& o = a.options;
  const Cap<kCap> cap(o.softcap);
  const int64_t n = a.n_cols;
  const float total = a.weight_sum ? *a.weight_sum : static_cast<float>(a.n_classes);
  const float each = kSmooth ? o.label_smoothing / static_cast<float>(a.n_classes) : 0.0f;
  const float* weights = a.weight ? a.weight + a.first : nullptr;
  const float divisor = a.total_weight ? *a.total_weight : 1.0f;
  for (int64_t row = begin; row < end; ++row) {
    const int64_t target = a.target[row];
    X* dx = static_cast<X*>(a.dlogits) + row * n;
    const bool counts = target != o.ignore_index && divisor != 0.0f;
    const float dloss = counts ? a.dloss[a.dloss_a_row ? row : 0] / divisor : 0.0f;
    const auto write = [&](auto&& value) FK_INLINE { write_row(dx, n, streamed, value); };
    if (dloss == 0.0f) {
      write([](int64_t, auto) FK_INLINE { return Vec{}; });
      continue;
    }
    const X* x = static_cast<const X*>(a.logits) + a.logits_strides.offset(a.rows, row);
    const float weight = a.weight ? a.weight[target] : 1.0f, lse = a.lse[row], low = a.lse_low[row];
    const int64_t column = target - a.first;
    const bool here = column >= 0 && column < n;
    const float picked = here ? cap(load_one(x + column)) : 0.0f;  // read before the write: dx may be x
    const float from_z = 2.0f * o.z_loss * weight * lse, hard = weight * (1.0f - o.label_smoothing);
    const Vec share = splat(dloss * (hard + each * total + from_z)), less = splat(dloss * each);
    const Vec shift = splat(lse), shift_low = splat(low);
    write([&](int64_t i, auto at) FK_INLINE {
      __builtin_prefetch(x + i + kBlock);
      const Vec y = cap(at.load(x + i)), below = (y - shift) - shift_low;
      Vec v;
      if constexpr (sizeof(X) == 2) v = share * exp2<true>(below * kLog2E);
      else v = share * exp(below);
      if constexpr (kSmooth) v = weights ? multiply_add(-less, at.load(weights + i), v) : v - less;
      if constexpr (kCap) v *= cap.slope(y);
      return v;
    });
    if (!here) continue;
    const float nll = (lse - picked) + low, p = std::exp(-nll);
    float at_target = dloss * (hard * std::expm1(-nll) + each * (total * p - weight) + from_z * p);
    if constexpr (kCap) at_target *= cap.slope(picked);
    Part{1}.store(dx + column, splat(at_target));
  }
  if (streamed) stream_fence();
}

}  // namespace

void cross_entropy_forward(const CrossEntropyForward& a, int64_t begin, int64_t end) {
  with_type(a.type, [&](auto* x) {
    using X = std::remove_pointer_t<decltype(x)>;
    with_bools([&](auto cap, auto smooth) { forward_rows<X, cap.value, smooth.value>(a, begin, end); },
               a.options.softcap > 0.0f, a.options.label_smoothing > 0.0f);
  });
}

void cross_entropy_backward(const CrossEntropyBackward& a, int64_t begin, int64_t end) {
  with_type(a.type, [&](auto* x) {
    using X = std::remove_pointer_t<decltype(x)>;
    const bool streamed = a.rows.count() * a.n_cols * int64_t(sizeof(X)) > kStreamBytes;
    with_bools([&](auto cap, auto smooth) { backward_rows<X, cap.value, smooth.value>(a, begin, end, streamed); },
               a.options.softcap > 0.0f, a.options.label_smoothing > 0.0f);
  });
}

}  // namespace FK_ISA
}  // namespace foundry
