// RoPE. Compiled once per instruction set (see isa.h).
#include "rope_rotate.h"

namespace foundry {
namespace FK_ISA {
namespace {

template <class X, bool kInterleaved>
void rope_heads(const RopeHeads& heads, const Rope& a, const TableBlock& table, int64_t b, int64_t begin, int64_t end,
                bool streamed) {
  for_each_row(heads.y_strides, heads.n_heads, begin, end, [&](int64_t h, int64_t t) FK_INLINE {
    const X* x = static_cast<const X*>(heads.x) + heads.x_strides.offset(b, h, t);
    X* y = static_cast<X*>(heads.y) + heads.y_strides.offset(b, h, t);
    rotate<kInterleaved, kSplit<X>>(
        table.cos(t - begin), table.sin(t - begin), a.tables.half, a.width,
        [&](int64_t i, auto at) FK_INLINE { return at.load(x + i); },
        [&](int64_t i, auto at, int, Vec2 v) FK_INLINE { at.store(y + i, v, streamed); });
  });
}

template <class X>
void rope_typed(const Rope& a, int64_t begin, int64_t end) {
  TableBlock table(a.tables, a.interleaved, a.inverse, kSplit<X>);
  for_each_block(begin, end, a.n_tokens, table.capacity(), [&](int64_t b, int64_t t_begin, int64_t t_end) {
    table.read(b, t_begin, t_end);
    for (const RopeHeads& heads : a.heads) {
      const bool streamed = worth_streaming<X>(heads.y, heads.n_heads * a.all_tokens, a.width, a.tables.half);
      a.interleaved ? rope_heads<X, true>(heads, a, table, b, t_begin, t_end, streamed)
                    : rope_heads<X, false>(heads, a, table, b, t_begin, t_end, streamed);
    }
  });
  stream_fence();
}

}  // namespace

void rope(const Rope& a, int64_t begin, int64_t end) {
  with_type(a.type, [&](auto* x) { rope_typed<std::remove_pointer_t<decltype(x)>>(a, begin, end); });
}

}  // namespace FK_ISA
}  // namespace foundry
