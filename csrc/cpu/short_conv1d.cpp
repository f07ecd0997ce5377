// Compiled once per instruction set (see isa.h).
//
// A group of rows is computed at a time, for one register of channels after the other. So the filter and the inputs of
// the first taps are loaded once for all rows of the group, and memory is still read and written row after row.
#include "short_conv1d.h"

#include <cstring>

#include "activation.h"
#include "vec2.h"

namespace foundry {
namespace FK_ISA {

namespace {

constexpr int kGroup = 8;  // rows that are computed at a time
constexpr int kBefore = kMaxTaps - 1;

template <class F>
void with_taps(int taps, F&& f) {
  switch (taps) {
    case 1: return f(std::integral_constant<int, 1>{});
    case 2: return f(std::integral_constant<int, 2>{});
    case 3: return f(std::integral_constant<int, 3>{});
    case 4: return f(std::integral_constant<int, 4>{});
    case 5: return f(std::integral_constant<int, 5>{});
    case 6: return f(std::integral_constant<int, 6>{});
    case 7: return f(std::integral_constant<int, 7>{});
    case 8: return f(std::integral_constant<int, 8>{});
  }
}

template <class F>
inline FK_INLINE void for_each_register(int64_t n, F&& f) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) f(i, Whole{});
  if (i < n) f(i, Part{(int)(n - i)});
}

// The rows of one document within a chunk, for the channels col .. col + columns - 1.
struct Segment {
  int64_t document, first, end;  // all rows of the document
  int64_t row, row_end;          // those within the chunk
  int64_t col, columns;
};

// Calls f(chunk, Segment) for all segments of the tasks.
template <class F>
void for_each_segment(const ConvInput& in, int64_t chunk_rows, int64_t task_begin, int64_t task_end, F&& f) {
  const int64_t tiles = in.tiles();
  for (int64_t task = task_begin; task < task_end; ++task) {
    const int64_t chunk = task / tiles, col = (task - chunk * tiles) * kConvTile;
    const int64_t columns = std::min(kConvTile, in.n_channels - col);
    const int64_t chunk_end = std::min(in.n_rows, (chunk + 1) * chunk_rows);
    int64_t row = chunk * chunk_rows;
    for (int64_t n = in.document_of(row); row < chunk_end; ++n) {
      const int64_t first = in.first(n), end = in.first(n + 1), row_end = std::min(end, chunk_end);
      if (row < row_end) f(chunk, Segment{n, first, end, row, row_end, col, columns});
      row = std::max(row, row_end);
    }
  }
}

// A row of x, or of a tensor like it.
template <class X>
const X* row_of(const ConvInput& in, const void* x, int64_t stride_batch, int64_t stride_time, const Segment& s,
                int64_t row) {
  return static_cast<const X*>(x) +
         (in.bounds ? row * stride_time : s.document * stride_batch + (row - s.first) * stride_time) + s.col;
}

// Some rows of a tile of a state, with the channels next to each other.
template <class X>
class StateRows {
 public:
  X* operator[](int64_t i) { return rows_[i]; }

  void clear(int64_t count) { std::memset(rows_, 0, count * sizeof(rows_[0])); }
  // Reads the newest `count` inputs of a document.
  void read(const ConvState& state, const Segment& s, int64_t count) {
    const X* from = at(state, s, state.length - count);
    for (int64_t c = 0; c < s.columns; ++c)
      for (int64_t i = 0; i < count; ++i) rows_[i][c] = from[c * state.stride_c + i * state.stride_time];
  }
  void write(const ConvState& state, const Segment& s) const {
    X* to = at(state, s, 0);
    for (int64_t c = 0; c < s.columns; ++c)
      for (int64_t i = 0; i < state.length; ++i) to[c * state.stride_c + i * state.stride_time] = rows_[i][c];
  }

 private:
  static X* at(const ConvState& state, const Segment& s, int64_t time) {
    return static_cast<X*>(state.data) + s.document * state.stride_n + s.col * state.stride_c +
           time * state.stride_time;
  }
  X rows_[kBefore][kConvTile];
};

// The inputs of a segment's taps: those before it, and its own.
template <class X, int kTaps>
class Inputs {
 public:
  Inputs(const ConvInput& in, const Segment& s) : in_(in), s_(s) {
    if (s.row - s.first >= kTaps - 1) return;
    if (in.initial.data) before_.read(in.initial, s, kTaps - 1);
    else before_.clear(kTaps - 1);
  }
  const X* operator[](int64_t row) {
    const int64_t position = row - s_.first;
    if (kTaps > 1 && position < 0) return before_[position + kTaps - 1];  // GCC warns of a single tap otherwise
    return row_of<X>(in_, in_.x, in_.stride_batch, in_.stride_time, s_, row);
  }

 private:
  const ConvInput& in_;
  const Segment& s_;
  StateRows<X> before_;
};

// The filter's values for a register of channels.
template <int kTaps>
struct Filter {
  Vec weight[kTaps], bias;

  template <class Access>
  FK_INLINE Filter(const ConvFilter& filter, int64_t n_channels,
                                                               int64_t channel, Access at)
      : bias{} {
    for (int j = 0; j < kTaps; ++j) weight[j] = at.load(filter.weight + j * n_channels + channel);
    if (filter.bias) bias = at.load(filter.bias + channel);
  }
  FK_INLINE Vec operator()(const Vec (&window)[kTaps]) const {
    Vec z = bias;
    for (int j = 0; j < kTaps; ++j) z = z + weight[j] * window[j];
    return z;
  }
};

template <int kTaps>
inline FK_INLINE void shift(Vec (&window)[kTaps]) {
  for (int j = 0; j + 1 < kTaps; ++j) window[j] = window[j + 1];
}

template <class X, int kTaps>
void forward_tasks(const ConvForward& a, int64_t task_begin, int64_t task_end) {
  using Silu = Gate<Activation::silu, sizeof(X) == 2>;
  const ConvInput& in = a.in;
  X* const y = static_cast<X*>(a.y);
  const bool streamed = worth_streaming(y, Rows{{1, 1, in.n_rows}}, in.n_channels);
  for_each_segment(in, a.chunk_rows, task_begin, task_end, [&](int64_t, const Segment& s) {
    Inputs<X, kTaps> inputs(in, s);
    for (int64_t row = s.row; row < s.row_end; row += kGroup) {
      const int rows = (int)std::min<int64_t>(kGroup, s.row_end - row);
      const X* x[kBefore + kGroup];
      for (int r = 0; r < kTaps - 1 + rows; ++r) x[r] = inputs[row - (kTaps - 1) + r];
      const X* added[kGroup];
      for (int r = 0; a.residual && r < rows; ++r)
        added[r] = row_of<X>(in, a.residual, a.residual_stride_batch, a.residual_stride_time, s, row + r);
      X* const out = y + row * in.n_channels + s.col;
      for_each_register(s.columns, [&](int64_t i, auto at) FK_INLINE {
        const Filter<kTaps> filter(a.filter, in.n_channels, s.col + i, at);
        Vec window[kTaps];
        for (int j = 0; j + 1 < kTaps; ++j) window[j] = at.load(x[j] + i);
        for (int r = 0; r < rows; ++r) {
          window[kTaps - 1] = at.load(x[kTaps - 1 + r] + i);
          Vec z = filter(window);
          if (a.filter.silu) z = Silu::value(z);
          if (a.residual) z = z + at.load(added[r] + i);
          X* const p = out + r * in.n_channels + i;
          at.store(p, z, streamed);
          shift(window);
        }
      });
    }
  });
}

// The backward pass of a segment reads kTaps - 1 rows after it too, whose dz the gradients of its last rows need. dx of
// a row follows kTaps - 1 rows after its dz.
template <class X, int kTaps>
void backward_tasks(const ConvBackward& a, int64_t task_begin, int64_t task_end) {
  using Silu = Gate<Activation::silu, sizeof(X) == 2>;
  constexpr int kHalo = kTaps - 1;
  const ConvInput& in = a.in;
  const int64_t stride = in.n_channels;
  X* const dx = static_cast<X*>(a.dx);
  const bool streamed = worth_streaming(dx, Rows{{1, 1, in.n_rows}}, stride);
  int64_t cleared = -1;  // the chunk whose sums are cleared, times the tiles, plus the tile
  for_each_segment(in, a.chunk_rows, task_begin, task_end, [&](int64_t chunk, const Segment& s) {
    float* const sums = a.sums ? a.sums + chunk * (kTaps + 1) * stride + s.col : nullptr;
    if (const int64_t task = chunk * in.tiles() + s.col / kConvTile; sums && task != cleared) {
      for (int j = 0; j <= kTaps; ++j) std::fill_n(sums + j * stride, s.columns, 0.0f);
      cleared = task;
    }
    Inputs<X, kTaps> inputs(in, s);
    const bool reads_final = a.dfinal.data && s.row_end + kHalo > s.end;
    StateRows<X> dfinal, dinitial;
    if (reads_final) dfinal.read(a.dfinal, s, kHalo);
    float kept[std::max(kHalo, 1)][kConvTile];  // dz of the rows before the group
    for (int j = 0; j < kHalo; ++j) std::fill_n(kept[j], s.columns, 0.0f);
    for (int64_t row = s.row; row < s.row_end + kHalo; row += kGroup) {
      const int rows = (int)std::min<int64_t>(kGroup, s.row_end + kHalo - row);
      const X *x[kBefore + kGroup], *dy[kGroup], *more[kGroup];
      X* out[kGroup];
      for (int r = 0; r < kHalo + rows; ++r) x[r] = inputs[std::min(row - kHalo + r, s.end - 1)];
      for (int r = 0; r < rows; ++r) {
        // There is no row after the document, so dz is 0 there. The rows before it are those of the state.
        dy[r] = row + r < s.end ? row_of<X>(in, a.dy, a.dy_stride_batch, a.dy_stride_time, s, row + r) : nullptr;
        const int64_t to = row + r - kHalo, nth = to - (s.end - kHalo);
        out[r] = to >= s.row
                     ? (dx ? dx + to * stride + s.col : nullptr)
                     : (kHalo > 0 && to < s.first && a.dinitial.data ? dinitial[to - s.first + kHalo] : nullptr);
        more[r] = reads_final && nth >= 0 ? dfinal[nth] : nullptr;
      }
      for_each_register(s.columns, [&](int64_t i, auto at) FK_INLINE {
        const Filter<kTaps> filter(a.filter, stride, s.col + i, at);
        Vec window[kTaps], dz[kTaps], sum[kTaps + 1];
        for (int j = 0; j < kHalo; ++j) window[j] = at.load(x[j] + i), dz[j] = at.load(kept[j] + i);
        if (sums)
          for (int j = 0; j <= kTaps; ++j) sum[j] = at.load(sums + j * stride + i);
        for (int r = 0; r < rows; ++r) {
          window[kHalo] = at.load(x[kHalo + r] + i);
          dz[kHalo] = dy[r] ? at.load(dy[r] + i) : Vec{};
          if (a.filter.silu && dy[r]) dz[kHalo] = dz[kHalo] * Silu::both(filter(window)).slope;
          if (sums && row + r < s.row_end) {
            for (int j = 0; j < kTaps; ++j) sum[j] = sum[j] + dz[kHalo] * window[j];
            sum[kTaps] = sum[kTaps] + dz[kHalo];
          }
          if (X* const p = out[r]) {
            Vec v = more[r] ? at.load(more[r] + i) : Vec{};
            for (int j = 0; j < kTaps; ++j) v = v + filter.weight[kHalo - j] * dz[j];
            at.store(p + i, v, streamed && row + r >= s.row + kHalo);
          }
          shift(window);
          shift(dz);
        }
        for (int j = 0; j < kHalo; ++j) at.store(kept[j] + i, dz[j]);
        if (sums)
          for (int j = 0; j <= kTaps; ++j) at.store(sums + j * stride + i, sum[j]);
      });
    }
    if (a.dinitial.data && s.row == s.first) dinitial.write(a.dinitial, s);
  });
}

template <class X>
void final_tasks(const ConvFinal& a, int64_t task_begin, int64_t task_end) {
  const ConvInput& in = a.in;
  const ConvState &from = in.initial, &to = a.final;
  for (int64_t task = task_begin; task < task_end; ++task) {
    const int64_t n = task / in.tiles(), col = (task - n * in.tiles()) * kConvTile;
    const int64_t columns = std::min(kConvTile, in.n_channels - col), first = in.first(n), end = in.first(n + 1);
    const Segment s{n, first, end, first, end, col, columns};
    const X* old = from.data ? static_cast<const X*>(from.data) + n * from.stride_n + col * from.stride_c : nullptr;
    X* out = static_cast<X*>(to.data) + n * to.stride_n + col * to.stride_c;
    const int64_t shifted = std::max<int64_t>(to.length - (end - first), 0);  // how many are not from x
    const X* x = shifted < to.length
                     ? row_of<X>(in, in.x, in.stride_batch, in.stride_time, s, end - (to.length - shifted))
                     : nullptr;
    for (int64_t c = 0; c < columns; ++c) {  // oldest first: in place, each is read before it is overwritten
      for (int64_t i = 0; i < shifted; ++i) {
        const int64_t back = i + (end - first) + from.length - to.length;
        out[c * to.stride_c + i * to.stride_time] =
            old && back >= 0 ? old[c * from.stride_c + back * from.stride_time] : X{};
      }
      for (int64_t i = shifted; i < to.length; ++i)
        out[c * to.stride_c + i * to.stride_time] = x[(i - shifted) * in.stride_time + c];
    }
  }
}

}  // namespace

void short_conv1d_forward(const ConvForward& a, int64_t begin, int64_t end) {
  with_type(a.in.type, [&](auto* x) {
    with_taps(a.filter.taps,
              [&](auto taps) { forward_tasks<std::remove_pointer_t<decltype(x)>, taps.value>(a, begin, end); });
  });
}

void short_conv1d_backward(const ConvBackward& a, int64_t begin, int64_t end) {
  with_type(a.in.type, [&](auto* x) {
    with_taps(a.filter.taps,
              [&](auto taps) { backward_tasks<std::remove_pointer_t<decltype(x)>, taps.value>(a, begin, end); });
  });
}

void short_conv1d_final(const ConvFinal& a, int64_t begin, int64_t end) {
  with_type(a.in.type, [&](auto* x) { final_tasks<std::remove_pointer_t<decltype(x)>>(a, begin, end); });
}

}  // namespace FK_ISA
}  // namespace foundry
