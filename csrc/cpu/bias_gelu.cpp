// Compiled once per instruction set (see isa.h).
#include "bias_gelu.h"

#include <algorithm>

#include "activation.h"
#include "vec2.h"

namespace foundry {
namespace FK_ISA {

namespace {

template <class X, class Gate, bool kBias, bool kStream>
void forward_tiles(const BiasGeluForward& a, int64_t begin, int64_t end) {
  for_each_tile(a.n_cols, begin, end, [&](int64_t row, int64_t col, int64_t columns) FK_INLINE {
    const X* x = static_cast<const X*>(a.x) + a.x_strides.offset(a.rows, row) + col;
    X* y = static_cast<X*>(a.y) + row * a.n_cols + col;
    for_each_vec2<kSplit<X>>(columns, [&](int64_t i, auto at, int) FK_INLINE {
      Vec2 z = at.load(x + i);
      if constexpr (kBias) z = z + at.load(a.bias + col + i);
      at.template store<kStream>(y + i, Vec2{Gate::value(z.a), Gate::value(z.b)});
    });
  });
}

template <class X, class Gate, bool kBias, bool kStream>
void backward_chunks(const BiasGeluBackward& a, int64_t chunk_begin, int64_t chunk_end) {
  const int64_t n = a.n_cols, n_rows = a.rows.count();
  for (int64_t chunk = chunk_begin; chunk < chunk_end; ++chunk) {
    float* dbias = a.dbias_chunks ? a.dbias_chunks + chunk * n : nullptr;
    if (dbias) std::fill(dbias, dbias + n, 0.0f);
    const int64_t end = std::min(n_rows, (chunk + 1) * a.chunk_rows);
    for (int64_t row = chunk * a.chunk_rows; row < end; ++row) {
      const X* dy = static_cast<const X*>(a.dy) + a.dy_strides.offset(a.rows, row);
      const X* x = static_cast<const X*>(a.x) + a.x_strides.offset(a.rows, row);
      X* dx = a.dx ? static_cast<X*>(a.dx) + row * n : nullptr;
      for_each_vec2<kSplit<X>>(n, [&](int64_t i, auto at, int) FK_INLINE {
        Vec2 z = at.load(x + i);
        if constexpr (kBias) z = z + at.load(a.bias + i);
        const Vec2 dz = at.load(dy + i) * Vec2{Gate::both(z.a).slope, Gate::both(z.b).slope};
        if (dx) at.template store<kStream>(dx + i, dz);
        if (dbias) at.store(dbias + i, at.load(dbias + i) + dz);
      });
    }
    if (kSplit<X> && dbias) put_in_order(dbias, n);
  }
}

}  // namespace

void bias_gelu_forward(const BiasGeluForward& a, int64_t begin, int64_t end) {
  with_kinds(a.type, a.activation, [&](auto* x, auto gate) {
    using X = std::remove_pointer_t<decltype(x)>;
    const auto run = [&](auto bias, auto stream) {
      forward_tiles<X, decltype(gate), bias.value, stream.value>(a, begin, end);
    };
    const bool streamed = worth_streaming(static_cast<const X*>(a.y), a.rows, a.n_cols);
    with_bools(run, a.bias != nullptr, streamed);
    if (streamed) stream_fence();
  });
}

void bias_gelu_backward(const BiasGeluBackward& a, int64_t begin, int64_t end) {
  with_kinds(a.type, a.activation, [&](auto* x, auto gate) {
    using X = std::remove_pointer_t<decltype(x)>;
    const auto run = [&](auto bias, auto stream) {
      backward_chunks<X, decltype(gate), bias.value, stream.value>(a, begin, end);
    };
    const bool streamed = worth_streaming(static_cast<const X*>(a.dx), a.rows, a.n_cols);
    with_bools(run, a.bias != nullptr, streamed);
    if (streamed) stream_fence();
  });
}

}  // namespace FK_ISA
}  // namespace foundry
