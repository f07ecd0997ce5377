// Gated linear units, forward and backward.
//
// A block takes a tile of one row; contiguous tensors come as one long row. A thread does kReads reads of kVec
// neighbouring values (16 bytes where rows are aligned to that, else one value) of each tensor, at a stride of the
// block, and issues them all before it uses any. The remainder of a row, fewer than kVec values, is done one by one.
#include "swiglu.h"

#include "activation.cuh"

namespace foundry {
namespace cuda {
namespace {

constexpr int kReads = 2;
constexpr int kMaxThreads = 128;

// The columns of a row that a block takes, and which of them this thread takes.
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
  // The column of the row's remainder, which no whole read covers, that this thread takes; n_cols if none.
  __device__ int64_t remainder() const {
    const int64_t col = n_cols - n_cols % kVec + threadIdx.x;
    return kVec > 1 && begin + width(blockDim.x) >= n_cols && col < n_cols ? col : n_cols;
  }
};

template <class X, Activation kActivation, int kVec>
__global__ void __launch_bounds__(kMaxThreads) forward_kernel(const GluForward a, unsigned tiles) {
  const Tile<kVec> tile(a.n_cols, tiles);
  const X* gate = static_cast<const X*>(a.gate) + a.gate_strides.offset(a.rows, tile.row);
  const X* up = static_cast<const X*>(a.up) + a.up_strides.offset(a.rows, tile.row);
  X* y = static_cast<X*>(a.y) + tile.row * a.n_cols;

  const auto write = [&](int64_t col, const auto& g, const auto& u) {
    auto out = g;
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(out) / sizeof(X)); ++i)
      out.values[i] = from_float<X>(activate<kActivation>(to_float(g.values[i])).value * to_float(u.values[i]));
    store(y + col, out);
  };
  Pack<X, kVec> g[kReads], u[kReads];
#pragma unroll
  for (int j = 0; j < kReads; ++j)
    if (tile.whole(j)) {
      g[j] = load<X, kVec>(gate + tile.column(j));
      u[j] = load<X, kVec>(up + tile.column(j));
    }
#pragma unroll
  for (int j = 0; j < kReads; ++j)
    if (tile.whole(j)) write(tile.column(j), g[j], u[j]);
  if (const int64_t col = tile.remainder(); col < a.n_cols) write(col, load<X, 1>(gate + col), load<X, 1>(up + col));
}

template <class X, Activation kActivation, int kVec>
__global__ void __launch_bounds__(kMaxThreads) backward_kernel(const GluBackward a, unsigned tiles) {
  const Tile<kVec> tile(a.n_cols, tiles);
  const X* dy = static_cast<const X*>(a.dy) + a.dy_strides.offset(a.rows, tile.row);
  const X* gate = static_cast<const X*>(a.gate) + a.gate_strides.offset(a.rows, tile.row);
  const X* up = static_cast<const X*>(a.up) + a.up_strides.offset(a.rows, tile.row);
  X* dgate = a.dgate ? static_cast<X*>(a.dgate) + tile.row * a.out_stride : nullptr;
  X* dup = a.dup ? static_cast<X*>(a.dup) + tile.row * a.out_stride : nullptr;

  const auto write = [&](int64_t col, const auto& d, const auto& g, const auto& u) {
    auto into_gate = d, into_up = d;
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(d) / sizeof(X)); ++i) {
      const float grad = to_float(d.values[i]);
      const Activated gated = activate<kActivation>(to_float(g.values[i]));
      into_gate.values[i] = from_float<X>(grad * to_float(u.values[i]) * gated.derivative);
      into_up.values[i] = from_float<X>(grad * gated.value);
    }
    if (dgate) store(dgate + col, into_gate);
    if (dup) store(dup + col, into_up);
  };
  Pack<X, kVec> d[kReads], g[kReads], u[kReads] = {};
#pragma unroll
  for (int j = 0; j < kReads; ++j)
    if (tile.whole(j)) {
      d[j] = load<X, kVec>(dy + tile.column(j));
      g[j] = load<X, kVec>(gate + tile.column(j));
      if (dgate) u[j] = load<X, kVec>(up + tile.column(j));
    }
#pragma unroll
  for (int j = 0; j < kReads; ++j)
    if (tile.whole(j)) write(tile.column(j), d[j], g[j], u[j]);
  if (const int64_t col = tile.remainder(); col < a.n_cols)
    write(col, load<X, 1>(dy + col), load<X, 1>(gate + col), load<X, 1>(up + col));
}

// Launches one block per tile, of as many threads as a narrow row needs, at most kMaxThreads.
template <int kVec, class Args>
cudaError_t launch_tiles(void (*kernel)(Args, unsigned), const Args& a, cudaStream_t stream) {
  const int64_t of_a_warp = Tile<kVec>::width(32), warps = (a.n_cols + of_a_warp - 1) / of_a_warp;
  const int threads = static_cast<int>(warps * 32 < kMaxThreads ? warps * 32 : kMaxThreads);
  const int64_t width = Tile<kVec>::width(threads), tiles = (a.n_cols + width - 1) / width;
  const int64_t blocks = a.rows.count() * tiles;
  if (blocks > kMaxBlocks) return cudaErrorInvalidConfiguration;
  const dim3 grid(static_cast<unsigned>(blocks));
  return launch(kernel, grid, dim3(threads), 0, stream, a, static_cast<unsigned>(tiles));
}

}  // namespace

cudaError_t glu_forward(const GluForward& a, cudaStream_t stream) {
  const bool vectors = aligned(a.gate, a.type, a.rows, a.gate_strides) && aligned(a.up, a.type, a.rows, a.up_strides) &&
                       aligned(a.y, a.type, a.rows, row_by_row(a.n_cols));
  return with_kinds<true>(a.type, a.activation, vectors, [&](auto x, auto kind, auto vec) {
    constexpr int kVec = decltype(vec)::value;
    return launch_tiles<kVec>(forward_kernel<FK_TYPE(x), decltype(kind)::value, kVec>, a, stream);
  });
}

cudaError_t glu_backward(const GluBackward& a, cudaStream_t stream) {
  const bool vectors = aligned(a.dy, a.type, a.rows, a.dy_strides) && aligned(a.gate, a.type, a.rows, a.gate_strides) &&
                       aligned(a.up, a.type, a.rows, a.up_strides) &&
                       aligned(a.dgate, a.type, a.rows, row_by_row(a.out_stride)) &&
                       aligned(a.dup, a.type, a.rows, row_by_row(a.out_stride));
  return with_kinds<true>(a.type, a.activation, vectors, [&](auto x, auto kind, auto vec) {
    constexpr int kVec = decltype(vec)::value;
    return launch_tiles<kVec>(backward_kernel<FK_TYPE(x), decltype(kind)::value, kVec>, a, stream);
  });
}

}  // namespace cuda
}  // namespace foundry
