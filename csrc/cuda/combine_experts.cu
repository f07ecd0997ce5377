// Weighted sums of rows, forward and backward, as gathers without atomics.
//
// Forward, a block handles a tile of a token's columns and a thread kVec of them (16 bytes if rows are aligned to that,
// else one). It reads the rows of several slots before it adds them, in order. Backward, a warp handles a slot and
// walks along its row. Then rows that no slot refers to are zeroed.
#include "combine_experts.h"

#include "dispatch.cuh"

namespace foundry {
namespace cuda {
namespace {

constexpr int kMaxThreads = 128;  // threads of a forward block
constexpr int kWarps = 4;         // warps of a backward block
constexpr int kSlots = 4;         // rows of a token read at once
constexpr int kReads = 2;         // reads of a row in flight in backward

template <class X, int kVec, bool kWeighted>
__global__ void __launch_bounds__(kMaxThreads) forward_kernel(const CombineExpertsForward a, unsigned tiles) {
  const int64_t token = blockIdx.x / tiles;
  const int64_t col = (static_cast<int64_t>(blockIdx.x % tiles) * blockDim.x + threadIdx.x) * kVec;
  if (col >= a.n_cols) return;
  const X* x = static_cast<const X*>(a.x) + col;
  const int64_t* slots = a.slots + token * a.k;
  float sums[kVec] = {};
  bool outside = false;
  for (int64_t first = 0; first < a.k; first += kSlots) {
    Pack<X, kVec> rows[kSlots] = {};
    float weights[kSlots] = {};
    bool named[kSlots];
#pragma unroll
    for (int j = 0; j < kSlots; ++j) {
      const int64_t row = first + j < a.k ? slots[first + j] : -1;
      outside |= row >= a.n_rows;
      named[j] = row >= 0 && row < a.n_rows;
      if (!named[j]) continue;
      rows[j] = load<X, kVec>(x + row * a.x_stride);
      if (kWeighted) weights[j] = a.weights[token * a.k + first + j];
    }
#pragma unroll
    for (int j = 0; j < kSlots; ++j) {
      if (!named[j]) continue;
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        const float value = to_float(rows[j].values[i]);
        sums[i] += kWeighted ? weights[j] * value : value;
      }
    }
  }
  Pack<X, kVec> out;
#pragma unroll
  for (int i = 0; i < kVec; ++i) out.values[i] = from_float<X>(outside ? NAN : sums[i]);
  store(static_cast<X*>(a.y) + token * a.n_cols + col, out);
}

template <class X, int kVec, bool kDx, bool kDweights>
__global__ void __launch_bounds__(32 * kWarps) backward_kernel(const CombineExpertsBackward a, uint8_t* named) {
  const int lane = threadIdx.x % 32;
  const int64_t slot = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (slot >= a.n_tokens * a.k) return;
  const int64_t row = a.slots[slot];
  if (row < 0 || row >= a.n_rows) {
    if (kDweights && lane == 0) a.dweights[slot] = row < 0 ? 0.f : NAN;
    return;
  }
  if (kDx && lane == 0) named[row] = 1;
  const float weight = kDx && a.weights ? a.weights[slot] : 1.f;
  const X* dy = static_cast<const X*>(a.dy) + slot / a.k * a.dy_stride;
  const X* x = kDweights ? static_cast<const X*>(a.x) + row * a.x_stride : nullptr;
  X* dx = kDx ? static_cast<X*>(a.dx) + row * a.n_cols : nullptr;
  float sum = 0.f;
  for (int64_t first = lane * kVec; first < a.n_cols; first += kReads * 32 * kVec) {
    Pack<X, kVec> d[kReads], v[kReads] = {};
#pragma unroll
    for (int j = 0; j < kReads; ++j) {
      const int64_t col = first + j * 32 * kVec;
      if (col >= a.n_cols) continue;
      d[j] = load<X, kVec>(dy + col);
      if (kDweights) v[j] = load<X, kVec>(x + col);
    }
#pragma unroll
    for (int j = 0; j < kReads; ++j) {
      const int64_t col = first + j * 32 * kVec;
      if (col >= a.n_cols) continue;
      Pack<X, kVec> out;
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        const float grad = to_float(d[j].values[i]);
        if (kDweights) sum += grad * to_float(v[j].values[i]);
        out.values[i] = from_float<X>(weight * grad);
      }
      if (kDx) store(dx + col, out);
    }
  }
  if (kDweights) {
    sum = warp_sum<32>(sum);
    if (lane == 0) a.dweights[slot] = sum;
  }
}

// Zeroes the rows that no slot refers to, one warp per row.
template <class X, int kVec>
__global__ void __launch_bounds__(32 * kWarps) rest_kernel(const CombineExpertsBackward a, const uint8_t* named) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (row >= a.n_rows || named[row]) return;
  X* dx = static_cast<X*>(a.dx) + row * a.n_cols;
  Pack<X, kVec> zeros;
#pragma unroll
  for (int i = 0; i < kVec; ++i) zeros.values[i] = from_float<X>(0.f);
  for (int64_t col = threadIdx.x % 32 * kVec; col < a.n_cols; col += 32 * kVec) store(dx + col, zeros);
}

// Calls f(Tag<X>, Constant<values per read>).
template <class F>
cudaError_t with_width(Dtype type, bool vectors, F&& f) {
  return with_type(type, [&](auto x) {
    constexpr int kVec = 16 / sizeof(FK_TYPE(x));
    return vectors ? f(x, Constant<kVec>{}) : f(x, Constant<1>{});
  });
}

cudaError_t launch_warps(void (*kernel)(CombineExpertsBackward, uint8_t*), const CombineExpertsBackward& a,
                         uint8_t* named, cudaStream_t stream) {
  const int64_t blocks = (a.n_tokens * a.k + kWarps - 1) / kWarps;
  if (blocks == 0) return cudaSuccess;
  if (blocks > kMaxBlocks) return cudaErrorInvalidConfiguration;
  return launch(kernel, dim3(static_cast<unsigned>(blocks)), dim3(32 * kWarps), 0, stream, a, named);
}

}  // namespace

cudaError_t combine_experts_forward(const CombineExpertsForward& a, cudaStream_t stream) {
  const bool vectors = aligned(a.x, a.type, {a.x_stride, a.n_cols}) && aligned(a.y);
  return with_width(a.type, vectors, [&](auto x, auto vec) {
    using X = FK_TYPE(x);
    constexpr int kVec = decltype(vec)::value;
    const int64_t packs = (a.n_cols + kVec - 1) / kVec, warps = (packs + 31) / 32;
    const int threads = static_cast<int>(warps * 32 < kMaxThreads ? warps * 32 : kMaxThreads);
    const int64_t tiles = (packs + threads - 1) / threads;
    if (tiles > kMaxBlocks || a.n_tokens > kMaxBlocks / tiles) return cudaErrorInvalidConfiguration;
    const dim3 grid(static_cast<unsigned>(a.n_tokens * tiles));
    const auto kernel = a.weights ? forward_kernel<X, kVec, true> : forward_kernel<X, kVec, false>;
    return launch(kernel, grid, dim3(threads), 0, stream, a, static_cast<unsigned>(tiles));
  });
}

cudaError_t combine_experts_backward(const CombineExpertsBackward& a, uint8_t* named, cudaStream_t stream) {
  const bool vectors =
      aligned(a.dy, a.type, {a.dy_stride, a.n_cols}) && aligned(a.x, a.type, {a.x_stride}) && aligned(a.dx);
  return with_width(a.type, vectors, [&](auto x, auto vec) {
    using X = FK_TYPE(x);
    constexpr int kVec = decltype(vec)::value;
    const int64_t blocks = (a.n_rows + kWarps - 1) / kWarps;
    if (blocks > kMaxBlocks) return cudaErrorInvalidConfiguration;
    if (!a.dx) return launch_warps(backward_kernel<X, kVec, false, true>, a, named, stream);
    const auto kernel = a.dweights ? backward_kernel<X, kVec, true, true> : backward_kernel<X, kVec, true, false>;
    const cudaError_t error = launch_warps(kernel, a, named, stream);
    if (error != cudaSuccess) return error;
    const dim3 grid(static_cast<unsigned>(blocks));
    return launch(rest_kernel<X, kVec>, grid, dim3(32 * kWarps), 0, stream, a, named);
  });
}

}  // namespace cuda
}  // namespace foundry
