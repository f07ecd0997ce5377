// Gated linear units, forward and backward.
//
// A block handles a tile of one row; contiguous tensors count as one long row. A thread makes kReads reads of kVec
// neighbouring values (16 bytes if rows are aligned to that, else one value) from each tensor, at a stride of the
// block, and issues them all before it uses any. The remainder of a row, fewer than kVec values, is handled one by one.
// For interleaved gates and ups kVec counts pairs and is half as large. With dropout, rows are not merged.
#include "swiglu.h"

#include <type_traits>

#include "activation.cuh"
#include "dropout.cuh"

namespace foundry {
namespace cuda {
namespace {

constexpr int kReads = 2;
constexpr int kMaxThreads = 128;

// The columns of a row that a block handles, and this thread's share.
template <int kVec>
struct Tile {
  int64_t row, begin, n_cols;

  __device__ Tile(int64_t n_cols, unsigned tiles) : row(blockIdx.x / tiles), n_cols(n_cols) {
    begin = static_cast<int64_t>(blockIdx.x % tiles) * width(blockDim.x);
  }
  static __host__ __device__ int64_t width(int threads) { return static_cast<int64_t>(threads) * kReads * kVec; }
  __device__ int64_t column(int read) const {
    return begin + (static_cast<int64_t>(read) * blockDim.x + threadIdx.x) * kVec;
  }
  __device__ bool whole(int read) const { return column(read) + kVec <= n_cols; }
  // This thread's column in the remainder of the row, which no whole read covers; n_cols if none.
  __device__ int64_t remainder() const {
    const int64_t col = n_cols - n_cols % kVec + threadIdx.x;
    return kVec > 1 && begin + width(blockDim.x) >= n_cols && col < n_cols ? col : n_cols;
  }
};

// Computes the activated product of a gate and an up, and the gradients of both from the product's gradient.
template <Activation kActivation>
struct Product {
  static constexpr bool kReadsUp = false;  // for the gradient of up
  template <class X>
  __device__ __forceinline__ float forward(X g, X u) const {
    return activate<kActivation>(to_float(g)).value * to_float(u);
  }
  template <class X>
  __device__ __forceinline__ void backward(float grad, X g, X u, X& into_gate, X& into_up) const {
    const Activated gated = activate<kActivation>(to_float(g));
    into_gate = from_float<X>(times_slope<kActivation>(grad * to_float(u), gated.derivative));
    into_up = from_float<X>(grad * gated.value);
  }
};

// Same with the options of swiglu.
struct ClampedProduct {
  static constexpr bool kReadsUp = true;
  float alpha, limit, up_offset;
  bool limited;

  explicit ClampedProduct(const GluOptions& o)
      : alpha(o.alpha),
        limit(o.limit),
        up_offset(o.up_offset),
        limited(o.limited) {}

  __device__ __forceinline__ float clamped_gate(float g) const { return limited && g > limit ? limit : g; }
  __device__ __forceinline__ float shifted_up(float u) const {
    return (limited && u > limit ? limit : limited && u < -limit ? -limit : u) + up_offset;
  }
  template <class X>
  __device__ __forceinline__ float forward(X gate, X up) const {
    const float g = clamped_gate(to_float(gate));
    return g * logistic(alpha * g) * shifted_up(to_float(up));
  }
  template <class X>
  __device__ __forceinline__ void backward(float grad, X gate, X up, X& into_gate, X& into_up) const {
    const float x = to_float(gate), u = to_float(up);
    const float g = clamped_gate(x), s = logistic(alpha * g);
    const float slope = s + g * (s * (1.f - s)) * alpha;  // in this order alpha cannot cause an infinity
    into_gate = from_float<X>(!limited || x <= limit ? grad * shifted_up(u) * slope : 0.f);
    into_up = from_float<X>(!limited || (u <= limit && u >= -limit) ? grad * (g * s) : 0.f);
  }
};

// Loads kVec gates and ups from interleaved columns, and stores them.
template <class X, int kVec>
__device__ __forceinline__ void load_pairs(const X* p, Pack<X, kVec>& g, Pack<X, kVec>& u) {
  constexpr int kRead = kVec > 1 ? 2 * kVec : 1;  // values per read; single pairs may be unaligned
  X values[2 * kVec];
#pragma unroll
  for (int at = 0; at < 2 * kVec; at += kRead) {
    const Pack<X, kRead> read = load<X, kRead>(p + at);
#pragma unroll
    for (int i = 0; i < kRead; ++i) values[at + i] = read.values[i];
  }
#pragma unroll
  for (int i = 0; i < kVec; ++i) g.values[i] = values[2 * i], u.values[i] = values[2 * i + 1];
}
template <class X, int kVec>
__device__ __forceinline__ void store_pairs(X* p, const Pack<X, kVec>& g, const Pack<X, kVec>& u) {
  if constexpr (kVec > 1) {
    Pack<X, 2 * kVec> out;
#pragma unroll
    for (int i = 0; i < kVec; ++i) out.values[2 * i] = g.values[i], out.values[2 * i + 1] = u.values[i];
    store(p, out);
  } else {
    store(p, g);
    store(p + 1, u);
  }
}

// The gates and ups of a row: of two tensors or, in pairs, interleaved in one. `up` is read only where it is needed.
template <class X, bool kPairs>
struct GatesAndUps {
  const X *gate, *up;
  bool needs_up = true;

  template <class Args>
  __device__ GatesAndUps(const Args& a, int64_t row)
      : gate(static_cast<const X*>(a.gate) + a.gate_strides.offset(a.rows, row)),
        up(static_cast<const X*>(a.up) + a.up_strides.offset(a.rows, row)) {}
  template <int kVec>
  __device__ __forceinline__ void read(int64_t col, Pack<X, kVec>& g, Pack<X, kVec>& u) const {
    if constexpr (kPairs) {
      load_pairs(gate + 2 * col, g, u);
    } else {
      g = load<X, kVec>(gate + col);
      if (needs_up) u = load<X, kVec>(up + col);
    }
  }
};

template <class X, class Unit, int kVec, bool kDropout, bool kPairs>
__global__ void __launch_bounds__(kMaxThreads) forward_kernel(const GluForward a, unsigned tiles, const Unit unit) {
  const Tile<kVec> tile(a.n_cols, tiles);
  const GatesAndUps<X, kPairs> inputs(a, tile.row);
  X* y = static_cast<X*>(a.y) + tile.row * a.n_cols;

  const auto write = [&](int64_t col, const auto& g, const auto& u) {
    auto out = g;
    constexpr int kCount = sizeof(out) / sizeof(X);
    const DropoutFactors<kDropout, kCount> factors(a.dropout, tile.row, col);
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      out.values[i] = from_float<X>(factors.times(unit.forward(g.values[i], u.values[i]), i));
    store(y + col, out);
  };
  Pack<X, kVec> g[kReads], u[kReads];
#pragma unroll
  for (int j = 0; j < kReads; ++j)
    if (tile.whole(j)) inputs.read(tile.column(j), g[j], u[j]);
#pragma unroll
  for (int j = 0; j < kReads; ++j)
    if (tile.whole(j)) write(tile.column(j), g[j], u[j]);
  if (const int64_t col = tile.remainder(); col < a.n_cols) {
    Pack<X, 1> one, other;
    inputs.read(col, one, other);
    write(col, one, other);
  }
}

template <class X, class Unit, int kVec, bool kDropout, bool kPairs>
__global__ void __launch_bounds__(kMaxThreads) backward_kernel(const GluBackward a, unsigned tiles, const Unit unit) {
  const Tile<kVec> tile(a.n_cols, tiles);
  const X* dy = static_cast<const X*>(a.dy) + a.dy_strides.offset(a.rows, tile.row);
  GatesAndUps<X, kPairs> inputs(a, tile.row);
  X* dgate = a.dgate ? static_cast<X*>(a.dgate) + tile.row * a.out_stride : nullptr;
  X* dup = a.dup ? static_cast<X*>(a.dup) + tile.row * a.out_stride : nullptr;
  inputs.needs_up = dgate || Unit::kReadsUp;

  const auto write = [&](int64_t col, const auto& d, const auto& g, const auto& u) {
    auto into_gate = d, into_up = d;
    constexpr int kCount = sizeof(into_gate) / sizeof(X);
    const DropoutFactors<kDropout, kCount> factors(a.dropout, tile.row, col);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float grad = factors.times(to_float(d.values[i]), i);
      unit.backward(grad, g.values[i], u.values[i], into_gate.values[i], into_up.values[i]);
    }
    if constexpr (kPairs) {
      store_pairs(dgate + 2 * col, into_gate, into_up);
    } else {
      if (dgate) store(dgate + col, into_gate);
      if (dup) store(dup + col, into_up);
    }
  };
  Pack<X, kVec> d[kReads], g[kReads], u[kReads] = {};
#pragma unroll
  for (int j = 0; j < kReads; ++j)
    if (tile.whole(j)) {
      d[j] = load<X, kVec>(dy + tile.column(j));
      inputs.read(tile.column(j), g[j], u[j]);
    }
#pragma unroll
  for (int j = 0; j < kReads; ++j)
    if (tile.whole(j)) write(tile.column(j), d[j], g[j], u[j]);
  if (const int64_t col = tile.remainder(); col < a.n_cols) {
    Pack<X, 1> one, other = {};
    inputs.read(col, one, other);
    write(col, load<X, 1>(dy + col), one, other);
  }
}

// Launches one block per tile. A narrow row gets only as many threads as it needs; the maximum is kMaxThreads.
template <int kVec, class Args, class Unit>
cudaError_t launch_tiles(void (*kernel)(Args, unsigned, Unit), const Args& a, const Unit& unit, cudaStream_t stream) {
  const int64_t of_a_warp = Tile<kVec>::width(32), warps = (a.n_cols + of_a_warp - 1) / of_a_warp;
  const int threads = static_cast<int>(warps * 32 < kMaxThreads ? warps * 32 : kMaxThreads);
  const int64_t width = Tile<kVec>::width(threads), tiles = (a.n_cols + width - 1) / width;
  const int64_t blocks = a.rows.count() * tiles;
  if (blocks > kMaxBlocks) return cudaErrorInvalidConfiguration;
  const dim3 grid(static_cast<unsigned>(blocks));
  return launch(kernel, grid, dim3(threads), 0, stream, a, static_cast<unsigned>(tiles), unit);
}

// Calls f(Tag<X>, unit, values per read of each tensor, whether pairs are interleaved).
template <class F>
cudaError_t with_units(Dtype type, Activation activation, const GluOptions& o, bool vectors, F&& f) {
  if (!o.changed && !o.interleaved)
    return with_kinds<Activation::silu, Activation::gelu, Activation::gelu_tanh, Activation::sigmoid, Activation::relu>(
        type, activation, vectors,
        [&](auto x, auto kind, auto vec) { return f(x, Product<decltype(kind)::value>{}, vec, Constant<false>{}); });
  return with_type(type, [&](auto x) {
    const auto sized = [&](const auto& unit, auto pairs) {
      constexpr int kVec = 16 / sizeof(FK_TYPE(x)) / (decltype(pairs)::value ? 2 : 1);
      return vectors ? f(x, unit, Constant<kVec>{}, pairs) : f(x, unit, Constant<1>{}, pairs);
    };
    if (!o.changed) return sized(Product<Activation::silu>{}, Constant<true>{});
    const ClampedProduct clamped(o);
    return o.interleaved ? sized(clamped, Constant<true>{}) : sized(clamped, Constant<false>{});
  });
}

}  // namespace

cudaError_t glu_forward(const GluForward& a, const GluOptions& options, cudaStream_t stream) {
  const bool vectors = aligned(a.gate, a.type, a.rows, a.gate_strides) && aligned(a.up, a.type, a.rows, a.up_strides) &&
                       aligned(a.y, a.type, a.rows, row_by_row(a.n_cols));
  return with_units(a.type, a.activation, options, vectors, [&](auto x, const auto& unit, auto vec, auto pairs) {
    using X = FK_TYPE(x);
    using Unit = std::decay_t<decltype(unit)>;
    constexpr int kVec = decltype(vec)::value;
    return with_dropout(a.dropout, [&](auto drops) {
      constexpr bool kDropout = decltype(drops)::value;
      return launch_tiles<kVec>(forward_kernel<X, Unit, kVec, kDropout, decltype(pairs)::value>, a, unit, stream);
    });
  });
}

cudaError_t glu_backward(const GluBackward& a, const GluOptions& options, cudaStream_t stream) {
  const bool vectors = aligned(a.dy, a.type, a.rows, a.dy_strides) && aligned(a.gate, a.type, a.rows, a.gate_strides) &&
                       aligned(a.up, a.type, a.rows, a.up_strides) &&
                       aligned(a.dgate, a.type, a.rows, row_by_row(a.out_stride)) &&
                       aligned(a.dup, a.type, a.rows, row_by_row(a.out_stride));
  return with_units(a.type, a.activation, options, vectors, [&](auto x, const auto& unit, auto vec, auto pairs) {
    using X = FK_TYPE(x);
    using Unit = std::decay_t<decltype(unit)>;
    constexpr int kVec = decltype(vec)::value;
    return with_dropout(a.dropout, [&](auto drops) {
      constexpr bool kDropout = decltype(drops)::value;
      return launch_tiles<kVec>(backward_kernel<X, Unit, kVec, kDropout, decltype(pairs)::value>, a, unit, stream);
    });
  });
}

}  // namespace cuda
}  // namespace foundry
