// Compiled once per instruction set (see isa.h).
#include "swiglu.h"

#include "activation.h"
#include "vec2.h"

namespace foundry {
namespace FK_ISA {

namespace {

template <class X, class Gate, bool kStream>
void forward_tiles(const GluForward& a, int64_t begin, int64_t end) {
  for_each_tile(a.n_cols, begin, end, [&](int64_t row, int64_t col, int64_t columns) FK_INLINE {
    const X* gate = static_cast<const X*>(a.gate) + a.gate_strides.offset(a.rows, row) + col;
    const X* up = static_cast<const X*>(a.up) + a.up_strides.offset(a.rows, row) + col;
    X* y = static_cast<X*>(a.y) + row * a.n_cols + col;
    for_each_vec2<kSplit<X>>(columns, [&](int64_t i, auto at, int) FK_INLINE {
      const Vec2 g = at.load(gate + i);
      at.template store<kStream>(y + i, Vec2{Gate::value(g.a), Gate::value(g.b)} * at.load(up + i));
    });
  });
}

template <class X, class Gate, bool kStream>
void backward_tiles(const GluBackward& a, int64_t begin, int64_t end) {
  for_each_tile(a.n_cols, begin, end, [&](int64_t row, int64_t col, int64_t columns) FK_INLINE {
    const X* dy = static_cast<const X*>(a.dy) + a.dy_strides.offset(a.rows, row) + col;
    const X* gate = static_cast<const X*>(a.gate) + a.gate_strides.offset(a.rows, row) + col;
    const X* up = static_cast<const X*>(a.up) + a.up_strides.offset(a.rows, row) + col;
    X* dgate = a.dgate ? static_cast<X*>(a.dgate) + row * a.out_stride + col : nullptr;
    X* dup = a.dup ? static_cast<X*>(a.dup) + row * a.out_stride + col : nullptr;
    for_each_vec2<kSplit<X>>(columns, [&](int64_t i, auto at, int) FK_INLINE {
      const Vec2 d = at.load(dy + i), g = at.load(gate + i);
      const Activated one = Gate::both(g.a), two = Gate::both(g.b);
      if (dgate) at.template store<kStream>(dgate + i, d * at.load(up + i) * Vec2{one.slope, two.slope});
      if (dup) at.template store<kStream>(dup + i, d * Vec2{one.value, two.value});
    });
  });
}

}  // namespace

void glu_forward(const GluForward& a, int64_t begin, int64_t end) {
  with_kinds(a.type, a.activation, [&](auto* x, auto gate) {
    using X = std::remove_pointer_t<decltype(x)>;
    const bool streamed = worth_streaming(static_cast<const X*>(a.y), a.rows, a.n_cols);
    streamed ? forward_tiles<X, decltype(gate), true>(a, begin, end)
             : forward_tiles<X, decltype(gate), false>(a, begin, end);
    if (streamed) stream_fence();
  });
}

void glu_backward(const GluBackward& a, int64_t begin, int64_t end) {
  with_kinds(a.type, a.activation, [&](auto* x, auto gate) {
    using X = std::remove_pointer_t<decltype(x)>;
    const bool streamed = worth_streaming(static_cast<const X*>(a.dgate ? a.dgate : a.dup), a.rows, a.n_cols);
    streamed ? backward_tiles<X, decltype(gate), true>(a, begin, end)
             : backward_tiles<X, decltype(gate), false>(a, begin, end);
    if (streamed) stream_fence();
  });
}

}  // namespace FK_ISA
}  // namespace foundry
