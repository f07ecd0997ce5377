// Compiled once per instruction set (see isa.h).
#include "combine_experts.h"

#include "dispatch.h"
#include "vec2.h"

namespace foundry {
namespace FK_ISA {

namespace {

template <class X>
constexpr bool kSplit = std::is_same_v<X, BFloat16>;

// The weight in every lane. Replaces NaN by the default NaN, which rounded_up needs.
inline Vec spread(float weight) { return splat(weight == weight ? weight : __builtin_nanf("")); }

template <class X, bool kWeighted>
void forward_tokens(const CombineExpertsForward& a, int64_t begin, int64_t end, bool streamed) {
  const X* x = static_cast<const X*>(a.x);
  for (int64_t token = begin; token < end; ++token) {
    const int64_t* slots = a.slots + token * a.k;
    const float* weights = kWeighted ? a.weights + token * a.k : nullptr;
    X* y = static_cast<X*>(a.y) + token * a.n_cols;
    for_each_vec2<kSplit<X>>(a.n_cols, [&](int64_t i, auto at, int) FK_INLINE {
      Vec2 sum{};
      for (int64_t j = 0; j < a.k; ++j) {
        if (slots[j] < 0) continue;
        const Vec2 row = at.load(x + slots[j] * a.x_stride + i);
        if constexpr (kWeighted) sum = sum + row * spread(weights[j]);
        else sum = sum + row;
      }
      at.store(y + i, sum, streamed);
    });
  }
}

template <class X, bool kDx, bool kDweights>
void backward_slots(const CombineExpertsBackward& a, int64_t begin, int64_t end, bool streamed) {
  for (int64_t slot = begin; slot < end; ++slot) {
    const int64_t row = a.slots[slot];
    if (row < 0) {
      if constexpr (kDweights) a.dweights[slot] = 0.0f;
      continue;
    }
    const X* dy = static_cast<const X*>(a.dy) + slot / a.k * a.dy_stride;
    const X* x = kDweights ? static_cast<const X*>(a.x) + row * a.x_stride : nullptr;
    X* dx = kDx ? static_cast<X*>(a.dx) + row * a.n_cols : nullptr;
    const Vec weight = spread(a.weights ? a.weights[slot] : 1.0f);
    Vec sums[4] = {};
    for_each_vec2<kSplit<X>>(a.n_cols, [&](int64_t i, auto at, int k) FK_INLINE {
      const Vec2 d = at.load(dy + i);
      if constexpr (kDx) at.store(dx + i, d * weight, streamed);
      if constexpr (kDweights) {
        const Vec2 products = at.load(x + i) * d;
        sums[k] += products.a;
        sums[k + 1] += products.b;
      }
    });
    if constexpr (kDweights) a.dweights[slot] = sum(sums);
  }
}

}  // namespace

void combine_experts_forward(const CombineExpertsForward& a, int64_t begin, int64_t end) {
  with_type(a.type, [&](auto* type) {
    using X = std::remove_pointer_t<decltype(type)>;
    const bool streamed = worth_streaming(static_cast<const X*>(a.y), Rows{{1, 1, a.n_tokens}}, a.n_cols);
    a.weights ? forward_tokens<X, true>(a, begin, end, streamed) : forward_tokens<X, false>(a, begin, end, streamed);
    if (streamed) stream_fence();
  });
}

void combine_experts_backward(const CombineExpertsBackward& a, int64_t begin, int64_t end) {
  with_type(a.type, [&](auto* type) {
    using X = std::remove_pointer_t<decltype(type)>;
    const bool streamed = worth_streaming(static_cast<const X*>(a.dx), Rows{{1, 1, a.n_rows}}, a.n_cols);
    const auto run = [&](auto dx, auto dweights) {
      backward_slots<X, dx.value, dweights.value>(a, begin, end, streamed);
    };
    with_bools(run, a.dx != nullptr, a.dweights != nullptr);
    if (streamed) stream_fence();
  });
}

}  // namespace FK_ISA
}  // namespace foundry
