// The gradients of RMSNorm of each head and RoPE. Compiled once per instruction set (see isa.h).
#include <algorithm>
#include <vector>

#include "rope_rotate.h"

namespace foundry {
namespace FK_ISA {
namespace {

// `dnormed` is scratch space for one head: the gradient of the norm's result, times the weight.
template <class X, bool kInterleaved, bool kRoundFirst, bool kStream>
void norm_gradients(const QkNormRopeGradients& heads, const QkNormRopeBackward& a, const TableBlock& table,
                    float* dnormed, float* dw, int64_t b, int64_t begin, int64_t end) {
  const int64_t n = a.width;
  for_each_row(heads.x_strides, heads.n_heads, begin, end, [&](int64_t h, int64_t t) FK_INLINE {
    const X* x = static_cast<const X*>(heads.x) + heads.x_strides.offset(b, h, t);
    const X* dy = static_cast<const X*>(heads.dy) + heads.dy_strides.offset(b, h, t);
    const Vec r = splat(heads.rstd[(b * heads.n_heads + h) * a.n_tokens + t]);

    // First pass: rotates the gradient back, adds to dW, and forms the one sum over the head that dX needs.
    Vec products[4] = {};
    rotate<kInterleaved>(
        table.cos(t - begin), table.sin(t - begin), a.tables.half, n,
        [&](int64_t i, auto at) FK_INLINE { return at.load(dy + i); },
        [&](int64_t i, auto at, int k, Vec grad) FK_INLINE {
          const Vec normed = at.load(x + i) * r;
          if (dw) at.store(dw + i, at.load(dw + i) + grad * (kRoundFirst ? rounded<X>(normed) : normed));
          if (heads.weight) grad *= at.load(heads.weight + i);
          products[k] += grad * normed;
          at.store(dnormed + i, grad);
        });
    if (!heads.dx) return;

    X* dx = static_cast<X*>(heads.dx) + heads.dx_strides.offset(b, h, t);
    const Vec mean = splat(sum(products) / static_cast<float>(n));
    for_each_vec(n, [&](int64_t i, auto at, int) FK_INLINE {
      at.template store_to<kStream>(dx + i, r * (at.load(dnormed + i) - at.load(x + i) * r * mean));
    });
  });
}

template <class X>
void backward_typed(const QkNormRopeBackward& a, int64_t chunk_begin, int64_t chunk_end) {
  TableBlock table(a.tables, a.interleaved, true);
  std::vector<float> dnormed(a.width);
  for (int64_t chunk = chunk_begin; chunk < chunk_end; ++chunk) {
    for (const QkNormRopeGradients& heads : a.heads)
      if (heads.dw_chunks) std::fill_n(heads.dw_chunks + chunk * a.width, a.width, 0.0f);
    const int64_t begin = chunk * a.chunk_tokens, end = std::min(a.all_tokens, begin + a.chunk_tokens);
    for_each_block(begin, end, a.n_tokens, table.capacity(), [&](int64_t b, int64_t t_begin, int64_t t_end) {
      table.read(b, t_begin, t_end);
      for (const QkNormRopeGradients& heads : a.heads) {
        float* dw = heads.dw_chunks ? heads.dw_chunks + chunk * a.width : nullptr;
        if (!dw && !heads.dx) continue;
        const auto run = [&](auto interleaved, auto round_first, auto streamed) {
          norm_gradients<X, interleaved.value, round_first.value, streamed.value>(heads, a, table, dnormed.data(), dw,
                                                                                  b, t_begin, t_end);
        };
        with_bools(run, a.interleaved, a.round_before_weight,
                   worth_streaming<X>(heads.dx, heads.n_heads * a.all_tokens, a.width, a.tables.half));
      }
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
