// Compiled once per instruction set (see isa.h).
#include "bias_gelu.h"

#include <algorithm>

#include "activation.h"
#include "dropout.h"
#include "vec2.h"

namespace foundry {
namespace FK_ISA {

namespace {

template <class X, class Gate, class Drop>
void forward_tiles(const BiasActForward& a, Drop& drop, int64_t begin, int64_t end, bool streamed) {
  for_each_tile(a.n_cols, begin, end, [&](int64_t row, int64_t col, int64_t columns) FK_INLINE {
    drop.template each_part<kSplit<X>>(row, col, columns, [&](int64_t first, int64_t n) FK_INLINE {
      const X* x = static_cast<const X*>(a.x) + a.x_strides.offset(a.rows, row) + col + first;
      X* y = static_cast<X*>(a.y) + row * a.n_cols + col + first;
      for_each_vec2_alone<kSplit<X>>(n, [&](int64_t i, auto at) FK_INLINE {
        Vec2 z = at.load(x + i);
        if (a.bias) z = z + at.load(a.bias + col + first + i);
        at.store(y + i, drop.times(Vec2{Gate::value(z.a), Gate::value(z.b)}, at, i), streamed);
      });
    });
  });
}

template <class X, class Gate, class Drop>
void backward_chunks(const BiasActBackward& a, Drop& drop, int64_t chunk_begin, int64_t chunk_end, bool streamed) {
  const int64_t n_cols = a.n_cols, n_rows = a.rows.count();
  for (int64_t chunk = chunk_begin; chunk < chunk_end; ++chunk) {
    float* dbias = a.dbias_chunks ? a.dbias_chunks + chunk * n_cols : nullptr;
    if (dbias) std::fill(dbias, dbias + n_cols, 0.0f);
    const int64_t end = std::min(n_rows, (chunk + 1) * a.chunk_rows);
    for (int64_t row = chunk * a.chunk_rows; row < end; ++row) {
      const X* dy = static_cast<const X*>(a.dy) + a.dy_strides.offset(a.rows, row);
      const X* x = static_cast<const X*>(a.x) + a.x_strides.offset(a.rows, row);
      X* dx = a.dx ? static_cast<X*>(a.dx) + row * n_cols : nullptr;
      drop.template each_part<kSplit<X>>(row, 0, n_cols, [&](int64_t first, int64_t n) FK_INLINE {
        for_each_vec2_alone<kSplit<X>>(n, [&](int64_t i, auto at) FK_INLINE {
          const int64_t col = first + i;
          Vec2 z = at.load(x + col);
          if (a.bias) z = z + at.load(a.bias + col);
          const Vec2 d = drop.times(at.load(dy + col), at, i);
          const Vec2 dz{Gate::times_slope(d.a, Gate::both(z.a).slope), Gate::times_slope(d.b, Gate::both(z.b).slope)};
          if (dx) at.store(dx + col, dz, streamed);
          if (dbias) at.store(dbias + col, at.load(dbias + col) + dz);
        });
      });
    }
    if (kSplit<X> && dbias) put_in_order(dbias, n_cols);
  }
}

}  // namespace

void bias_act_forward(const BiasActForward& a, int64_t begin, int64_t end) {
  with_kinds(a.type, a.activation, [&](auto* x, auto gate) {
    using X = std::remove_pointer_t<decltype(x)>;
    const bool large = worth_streaming(static_cast<const X*>(a.y), a.rows, a.n_cols);
    with_dropout(a.dropout, large,
                 [&](auto& drop, bool streamed) { forward_tiles<X, decltype(gate)>(a, drop, begin, end, streamed); });
  });
}

void bias_act_backward(const BiasActBackward& a, int64_t begin, int64_t end) {
  with_kinds(a.type, a.activation, [&](auto* x, auto gate) {
    using X = std::remove_pointer_t<decltype(x)>;
    const bool large = worth_streaming(static_cast<const X*>(a.dx), a.rows, a.n_cols);
    with_dropout(a.dropout, large,
                 [&](auto& drop, bool streamed) { backward_chunks<X, decltype(gate)>(a, drop, begin, end, streamed); });
  });
}

}  // namespace FK_ISA
}  // namespace foundry
