// Compiled once per instruction set (see isa.h).
#include "log_probs.h"

#include <algorithm>
#include <cmath>

#include "dispatch.h"
#include "logits.h"

namespace foundry {
namespace FK_ISA {

namespace {

template <class X, bool kCap, bool kEntropy, bool kStats>
void forward_rows(const LogProbsForward& a, int64_t begin, int64_t end) {
  const LogProbsOptions& o = a.options;
  const Cap<kCap> cap(o.softcap);
  for (int64_t row = begin; row < end; ++row) {
    const int64_t target = a.target[row];
    float log_prob = 0.0f, entropy = 0.0f, lse = 0.0f, low = 0.0f, stats[3] = {};
    if (target != o.ignore_index) {
      const X* x = static_cast<const X*>(a.logits) + a.logits_strides.offset(a.rows, row);
      const float uncapped = load_one(x + target) * o.logit_scale, picked = cap(uncapped);
      ExpSums<X, kCap, kEntropy, kStats> sums{x, splat(o.logit_scale), cap, picked};
      sums.add(0, target);
      const float before = sums.others;
      sums.add(target + 1, a.n_cols);
      const float rest = sum(sums.exps), max = sums.max;
      const bool first = max == picked;
      const float own = first ? 1.0f : std::exp(picked - max);
      const float log_sum = first ? std::log1p(rest) : std::log(rest + own);
      const float whole = max + log_sum, part = whole - max;
      low = (max - (whole - part)) + (log_sum - part);  // the rounding error of the sum
      lse = max == kInfinity ? max : whole;             // if the maximum is infinite, the sum is NaN
      log_prob = (picked - max) - log_sum;
      if constexpr (kEntropy) {
        const float products = sum(sums.products) + (first || own == 0.0f ? 0.0f : own * (picked - max));
        entropy = log_sum - products / (rest + own);  // neither term is negative
      }
      if constexpr (kStats) {
        const bool top1 = uncapped > before && uncapped >= sums.others;
        stats[0] = top1 && !std::isnan(log_prob) ? 1.0f : 0.0f;
        stats[1] = (sum(sums.totals) + picked) / float(a.n_cols);
        stats[2] = std::log(sum(sums.squares) + own * own) - 2.0f * log_sum;
      }
    }
    a.log_probs[row] = log_prob;
    if (a.entropy) a.entropy[row] = entropy;
    if (a.lse) a.lse[row] = lse;
    if (a.lse_low) a.lse_low[row] = low;
    if constexpr (kStats) std::copy_n(stats, 3, a.stats + 3 * row);
  }
}

template <class X, bool kCap, bool kEntropy>
void backward_rows(const LogProbsBackward& a, int64_t begin, int64_t end, bool streamed) {
  const LogProbsOptions& o = a.options;
  const Cap<kCap> cap(o.softcap);
  const int64_t n = a.n_cols;
  const Vec logit_scale = splat(o.logit_scale);
  for (int64_t row = begin; row < end; ++row) {
    const int64_t target = a.target[row];
    X* dx = static_cast<X*>(a.dlogits) + row * n;
    const bool counts = target != o.ignore_index;
    const float g = counts ? a.g[row] : 0.0f, c = counts && a.c ? a.c[row] : 0.0f;
    const float b = counts && kEntropy ? a.b[row] : 0.0f;
    if (g == 0.0f && c == 0.0f && b == 0.0f) {
      write_row(dx, n, streamed, [](int64_t, auto) FK_INLINE { return Vec{}; });
      continue;
    }
    const X* x = static_cast<const X*>(a.logits) + a.logits_strides.offset(a.rows, row);
    const float lse = a.lse[row], low = a.lse_low[row];
    const int64_t column = target - a.first;
    const bool here = column >= 0 && column < n;
    const float picked = here ? cap(load_one(x + column) * o.logit_scale) : 0.0f;  // before the write: dx may be x
    const Vec share = splat(o.logit_scale * (c - g)), by_distance = splat(o.logit_scale * b);
    const Vec shift = splat(lse), shift_low = splat(low);
    write_row(dx, n, streamed, [&](int64_t i, auto at) FK_INLINE {
      __builtin_prefetch(x + i + kBlock);
      const Vec y = cap(at.load(x + i) * logit_scale), below = (y - shift) - shift_low;
      Vec p;
      if constexpr (sizeof(X) == 2) p = exp2<true>(below * kLog2E);
      else p = exp(below);
      Vec v;
      if constexpr (kEntropy) v = p * (share + by_distance * not_farther(below));
      else v = p * share;
      if constexpr (kCap) v *= cap.slope(y);
      return v;
    });
    if (!here) continue;
    const float nll = (lse - picked) + low, p = std::exp(-nll);
    float at_target = p * c - g * std::expm1(-nll);
    if constexpr (kEntropy) at_target -= b * (p == 0.0f ? 0.0f : p * nll);
    at_target *= o.logit_scale;
    if constexpr (kCap) at_target *= cap.slope(picked);
    Part{1}.store(dx + column, splat(at_target));
  }
  if (streamed) stream_fence();
}

}  // namespace

void log_probs_forward(const LogProbsForward& a, int64_t begin, int64_t end) {
  with_type(a.type, [&](auto* x) {
    using X = std::remove_pointer_t<decltype(x)>;
    with_bools(
        [&](auto cap, auto entropy, auto stats) {
          forward_rows<X, cap.value, entropy.value || stats.value, stats.value>(a, begin, end);
        },
        a.options.softcap > 0.0f, a.entropy != nullptr, a.stats != nullptr);
  });
}

void log_probs_backward(const LogProbsBackward& a, int64_t begin, int64_t end) {
  with_type(a.type, [&](auto* x) {
    using X = std::remove_pointer_t<decltype(x)>;
    const bool streamed = a.rows.count() * a.n_cols * int64_t(sizeof(X)) > kStreamBytes;
    with_bools([&](auto cap, auto entropy) { backward_rows<X, cap.value, entropy.value>(a, begin, end, streamed); },
               a.options.softcap > 0.0f, a.b != nullptr);
  });
}

}  // namespace FK_ISA
}  // namespace foundry
