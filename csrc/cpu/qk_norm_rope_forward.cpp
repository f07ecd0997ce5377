// RMSNorm of each head, then RoPE. Compiled once per instruction set (see isa.h).
#include <cmath>

#include "rope_rotate.h"

namespace foundry {
namespace FK_ISA {
namespace {

// Two loops over a few heads. The sum, square root and division of one head take longer than all the rest, and those of
// several heads overlap.
template <class X, bool kInterleaved, bool kRoundFirst>
void norm_heads(const QkNormRopeHeads& heads, const QkNormRopeForward& a, const TableBlock& table, int64_t b,
                int64_t begin, int64_t end, bool streamed) {
  constexpr int64_t kRows = 8;
  const int64_t n = a.width;
  for_each_group(heads.y_strides, heads.n_heads, begin, end, kRows, [&](auto&& rows) FK_INLINE {
    float rstds[kRows], *rstd = rstds;
    rows([&](int64_t h, int64_t t) FK_INLINE {
      const X* x = static_cast<const X*>(heads.x) + heads.x_strides.offset(b, h, t);
      Vec squares[4] = {};
      for_each_vec2<kSplit<X>>(n, [&](int64_t i, auto at, int k) FK_INLINE {
        const Vec2 v = at.load(x + i);
        squares[k] += v.a * v.a;
        squares[k + 1] += v.b * v.b;
      });
      *rstd = 1.0f / std::sqrt(sum(squares) / static_cast<float>(n) + a.eps);
      if (heads.rstd) heads.rstd[(b * heads.n_heads + h) * a.n_tokens + t] = *rstd;
      ++rstd;
    });
    rstd = rstds;
    rows([&](int64_t h, int64_t t) FK_INLINE {
      const X* x = static_cast<const X*>(heads.x) + heads.x_strides.offset(b, h, t);
      X* y = static_cast<X*>(heads.y) + heads.y_strides.offset(b, h, t);
      const Vec r = splat(*rstd++);
      rotate<kInterleaved, kSplit<X>>(
          table.cos(t - begin), table.sin(t - begin), a.tables.half, n,
          [&](int64_t i, auto at) FK_INLINE {
            Vec2 v = at.load(x + i) * r;
            if constexpr (kRoundFirst) v = at.template rounded<X>(v);
            if (heads.weight) v = v * at.load(heads.weight + i);
            return v;
          },
          [&](int64_t i, auto at, int, Vec2 v) FK_INLINE { at.store(y + i, v, streamed); });
    });
  });
}

template <class X>
void forward_typed(const QkNormRopeForward& a, int64_t begin, int64_t end) {
  TableBlock table(a.tables, a.interleaved, false, kSplit<X>);
  const SplitWeights<QkNormRopeHeads> split(a, kSplit<X>);
  for_each_block(begin, end, a.n_tokens, table.capacity(), [&](int64_t b, int64_t t_begin, int64_t t_end) {
    table.read(b, t_begin, t_end);
    for (const QkNormRopeHeads& heads : split.heads) {
      const bool streamed = worth_streaming<X>(heads.y, heads.n_heads * a.all_tokens, a.width, a.tables.half);
      const auto run = [&](auto interleaved, auto round_first) {
        norm_heads<X, interleaved.value, round_first.value>(heads, a, table, b, t_begin, t_end, streamed);
      };
      with_bools(run, a.interleaved, a.round_before_weight);
    }
  });
  stream_fence();
}

}  // namespace

void qk_norm_rope_forward(const QkNormRopeForward& a, int64_t begin, int64_t end) {
  with_type(a.type, [&](auto* x) { forward_typed<std::remove_pointer_t<decltype(x)>>(a, begin, end); });
}

}  // namespace FK_ISA
}  // namespace foundry
