// The gates of the gated delta rule: the decay's logarithm and the step size from what is before them.
#pragma once

#include "gated_delta_rule_rows.h"
#include "math.h"

namespace foundry {
namespace FK_ISA {

inline Vec magnitude(Vec x) { return larger(x, -x); }

// 1 / (1 + e^-x)
inline Vec logistic(Vec x) { return 1.0f / logistic_denominator(x); }

// log(1 + e^x) = max(x, 0) + log(1 + t), t = e^-|x|, and log(1 + t) = 2 artanh(s), s = t / (2 + t) <= 1/3.
inline Vec softplus(Vec x) {
  const Vec t = exp(-magnitude(x)), s = t / (2.0f + t), s2 = s * s;
  Vec p = splat(1.0f / 17);
  p = p * s2 + 1.0f / 15;
  p = p * s2 + 1.0f / 13;
  p = p * s2 + 1.0f / 11;
  p = p * s2 + 1.0f / 9;
  p = p * s2 + 1.0f / 7;
  p = p * s2 + 1.0f / 5;
  p = p * s2 + 1.0f / 3;
  p = p * s2 + 1.0f;
  return larger(splat(0.0f), x) + 2.0f * s * p;
}

// A head's gates.
struct DeltaRuleGate {
  const DeltaRuleGates& in;
  float rate = 1.0f;            // e^A_log
  const float* bias = nullptr;  // of a token: one number, or one for each dimension of a key; or null

  DeltaRuleGate(const DeltaRuleGates& gates, int64_t head, int64_t channels) : in(gates) {
    if (gates.decay_log) rate = std::exp(gates.decay_log[head]);
    if (gates.dt_bias) bias = gates.dt_bias + head * channels;
  }

  bool of_g() const { return in.decay_log; }
  bool of_beta() const { return in.beta_limit != 0.0f; }

  Vec biased(Vec x, int64_t at) const { return bias ? x + Whole::load(bias + at) : x; }

  float g(float x) const { return -rate * softplus(splat(bias ? x + *bias : x))[0]; }
  float beta(float x) const { return in.beta_limit * logistic(splat(x))[0]; }

  // Replaces a row, whose padding has a bias of 0, by the logarithms.
  void open_row(float* x, int64_t width) const {
    for_each_vec(width, [&](int64_t i, auto at, int) FK_INLINE {
      const Vec v = at.load(x + i), with = bias ? v + at.load(bias + i) : v;
      at.store(x + i, softplus(with) * -rate);
    });
  }

  // Replaces the gradients of a token's logarithms by those of the inputs x; adds to those of A_log and of the bias.
  void close_row(float* dg, const float* x, int64_t width, double& drate, double* dbias) const {
    double along = 0.0;
    for_each_vec(width, [&](int64_t i, auto at, int) FK_INLINE {
      const Vec v = at.load(x + i), with = bias ? v + at.load(bias + i) : v, d = at.load(dg + i);
      const Vec through = d * softplus(with) * -rate, before = d * logistic(with) * -rate;
      at.store(dg + i, before);
      for (int lane = 0; lane < kLanes && i + lane < width; ++lane) {
        along += through[lane];
        if (dbias) dbias[i + lane] += before[lane];
      }
    });
    drate += along;
  }

  float close_beta(float dbeta, float x) const {
    return dbeta * in.beta_limit * logistic(splat(x))[0] * logistic(splat(-x))[0];
  }
};

}  // namespace FK_ISA
}  // namespace foundry
