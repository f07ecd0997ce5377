// An activation of x + bias, forward and backward.
//
// A thread takes kVec neighbouring columns (16 bytes where rows are aligned to that, else one), whose bias it keeps,
// and goes down the rows, kRows at a time: it issues their reads before it uses any. Forward, a block takes kRows rows.
// Backward, the rows are split among as many blocks as the GPU holds at once, and a thread adds up what its columns
// contribute to the bias's gradient: without shared memory or atomics, and always in the same order. A second kernel
// sums over the blocks.
#include "bias_gelu.h"

#include "activation.cuh"
#include "dropout.cuh"

namespace foundry {
namespace cuda {
namespace {

constexpr int kRows = 4;
constexpr int kThreads = 128;

// The first of a thread's columns, and its block's number among those that share the columns.
template <int kVec>
struct Place {
  int64_t col;
  int64_t row_block;

  __device__ Place(unsigned col_blocks)
      : col((static_cast<int64_t>(blockIdx.x % col_blocks) * blockDim.x + threadIdx.x) * kVec),
        row_block(blockIdx.x / col_blocks) {}
};

// The bias of kVec columns in float; 0 where there is none.
template <class B, int kVec>
__device__ __forceinline__ Pack<float, kVec> load_bias(const void* bias, int64_t col) {
  Pack<B, kVec> raw{};
  if (bias) raw = load<B, kVec>(static_cast<const B*>(bias) + col);
  Pack<float, kVec> out;
#pragma unroll
  for (int i = 0; i < kVec; ++i) out.values[i] = to_float(raw.values[i]);
  return out;
}

template <class X, class B, Activation kActivation, int kVec, bool kDropout>
__global__ void __launch_bounds__(kThreads, 4)  // without a number ptxas aims at more blocks, and spills for it
    forward_kernel(const BiasActForward a, unsigned col_blocks) {
  const Place<kVec> place(col_blocks);
  if (place.col >= a.n_cols) return;
  const int64_t n_rows = a.rows.count(), first = place.row_block * kRows;
  Pack<X, kVec> x[kRows];
#pragma unroll
  for (int j = 0; j < kRows; ++j)
    if (first + j < n_rows)
      x[j] = load<X, kVec>(static_cast<const X*>(a.x) + a.x_strides.offset(a.rows, first + j) + place.col);
  const Pack<float, kVec> bias = load_bias<B, kVec>(a.bias, place.col);
#pragma unroll
  for (int j = 0; j < kRows; ++j)
    if (first + j < n_rows) {
      const DropoutFactors<kDropout, kVec> factors(a.dropout, first + j, place.col);
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        const float y = activate<kActivation>(to_float(x[j].values[i]) + bias.values[i]).value;
        x[j].values[i] = from_float<X>(factors.times(y, i));
      }
      store(static_cast<X*>(a.y) + (first + j) * a.n_cols + place.col, x[j]);
    }
}

template <class X, class B, Activation kActivation, int kVec, bool kDropout>
__global__ void __launch_bounds__(kThreads) backward_kernel(const BiasActBackward a, unsigned col_blocks) {
  const Place<kVec> place(col_blocks);
  if (place.col >= a.n_cols) return;
  const int64_t n_rows = a.rows.count(), stride = static_cast<int64_t>(a.n_row_blocks) * kRows;
  const Pack<float, kVec> bias = load_bias<B, kVec>(a.bias, place.col);
  float dbias[kVec] = {};
  for (int64_t first = place.row_block * kRows; first < n_rows; first += stride) {
    Pack<X, kVec> x[kRows], dy[kRows];
#pragma unroll
    for (int j = 0; j < kRows; ++j)
      if (first + j < n_rows) {
        x[j] = load<X, kVec>(static_cast<const X*>(a.x) + a.x_strides.offset(a.rows, first + j) + place.col);
        dy[j] = load<X, kVec>(static_cast<const X*>(a.dy) + a.dy_strides.offset(a.rows, first + j) + place.col);
      }
#pragma unroll
    for (int j = 0; j < kRows; ++j)
      if (first + j < n_rows) {
        Pack<X, kVec> dx;
        const DropoutFactors<kDropout, kVec> factors(a.dropout, first + j, place.col);
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
          const float slope = activate<kActivation>(to_float(x[j].values[i]) + bias.values[i]).derivative;
          const float dz = times_slope<kActivation>(factors.times(to_float(dy[j].values[i]), i), slope);
          dbias[i] += dz;
          dx.values[i] = from_float<X>(dz);
        }
        if (a.dx) store(static_cast<X*>(a.dx) + (first + j) * a.n_cols + place.col, dx);
      }
  }
  if (!a.dbias_partial) return;
#pragma unroll
  for (int i = 0; i < kVec; ++i) a.dbias_partial[place.row_block * a.n_cols + place.col + i] = dbias[i];
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
    const int64_t blocks = (a.rows.count() + kRows - 1) / kRows * col_blocks;
    if (blocks > kMaxBlocks) return cudaErrorInvalidConfiguration;
    return launch(forward_kernel<FK_TYPE(x), FK_TYPE(b), decltype(kind)::value, kVec, decltype(drops)::value>,
                  dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 0, stream, a, static_cast<unsigned>(col_blocks));
  });
}

// Calls f(Tag<B>, columns' blocks, kernel) for a backward pass.
template <class F>
cudaError_t with_backward_kernel(const BiasActBackward& a, F&& f) {
  const bool vectors = aligned(a.x, a.type, {a.n_cols}) && aligned(a.x, a.type, a.rows, a.x_strides) &&
                       aligned(a.dy, a.type, a.rows, a.dy_strides) && aligned(a.bias) && aligned(a.dx);
  return with_all(a, vectors, [&](auto x, auto b, auto kind, auto vec, auto drops) {
    constexpr int kVec = decltype(vec)::value;
    return f(b, column_blocks(a.n_cols, kVec),
             backward_kernel<FK_TYPE(x), FK_TYPE(b), decltype(kind)::value, kVec, decltype(drops)::value>);
  });
}

int bias_act_row_blocks(const BiasActBackward& a, int multiprocessors) {
  int64_t useful = 1, resident = 1;
  with_backward_kernel(a, [&](auto, int64_t col_blocks, auto kernel) {
    useful = (a.rows.count() + kRows - 1) / kRows;
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
