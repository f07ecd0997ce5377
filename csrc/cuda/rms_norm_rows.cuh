// Shared by the kernels of rms_norm.cu: which threads handle a row, what they read, and how they sum over it.
#pragma once

#include <type_traits>

#include "dispatch.cuh"
#include "vectors.cuh"

namespace foundry {
namespace cuda {

constexpr int kMinBlock = 128;  // threads of a block, unless a row needs more
template <int kThreads> constexpr int kBlock = kThreads > kMinBlock ? kThreads : kMinBlock;

// Sums over the kThreads threads of a row. Calls alternate between two halves of `scratch`, so one barrier is enough:
// the next call writes to the other half.
template <int kThreads, int kSums>
__device__ __forceinline__ void group_sum(float (&sums)[kSums], int call) {
#pragma unroll
  for (int s = 0; s < kSums; ++s) sums[s] = warp_sum<kThreads>(sums[s]);
  if constexpr (kThreads > 32) {
    constexpr int kWarps = kThreads / 32, kBlockWarps = kBlock<kThreads> / 32;
    FK_SHARED(float, scratch, 2 * kSums * kBlockWarps);
    const int half = (call & 1) * (kSums * kBlockWarps), warp = threadIdx.x / 32;
    if (threadIdx.x % 32 == 0) {
#pragma unroll
      for (int s = 0; s < kSums; ++s) scratch[half + s * kBlockWarps + warp] = sums[s];
    }
    __syncthreads();
    const int first = kBlockWarps == kWarps ? half : half + warp / kWarps * kWarps;
#pragma unroll
    for (int s = 0; s < kSums; ++s) {
      sums[s] = 0.f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) sums[s] += scratch[first + s * kBlockWarps + w];
    }
  }
}

// The columns of a thread. Indices of cached reads are small.
template <int kVec, int kThreads, int kCached>
struct Columns {
  static constexpr int kWidth = kVec * kThreads * kCached;  // columns that are cached
  int first, end;

  __device__ explicit Columns(int64_t n_cols)
      : first(threadIdx.x % kThreads * kVec),
        end(static_cast<int>(n_cols < kWidth ? n_cols : kWidth)) {}
  __device__ int of(int read) const { return first + read * (kThreads * kVec); }
  __device__ bool has(int read) const { return of(read) < end; }
};

// The stored weight at kVec columns; 1 without a weight. As words, see vectors.cuh.
template <class W, int kVec>
__device__ __forceinline__ Pack<W, kVec> load_weight(const void* weight, int64_t col) {
  if (weight) return load_global<Reuse::by_other_blocks, W, kVec>(static_cast<const W*>(weight) + col);
  return ones<W, kVec>();
}

// weight + offset in float. There is no offset without a weight or for LayerNorm.
template <bool kCentered, class W, int kVec>
__device__ __forceinline__ void weight_to_floats(const Pack<W, kVec>& raw, float offset, float (&out)[kVec]) {
  to_floats(raw, out);
  if constexpr (!kCentered) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) out[i] += offset;
  }
}

// Writes the block's sums, added over its threads, for their cached columns.
template <int kThreads, int kCached, int kVec>
__device__ __forceinline__ void write_partial(const float (&dw)[kCached][kVec], float* partial, int64_t n_cols) {
  const Columns<kVec, kThreads, kCached> columns(n_cols);
  if constexpr (kThreads >= kMinBlock) {
#pragma unroll
    for (int j = 0; j < kCached; ++j)
      if (columns.has(j)) store_global(partial + columns.of(j), from_floats<float>(dw[j]));
  } else {  // the groups of the block add to shared memory one after another
    constexpr int kGroups = kMinBlock / kThreads;
    const int group = threadIdx.x / kThreads;
    FK_SHARED(float, sums, kThreads * kCached * kVec);
    for (int adding = 0; adding < kGroups; ++adding) {
      if (group == adding)
#pragma unroll
        for (int j = 0; j < kCached; ++j)
#pragma unroll
          for (int i = 0; i < kVec; ++i) {
            const int at = columns.of(j) + i;
            sums[at] = adding == 0 ? dw[j][i] : sums[at] + dw[j][i];
          }
      __syncthreads();
    }
    for (int col = threadIdx.x; col < n_cols; col += kMinBlock) partial[col] = sums[col];
  }
}

// One read of a row by a thread.
template <class X, class Y, int kVec, int kCached>
struct RowValues {
  Pack<X, kVec> x[kCached];
  Pack<Y, kVec> dy[kCached];
  float rstd, mean;
};

// Calls f(Tag<X>, Tag<W>, Tag<Y>) for the memory types.
template <bool kCentered, class F>
cudaError_t with_types(Dtype x, Dtype w, Dtype y, F&& f) {
  if (x == Dtype::f32) return f(Tag<float>{}, Tag<float>{}, Tag<float>{});
  const auto half = [&](auto t) {
    if (w != Dtype::f32) return f(t, t, t);
    if constexpr (kCentered) return f(t, Tag<float>{}, t);
    else return y == Dtype::f32 ? f(t, Tag<float>{}, Tag<float>{}) : f(t, Tag<float>{}, t);
  };
  return x == Dtype::bf16 ? half(Tag<__nv_bfloat16>{}) : half(Tag<__half>{});
}

// Threads per row and reads per thread that registers hold. A kernel is compiled for each shape.
template <int kVec_, int kThreads_, int kCached_>
struct Shape {
  static constexpr int kVec = kVec_, kThreads = kThreads_, kCached = kCached_;
};
template <class... Shapes> struct ShapeList {};

// Calls f with the first shape that caches a whole row, or with the last one.
template <class Only, class F>
cudaError_t with_shape_of(ShapeList<Only>, int64_t, F&& f) {
  return f(Only());
}
template <class First, class Second, class... More, class F>
cudaError_t with_shape_of(ShapeList<First, Second, More...>, int64_t n_cols, F&& f) {
  if (n_cols <= First::kVec * First::kThreads * First::kCached) return f(First());
  return with_shape_of(ShapeList<Second, More...>(), n_cols, f);
}

// Unaligned rows are rare, and dropout costs more than an unsuitable shape, so few shapes cover them.
template <bool kDropout>
using ScalarShapes =
    std::conditional_t<kDropout, ShapeList<Shape<1, 256, 4>>, ShapeList<Shape<1, 32, 4>, Shape<1, 256, 4>>>;
template <int kVec, bool kDropout>
using ForwardShapes =
    std::conditional_t<kDropout, ShapeList<Shape<kVec, 32, 4>, Shape<kVec, 128, 4>, Shape<kVec, 512, 4>>,
                       ShapeList<Shape<kVec, 8, 4>, Shape<kVec, 32, 4>, Shape<kVec, 64, 4>, Shape<kVec, 128, 4>,
                                 Shape<kVec, 256, 4>, Shape<kVec, 512, 4>>>;
// In backward a thread also holds the next row and the sums of dW, so it has fewer reads and a row has more threads.
template <int kVec, bool kDropout>
using BackwardShapes = std::conditional_t<
    kDropout, ShapeList<Shape<kVec, 32, 4>, Shape<kVec, 128, 2>, Shape<kVec, 512, 2>>,
    ShapeList<Shape<kVec, 8, 4>, Shape<kVec, 32, 4>, Shape<kVec, 128, 2>, Shape<kVec, 256, 2>, Shape<kVec, 512, 2>>>;

}  // namespace cuda
}  // namespace foundry
