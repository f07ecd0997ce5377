// An activation of x + bias, forward and backward.
//
// A thread handles kVec neighbouring columns (16 bytes if rows are aligned to that, else one), keeps their bias, and
// goes down the rows, several at a time: it issues their reads before it uses any. Forward, a block handles
// kForwardRows rows. Backward, the rows are split among as many blocks as the GPU holds at once. A thread loads its
// next rows while it works on the current ones and adds up the bias gradient of its columns, without shared memory or
// atomics and always in the same order. A second kernel sums over the blocks.
#include "bias_gelu.h"

#include "activation.cuh"
#include "dropout.cuh"
#include "vectors.cuh"

namespace foundry {
namespace cuda {
namespace {

constexpr int kForwardRows = 4, kBackwardRows = 2;
constexpr int kThreads = 128;

// The first of a thread's columns, and its block's index among those with the same columns.
template <int kVec>
struct Place {
  int64_t col;
  int64_t row_block;

  __device__ Place(unsigned col_blocks)
      : col((static_cast<int64_t>(blockIdx.x % col_blocks) * blockDim.x + threadIdx.x) * kVec),
        row_block(blockIdx.x / col_blocks) {}
};

// The bias of kVec columns in float; 0 without a bias.
template <class B, int kVec>
__device__ __forceinline__ void load_bias(const void* bias, int64_t col, float (&out)[kVec]) {
  Pack<B, kVec> raw{};
  if (bias) raw = load_global<Reuse::by_other_blocks, B, kVec>(static_cast<const B*>(bias) + col);
  to_floats(raw, out);
}

// kVec columns of up to kRows rows from `first` on. All addresses are computed before the first read.
template <class X, int kVec, int kRows>
__device__ __forceinline__ void load_rows(const void* from, const Rows& rows, const RowStrides& strides, int64_t n_rows,
                                          int64_t first, int64_t col, Pack<X, kVec> (&to)[kRows]) {
  const X* p[kRows];
#pragma unroll
  for (int j = 0; j < kRows; ++j)
    p[j] = static_cast<const X*>(from) + strides.offset(rows, first + j < n_rows ? first + j : n_rows - 1) + col;
#pragma unroll
  for (int j = 0; j < kRows; ++j) to[j] = load_global<Reuse::none, X, kVec>(p[j]);
}

template <class X, class B, Activation kActivation, int kVec, bool kDropout>
__global__ void __launch_bounds__(kThreads, 4)  // without a number ptxas aims at more blocks, and spills
    forward_kernel(const BiasActForward a, unsigned col_blocks) {
  const Place<kVec> place(col_blocks);
  if (place.col >= a.n_cols) return;
  const int64_t n_rows = a.rows.count(), first = place.row_block * kForwardRows;
  Pack<X, kVec> x[kForwardRows];
  load_rows(a.x, a.rows, a.x_strides, n_rows, first, place.col, x);
  float bias[kVec];
  load_bias<B>(a.bias, place.col, bias);
#pragma unroll
  for (int j = 0; j < kForwardRows; ++j)
    if (j == 0 || first + j < n_rows) {
      const DropoutFactors<kDropout, kVec> factors(a.dropout, first + j, place.col);
      float values[kVec];
      to_floats(x[j], values);
#pragma unroll
      for (int i = 0; i < kVec; ++i)
        values[i] = factors.times(activate<kActivation, kRoundedMore<X>>(values[i] + bias[i]).value, i);
      store_global(static_cast<X*>(a.y) + (first + j) * a.n_cols + place.col, from_floats<X>(values));
    }
}

template <class X, class B, Activation kActivation, int kVec, bool kDropout>
__global__ void __launch_bounds__(kThreads, 4) backward_kernel(const BiasActBackward a, unsigned col_blocks) {
  constexpr int kRows = kBackwardRows;
  const Place<kVec> place(col_blocks);
  if (place.col >= a.n_cols) return;
  const int64_t n_rows = a.rows.count(), stride = static_cast<int64_t>(a.n_row_blocks) * kRows;
  float bias[kVec], dbias[kVec] = {};
  load_bias<B>(a.bias, place.col, bias);
  struct Read {
    Pack<X, kVec> x[kRows], dy[kRows];
  } next;
  const auto read_next = [&](int64_t first) {
    load_rows(a.x, a.rows, a.x_strides, n_rows, first, place.col, next.x);
    load_rows(a.dy, a.rows, a.dy_strides, n_rows, first, place.col, next.dy);
  };
  read_next(place.row_block * kRows);
  for (int64_t first = place.row_block * kRows; first < n_rows; first += stride) {
    const Read now = next;
    if (first + stride < n_rows) read_next(first + stride);
#pragma unroll
    for (int j = 0; j < kRows; ++j)
      if (j == 0 || first + j < n_rows) {
        const DropoutFactors<kDropout, kVec> factors(a.dropout, first + j, place.col);
        float x[kVec], dz[kVec];
        to_floats(now.x[j], x);
        to_floats(now.dy[j], dz);
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
          const float slope = activate<kActivation, kRoundedMore<X>>(x[i] + bias[i]).derivative;
          dz[i] = times_slope<kActivation>(factors.times(dz[i], i), slope);
          dbias[i] += dz[i];
        }
        if (a.dx) store_global(static_cast<X*>(a.dx) + (first + j) * a.n_cols + place.col, from_floats<X>(dz));
      }
  }
  if (a.dbias_partial)
    store_global(a.dbias_partial + place.row_block * a.n_cols + place.col, from_floats<float>(dbias));
}

// Calls f(Tag<X>, Tag<B>, activation, values per read, whether there is dropout).
template <class Args, class F>
cudaError_t with_all(const Args& a, bool vectors, F&& f) {
  return with_kinds<Activation::gelu, Activation::gelu_tanh, Activation::silu, Activation::relu>(
      a.type, a.activation, vectors, [&](auto x, auto kind, auto vec) {
        return with_dropout(a.dropout, [&](auto drops) {
          return a.bias_type == Dtype::f32 ? f(x, Tag<float>{}, kind, vec, drops) : f(x, x, kind, vec, drops);
        });
      });
}

int64_t column_blocks(int64_t n_cols, int vec) { return (n_cols + kThreads * vec - 1) / (kThreads * vec); }

}  // namespace

cudaError_t bias_act_forward(const BiasActForward& a, cudaStream_t stream) {
  const bool vectors =
      aligned(a.x, a.type, {a.n_cols}) && aligned(a.x, a.type, a.rows, a.x_strides) && aligned(a.bias) && aligned(a.y);
  return with_all(a, vectors, [&](auto x, auto b, auto kind, auto vec, auto drops) {
    constexpr int kVec = decltype(vec)::value;
    const int64_t col_blocks = column_blocks(a.n_cols, kVec);
    const int64_t blocks = (a.rows.count() + kForwardRows - 1) / kForwardRows * col_blocks;
    if (blocks > kMaxBlocks) return cudaErrorInvalidConfiguration;
    return launch(forward_kernel<FK_TYPE(x), FK_TYPE(b), decltype(kind)::value, kVec, decltype(drops)::value>,
                  dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 0, stream, a, static_cast<unsigned>(col_blocks));
  });
}

// Calls f(Tag<B>, blocks along the columns, kernel) for a backward pass.
template <class F>
cudaError_t with_backward_kernel(const BiasActBackward& a, F&& f) {
  const bool vectors = aligned(a.x, a.type, {a.n_cols}) && aligned(a.x, a.type, a.rows, a.x_strides) &&
                       aligned(a.dy, a.type, a.rows, a.dy_strides) && aligned(a.bias) && aligned(a.dx) &&
                       aligned(a.dbias_partial);
  return with_all(a, vectors, [&](auto x, auto b, auto kind, auto vec, auto drops) {
    constexpr int kVec = decltype(vec)::value;
    return f(b, column_blocks(a.n_cols, kVec),
             backward_kernel<FK_TYPE(x), FK_TYPE(b), decltype(kind)::value, kVec, decltype(drops)::value>);
  });
}

int bias_act_row_blocks(const BiasActBackward& a, int multiprocessors) {
  int64_t useful = 1, resident = 1;
  with_backward_kernel(a, [&](auto, int64_t col_blocks, auto kernel) {
    useful = (a.rows.count() + kBackwardRows - 1) / kBackwardRows;
    resident = static_cast<int64_t>(resident_blocks(kernel, kThreads)) * multiprocessors / col_blocks;
    return cudaSuccess;
  });
  const int64_t blocks = useful < resident ? useful : resident;
  return static_cast<int>(blocks > 1 ? blocks : 1);
}

cudaError_t bias_act_backward(const BiasActBackward& a, cudaStream_t stream) {
  return with_backward_kernel(a, [&](auto b, int64_t col_blocks, auto kernel) {
    const int64_t blocks = a.n_row_blocks * col_blocks;
    if (blocks > kMaxBlocks) return cudaErrorInvalidConfiguration;
    const dim3 grid(static_cast<unsigned>(blocks));
    const cudaError_t error = launch(kernel, grid, dim3(kThreads), 0, stream, a, static_cast<unsigned>(col_blocks));
    if (error != cudaSuccess || !a.dbias) return error;
    return sum_partials(a.dbias_partial, a.n_row_blocks, a.n_cols, static_cast<FK_TYPE(b)*>(a.dbias), stream);
  });
}

}  // namespace cuda
}  // namespace foundry
