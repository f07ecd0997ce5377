// One token of the gated delta rule: each head's state is read and written once from memory, a panel of columns at a
// time, which stays in a near cache between reading it for the key and updating it.
#include "gated_delta_rule_gates.h"

namespace foundry {
namespace FK_ISA {
namespace {

// Registers of a panel's columns, of which there are two sets. Wide panels read memory in long pieces.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kPanel = 8;
#else
constexpr int kPanel = 4;
#endif

// kVecs registers of columns; `at` reads and writes the last of them. With kChannels, `decays` has the decay of each
// row, and otherwise that of all.
template <int kVecs, bool kChannels, class Access>
inline void panel(float* state, int64_t ld, int64_t rows, const float* q, const float* k, const float* v,
                  const float* decays, float beta, float* out, Access at) {
  const float decay = kChannels ? 1.0f : *decays;
  constexpr int kLast = kVecs - 1;
  const auto load = [&](const float* p, int i) FK_INLINE {
    return i < kLast ? Whole::load(p + i * kLanes) : at.load(p + i * kLanes);
  };
  Vec known[kVecs], read[kVecs];
#pragma GCC unroll 8
  for (int i = 0; i < kVecs; ++i) known[i] = read[i] = Vec{};
  for (int64_t r = 0; r < rows; ++r) {
    const Vec key = splat(kChannels ? k[r] * decays[r] : k[r]);
#pragma GCC unroll 8
    for (int i = 0; i < kVecs; ++i) known[i] += load(state + r * ld, i) * key;
  }
#pragma GCC unroll 8
  for (int i = 0; i < kVecs; ++i) known[i] = (load(v, i) - known[i] * decay) * beta;
  for (int64_t r = 0; r < rows; ++r) {
    float* row = state + r * ld;
    // In registers: as far as the compiler knows, each store might change k and q, and it would read them again.
    const Vec key = splat(k[r]), query = splat(q[r]), by = splat(kChannels ? decays[r] : decay);
#pragma GCC unroll 8
    for (int i = 0; i < kVecs; ++i) {
      const Vec now = load(row, i) * by + known[i] * key;
      read[i] += now * query;
      if (i < kLast) Whole::store(row + i * kLanes, now);
      else at.store(row + i * kLanes, now);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kVecs; ++i) Whole::store(out + i * kLanes, read[i]);
}

}  // namespace

void gated_delta_rule_step(const DeltaRuleStep& a, int64_t begin, int64_t end, float* scratch) {
  const int64_t dk = a.key_width, dv = a.value_width, ldk = round_up(dk, kAttentionPad);
  float *q = scratch, *k = q + ldk, *decays = k + ldk, *v = decays + ldk, *out = v + round_up(dv, kDeltaRuleColumns);
  int64_t read = -1;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t b = i / a.n_heads, h = i % a.n_heads, shared = i / a.group;
    if (shared != read) {
      read = shared;
      read_rows(a.type, a.q, offset_of(a.q_strides, b, h / a.group, 0), 0, 1, dk, q, 1, ldk);
      read_rows(a.type, a.k, offset_of(a.k_strides, b, h / a.group, 0), 0, 1, dk, k, 1, ldk);
      if (a.l2norm) l2_normalize(q, dk), l2_normalize(k, dk);
      scale_row(q, dk, a.scale);
    }
    read_rows(a.type, a.v, offset_of(a.v_strides, b, h, 0), 0, 1, dv, v, 1, round_up(dv, kAttentionPad));
    const DeltaRuleGate gate(a.gates, h, a.g.channels ? dk : 1);
    const int64_t of_g = offset_of(a.g.strides, b, h, 0);
    if (a.g.channels) {
      read_rows(a.g.type, a.g.data, of_g, 0, 1, dk, decays, 1, ldk);
      if (gate.of_g()) gate.open_row(decays, dk);
      for (int64_t d = 0; d < ldk; d += kLanes)
        Whole::store(decays + d, exp(smaller(splat(88.7f), Whole::load(decays + d))));
    } else {
      const float g = a.g.data ? read_number(a.g, of_g) : 0.0f;
      decays[0] = std::exp(gate.of_g() ? gate.g(g) : g);
    }
    float beta = a.beta.data ? read_number(a.beta, offset_of(a.beta.strides, b, h, 0)) : 1.0f;
    if (gate.of_beta()) beta = gate.beta(beta);
    float* state = a.state + b * a.state_batch + h * a.state_head;
    int64_t c = 0;
    const auto panels = [&](auto vecs, auto at, int64_t columns) FK_INLINE {
      for (; c + columns <= dv; c += columns)
        if (a.g.channels) panel<decltype(vecs)::value, true>(state + c, dv, dk, q, k, v + c, decays, beta, out + c, at);
        else panel<decltype(vecs)::value, false>(state + c, dv, dk, q, k, v + c, decays, beta, out + c, at);
    };
    panels(std::integral_constant<int, kPanel>{}, Whole{}, kPanel * kLanes);
    panels(std::integral_constant<int, kPanel / 2>{}, Whole{}, kPanel / 2 * kLanes);  // a head of 64, with 16 lanes
    panels(std::integral_constant<int, 1>{}, Whole{}, kLanes);
    if (c < dv) panels(std::integral_constant<int, 1>{}, Part{int(dv - c)}, dv - c);
    write_rows(a.type, out, 0, 1, dv, a.out, i * dv, 0);
  }
}

}  // namespace FK_ISA
}  // namespace foundry
