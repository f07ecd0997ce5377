// The gradients of RMSNorm of each head and RoPE. Compiled once per instruction set (see isa.h).
#include <algorithm>
#include <vector>

#include "rope_rotate.h"

namespace foundry {
namespace FK_ISA {
namespace {

// `dnormed` is scratch for one head: the gradient of the norm's result times the weight.
template <class X, bool kInterleaved, bool kRoundFirst>
void norm_gradients(const QkNormRopeGradients& heads, const QkNormRopeBackward& a, const TableBlock& table,
                    float* dnormed, float* dw, int64_t b, int64_t begin, int64_t end, bool streamed) {
  const int64_t n = a.width;
  for_each_row(heads.x_strides, heads.n_heads, begin, end, [&](int64_t h, int64_t t) FK_INLINE {
    const X* x = static_cast<const X*>(heads.x) + heads.x_strides.offset(b, h, t);
    const X* dy = static_cast<const X*>(heads.dy) + heads.dy_strides.offset(b, h, t);
    const Vec r = splat(heads.rstd[(b * heads.n_heads + h) * a.n_tokens + t]);

    // First pass: rotates the gradient back, adds to dW, and computes the sum over the head that dX needs.
    Vec products[4] = {};
    rotate<kInterleaved, kSplit<X>>(
        table.cos(t - begin), table.sin(t - begin), a.tables.half, n,
        [&](int64_t i, auto at) FK_INLINE { return at.load(dy + i); },
        [&](int64_t i, auto at, int k, Vec2 grad) FK_INLINE {
          const Vec2 normed = at.load(x + i) * r;
          if (dw) at.store(dw + i, at.load(dw + i) + grad * (kRoundFirst ? at.template rounded<X>(normed) : normed));
          if (heads.weight) grad = grad * at.load(heads.weight + i);
          products[k] += grad.a * normed.a;
          products[k + 1] += grad.b * normed.b;
          at.store(dnormed + i, grad);
        });
    if (!heads.dx) return;

    X* dx = static_cast<X*>(heads.dx) + heads.dx_strides.offset(b, h, t);
    const Vec mean = splat(sum(products) / static_cast<float>(n));
    for_each_part(kInterleaved, a.tables.half, n, [&](int64_t part, int64_t count) FK_INLINE {
      for_each_vec2<kSplit<X>>(count, [&](int64_t i, auto at, int) FK_INLINE {
        const Vec2 normed = at.load(x + part + i) * r;
        at.store(dx + part + i, (at.load(dnormed + part + i) - normed * mean) * r, streamed);
      });
    });
  });
}

template <class X>
void backward_typed(const QkNormRopeBackward& a, int64_t chunk_begin, int64_t chunk_end) {
  TableBlock table(a.tables, a.interleaved, true, kSplit<X>);
  const SplitWeights<QkNormRopeGradients> split(a, kSplit<X>);
  std::vector<float> dnormed(a.width);
  for (int64_t chunk = chunk_begin; chunk < chunk_end; ++chunk) {
    for (const QkNormRopeGradients& heads : a.heads)
      if (heads.dw_chunks) std::fill_n(heads.dw_chunks + chunk * a.width, a.width, 0.0f);
    const int64_t begin = chunk * a.chunk_tokens, end = std::min(a.all_tokens, begin + a.chunk_tokens);
    for_each_block(begin, end, a.n_tokens, table.capacity(), [&](int64_t b, int64_t t_begin, int64_t t_end) {
      table.read(b, t_begin, t_end);
      for (const QkNormRopeGradients& heads : split.heads) {
        float* dw = heads.dw_chunks ? heads.dw_chunks + chunk * a.width : nullptr;
        if (!dw && !heads.dx) continue;
        const bool streamed = worth_streaming<X>(heads.dx, heads.n_heads * a.all_tokens, a.width, a.tables.half);
        const auto run = [&](auto interleaved, auto round_first) {
          norm_gradients<X, interleaved.value, round_first.value>(heads, a, table, dnormed.data(), dw, b, t_begin,
                                                                  t_end, streamed);
        };
        with_bools(run, a.interleaved, a.round_before_weight);
      }
    });
    for (const QkNormRopeGradients& heads : a.heads)
      if (kSplit<X> && heads.dw_chunks)
        for_each_part(a.interleaved, a.tables.half, a.width, [&](int64_t part, int64_t count) {
          put_in_order(heads.dw_chunks + chunk * a.width + part, count);
        });
  }
  stream_fence();
}

}  // namespace

void qk_norm_rope_backward(const QkNormRopeBackward& a, int64_t begin, int64_t end) {
  with_type(a.type, [&](auto* x) { backward_typed<std::remove_pointer_t<decltype(x)>>(a, begin, end); });
}

}  // namespace FK_ISA
}  // namespace foundry
