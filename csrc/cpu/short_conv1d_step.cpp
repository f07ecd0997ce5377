// One token of a short convolution for each row. States and filters have the taps of a channel next to each other, so a
// tile of channels is transposed into memory of its own, and registers hold channels. Sums have the order of
// short_conv1d_forward. Compiled once per instruction set (see isa.h).
#include "short_conv1d.h"

#include <cstring>

#include "activation.h"
#include "vec2.h"

namespace foundry {
namespace FK_ISA {
namespace {

template <class T> using Tile = T[kConvStepTile];
// GCC vectorises copies of numbers, not of structs.
template <class T> using Bits = std::conditional_t<std::is_same_v<T, float>, float, uint16_t>;

// Compilers vectorise the loop over channels only if the number of taps is a constant.
template <int kCount, class T>
void read_dense(const T* __restrict from, int64_t columns, Tile<T>* __restrict to) {
  for (int64_t c = 0; c < columns; ++c)
    for (int i = 0; i < kCount; ++i) to[i][c] = from[c * kCount + i];
}
template <int kCount, class T>
void write_dense(T* __restrict to, int64_t columns, const Tile<T>* __restrict from) {
  for (int64_t c = 0; c < columns; ++c)
    for (int i = 0; i < kCount; ++i) to[c * kCount + i] = from[i][c];
}

// Rows of `count` values next to each other, for some channels.
template <class T>
void read_tile(const T* from, int64_t stride_c, int64_t stride_i, int64_t count, int64_t columns, Tile<T>* to) {
  if (stride_i == 1 && stride_c == count) {
    const auto* bits = reinterpret_cast<const Bits<T>*>(from);
    auto* rows = reinterpret_cast<Tile<Bits<T>>*>(to);
    if (count == 2) return read_dense<2>(bits, columns, rows);
    if (count == 3) return read_dense<3>(bits, columns, rows);
    if (count == 4) return read_dense<4>(bits, columns, rows);
  }
  for (int64_t c = 0; c < columns; ++c)
    for (int64_t i = 0; i < count; ++i) to[i][c] = from[c * stride_c + i * stride_i];
}
template <class T>
void write_tile(T* to, int64_t stride_c, int64_t stride_i, int64_t count, int64_t columns, const Tile<T>* from) {
  if (stride_i == 1 && stride_c == count) {
    auto* bits = reinterpret_cast<Bits<T>*>(to);
    const auto* rows = reinterpret_cast<const Tile<Bits<T>>*>(from);
    if (count == 2) return write_dense<2>(bits, columns, rows);
    if (count == 3) return write_dense<3>(bits, columns, rows);
    if (count == 4) return write_dense<4>(bits, columns, rows);
  }
  for (int64_t c = 0; c < columns; ++c)
    for (int64_t i = 0; i < count; ++i) to[c * stride_c + i * stride_i] = from[i][c];
}

void read_filter(const ConvStep& a, int64_t col, int64_t columns, Tile<float>* to) {
  with_type(a.weight_type, [&](auto* t) {
    using T = std::decay_t<decltype(*t)>;
    const T* from = static_cast<const T*>(a.weight) + col * a.weight_stride_c;
    if constexpr (std::is_same_v<T, float>) {
      read_tile(from, a.weight_stride_c, a.weight_stride_tap, a.taps, columns, to);
    } else {
      Tile<T> taps[kMaxTaps];
      read_tile(from, a.weight_stride_c, a.weight_stride_tap, a.taps, columns, taps);
      for (int j = 0; j < a.taps; ++j)
        for_each_vec(columns, [&](int64_t i, auto at, int) FK_INLINE { at.store(to[j] + i, at.load(taps[j] + i)); });
    }
  });
}

template <class X>
void step_tasks(const ConvStep& a, int64_t task_begin, int64_t task_end) {
  using Silu = Gate<Activation::silu, sizeof(X) == 2>;
  const ConvState& s = a.state;
  const int64_t kept = std::min<int64_t>(s.length, kMaxTaps), older = s.length - kept;
  Tile<float> filter[kMaxTaps];
  Tile<X> inputs[kMaxTaps + 1];  // the newest of the state, then x
  for (int64_t task = task_begin; task < task_end; ++task) {
    const int64_t col = task * kConvStepTile, columns = std::min(kConvStepTile, a.n_channels - col);
    read_filter(a, col, columns, filter);
    for (int64_t n = 0; n < a.n_rows; ++n) {
      X* const state = static_cast<X*>(s.data) + n * s.stride_n + col * s.stride_c;
      X* const newest = state + older * s.stride_time;
      const X* const x = static_cast<const X*>(a.x) + n * a.x_stride_n + col * a.x_stride_c;
      read_tile(newest, s.stride_c, s.stride_time, kept, columns, inputs);
      if (a.x_stride_c == 1) std::memcpy(inputs[kept], x, columns * sizeof(X));
      else read_tile(x, a.x_stride_c, 0, 1, columns, inputs + kept);
      const Tile<X>* const window = inputs + (kept - (a.taps - 1));
      const X* const residual =
          a.residual ? static_cast<const X*>(a.residual) + n * a.residual_stride_n + col : nullptr;
      X* const y = static_cast<X*>(a.y) + n * a.n_channels + col;
      for_each_vec(columns, [&](int64_t i, auto at, int) FK_INLINE {
        Vec z{};
        if (a.bias) z = at.load(a.bias + col + i);
        for (int j = 0; j < a.taps; ++j) z = z + at.load(filter[j] + i) * at.load(window[j] + i);
        if (a.silu) z = Silu::value(z);
        if (residual) z = z + at.load(residual + i);
        at.store(y + i, z);
      });
      for (int64_t i = 0; i < older; ++i)
        for (int64_t c = 0; c < columns; ++c)
          state[c * s.stride_c + i * s.stride_time] = state[c * s.stride_c + (i + 1) * s.stride_time];
      write_tile(newest, s.stride_c, s.stride_time, kept, columns, inputs + 1);
    }
  }
}

}  // namespace

void short_conv1d_step(const ConvStep& a, int64_t task_begin, int64_t task_end) {
  with_type(a.type, [&](auto* t) { step_tasks<std::decay_t<decltype(*t)>>(a, task_begin, task_end); });
}

}  // namespace FK_ISA
}  // namespace foundry
