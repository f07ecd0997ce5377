// RMSNorm and, with kCentered, LayerNorm, forward and backward.
//
// A group of kThreads threads takes a row; narrow rows share a block. A thread reads kVec neighbouring values (16 bytes
// where rows are aligned to that, else one value) at a stride of the group, and caches the first kCached of those reads
// in registers; the rest of a wider row is read again. Sums are in float. LayerNorm's variance is that around the mean
// as it is rounded, corrected by what this leaves, so that no digits are lost where the mean is large.
//
// Backward: the blocks are persistent and take row after row. Each block sums dW over its rows (in registers, or in the
// block's row of the partial buffer for what is not cached), and the bias's gradient too; a second kernel sums
// over the blocks, always in the same order and without atomics.
#include "rms_norm.h"

#include "dispatch.cuh"
#include "dropout.cuh"

namespace foundry {
namespace cuda {
namespace {

constexpr int kCached = 4;
constexpr int kBlock = 128;  // threads of a block, unless a row needs more

// Sum over the kThreads threads of a row. Calls alternate between two halves of `scratch`, so that one barrier is
// enough: the next call writes to the other half.
template <int kThreads>
__device__ __forceinline__ float group_sum(float v, int call) {
  v = warp_sum<kThreads>(v);
  if constexpr (kThreads <= 32) {
    return v;
  } else {
    constexpr int kWarps = kThreads / 32;
    FK_SHARED(float, scratch, 2 * kWarps);
    const int half = (call & 1) * kWarps;
    if (threadIdx.x % 32 == 0) scratch[half + threadIdx.x / 32] = v;
    __syncthreads();
    float total = 0.f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) total += scratch[half + w];
    return total;
  }
}

// weight + offset at kVec columns, in float; 1 where there is no weight.
template <class W, int kVec>
__device__ __forceinline__ Pack<float, kVec> load_weight(const void* weight, float offset, int64_t col) {
  Pack<float, kVec> out;
  if (weight == nullptr) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) out.values[i] = 1.f;
    return out;
  }
  const Pack<W, kVec> raw = load<W, kVec>(static_cast<const W*>(weight) + col);
#pragma unroll
  for (int i = 0; i < kVec; ++i) out.values[i] = to_float(raw.values[i]) + offset;
  return out;
}

template <class X, class W, class Y, int kVec, int kThreads, bool kCentered, bool kDropout>
__global__ void __launch_bounds__(kThreads > kBlock ? kThreads : kBlock, kCentered ? 1 : 0)
    forward_kernel(const RmsNormForward a) {
  const int lane = threadIdx.x % kThreads;
  const int64_t n_rows = a.rows.count();
  const int64_t wanted = static_cast<int64_t>(blockIdx.x) * (blockDim.x / kThreads) + threadIdx.x / kThreads;
  // A group past the last row repeats it, so that all threads meet at every shuffle and barrier; it writes nothing.
  const bool live = wanted < n_rows;
  const int64_t row = live ? wanted : n_rows - 1;
  const X* x = static_cast<const X*>(a.x) + a.x_strides.offset(a.rows, row);
  const X* residual = a.residual ? static_cast<const X*>(a.residual) + a.residual_strides.offset(a.rows, row) : nullptr;
  X* h = static_cast<X*>(a.h) + row * a.n_cols;
  Y* y = static_cast<Y*>(a.y) + row * a.n_cols;
  uint64_t seed = 0;
  if constexpr (kDropout) seed = static_cast<uint64_t>(*a.dropout.seed);

  const auto read = [&](int64_t col) {
    Pack<X, kVec> v = load<X, kVec>(x + col);
    if (residual) {
      const Pack<X, kVec> r = load<X, kVec>(residual + col);
      float factors[kVec];
      if constexpr (kDropout) dropout_factors(factors, a.dropout, seed, row, col);
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        const float added = kDropout ? to_float(v.values[i]) * factors[i] : to_float(v.values[i]);
        v.values[i] = from_float<X>(added + to_float(r.values[i]));
      }
    }
    return v;
  };
  float total = 0.f;  // of squares, or for a mean of values
  const auto add_up = [&](const Pack<X, kVec>& v) {
#pragma unroll
    for (int i = 0; i < kVec; ++i)
      total += kCentered ? to_float(v.values[i]) : to_float(v.values[i]) * to_float(v.values[i]);
  };
  const auto column = [&](int64_t read_number) { return (read_number * kThreads + lane) * kVec; };

  Pack<X, kVec> cached[kCached];
#pragma unroll
  for (int j = 0; j < kCached; ++j)  // all reads are issued before any is used
    if (column(j) < a.n_cols) cached[j] = read(column(j));
#pragma unroll
  for (int j = 0; j < kCached; ++j)
    if (column(j) < a.n_cols) add_up(cached[j]);
  for (int64_t col = column(kCached); col < a.n_cols; col += kThreads * kVec) add_up(read(col));

  const float mean = group_sum<kThreads>(total, 0) / static_cast<float>(a.n_cols);
  float mean_square = mean, rest = 0.f;
  if constexpr (kCentered) {
    float rests = 0.f, squares = 0.f;
    const auto add_rests = [&](const Pack<X, kVec>& v) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        const float d = to_float(v.values[i]) - mean;
        rests += d;
        squares += d * d;
      }
    };
#pragma unroll
    for (int j = 0; j < kCached; ++j)
      if (column(j) < a.n_cols) add_rests(cached[j]);
    for (int64_t col = column(kCached); col < a.n_cols; col += kThreads * kVec) add_rests(read(col));
    rest = group_sum<kThreads>(rests, 1) / static_cast<float>(a.n_cols);
    const float variance = group_sum<kThreads>(squares, 2) / static_cast<float>(a.n_cols) - rest * rest;
    mean_square = variance < 0.f ? 0.f : variance;
  }
  const float rstd = 1.f / sqrtf(mean_square + a.eps);
  if (!live) return;
  if (a.rstd && lane == 0) {
    a.rstd[row] = rstd;
    if constexpr (kCentered) a.mean[row] = mean + rest;
  }

  const auto write = [&](int64_t col, const Pack<X, kVec>& v) {
    if (residual) store(h + col, v);
    const Pack<float, kVec> w = load_weight<W, kVec>(a.weight, a.weight_offset, col);
    Pack<Y, kVec> out;
    if constexpr (kCentered) {
      Pack<W, kVec> bias{};
      if (a.bias) bias = load<W, kVec>(static_cast<const W*>(a.bias) + col);
#pragma unroll
      for (int i = 0; i < kVec; ++i)
        out.values[i] =
            from_float<Y>((to_float(v.values[i]) - mean - rest) * rstd * w.values[i] + to_float(bias.values[i]));
    } else {
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        float n = to_float(v.values[i]) * rstd;
        if (a.round_before_weight) n = to_float(from_float<X>(n));
        out.values[i] = from_float<Y>(n * w.values[i]);
      }
    }
    store(y + col, out);
  };
#pragma unroll
  for (int j = 0; j < kCached; ++j)
    if (column(j) < a.n_cols) write(column(j), cached[j]);
  for (int64_t col = column(kCached); col < a.n_cols; col += kThreads * kVec) write(col, read(col));
}

// Writes the block's sums of what its threads have summed for their cached columns.
template <int kThreads, int kVec>
__device__ __forceinline__ void write_partial(const float (&dw)[kCached][kVec], float* partial, int64_t n_cols) {
  const int lane = threadIdx.x % kThreads, group = threadIdx.x / kThreads, groups = blockDim.x / kThreads;
  const auto column = [&](int64_t read_number) { return (read_number * kThreads + lane) * kVec; };
  if constexpr (kThreads >= kBlock) {
#pragma unroll
    for (int j = 0; j < kCached; ++j)
      if (column(j) < n_cols) {
#pragma unroll
        for (int i = 0; i < kVec; ++i) partial[column(j) + i] = dw[j][i];
      }
  } else {  // the groups of the block add up in shared memory, one after another
    FK_SHARED(float, sums, kThreads * kCached * kVec);
    for (int adding = 0; adding < groups; ++adding) {
      if (group == adding)
#pragma unroll
        for (int j = 0; j < kCached; ++j)
#pragma unroll
          for (int i = 0; i < kVec; ++i) {
            const int at = static_cast<int>(column(j)) + i;
            sums[at] = adding == 0 ? dw[j][i] : sums[at] + dw[j][i];
          }
      __syncthreads();
    }
    for (int col = threadIdx.x; col < n_cols; col += blockDim.x) partial[col] = sums[col];
  }
}

template <class X, class W, class Y, int kVec, int kThreads, bool kCentered, bool kDropout>
__global__ void __launch_bounds__(kThreads > kBlock ? kThreads : kBlock, 1) backward_kernel(const RmsNormBackward a) {
  const int lane = threadIdx.x % kThreads, group = threadIdx.x / kThreads, groups = blockDim.x / kThreads;
  const int64_t n_rows = a.rows.count();
  const auto column = [&](int64_t read_number) { return (read_number * kThreads + lane) * kVec; };
  float* partial = a.dw_partial ? a.dw_partial + static_cast<int64_t>(blockIdx.x) * a.n_cols : nullptr;
  float* db_partial = nullptr;
  if constexpr (kCentered)
    if (a.db_partial) db_partial = a.db_partial + static_cast<int64_t>(blockIdx.x) * a.n_cols;
  float dw[kCached][kVec] = {}, db[kCached][kVec] = {};
  uint64_t seed = 0;
  if constexpr (kDropout) seed = static_cast<uint64_t>(*a.dropout.seed);

  int iteration = 0;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * groups;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * groups; first < n_rows; first += stride, ++iteration) {
    const bool live = first + group < n_rows;
    const int64_t row = live ? first + group : n_rows - 1;  // as in the forward pass
    const X* x = static_cast<const X*>(a.x) + a.x_strides.offset(a.rows, row);
    const Y* dy = static_cast<const Y*>(a.dy) + a.dy_strides.offset(a.rows, row);
    const X* dh = a.dh ? static_cast<const X*>(a.dh) + a.dh_strides.offset(a.rows, row) : nullptr;
    X* dx = static_cast<X*>(a.dx) + row * a.n_cols;
    const float rstd = live ? a.rstd[row] : 0.f;
    float center = 0.f;
    if constexpr (kCentered) center = a.mean[row];
    const auto normalized = [&](X v) { return kCentered ? (to_float(v) - center) * rstd : to_float(v) * rstd; };

    // Adds to the sums of dy * weight * x * rstd and, centered, dy * weight. What the row adds to dW, and the bias's
    // gradient, go to `add`.
    float products = 0.f, grads = 0.f;
    const auto accumulate = [&](int64_t col, const Pack<X, kVec>& px, const Pack<Y, kVec>& pdy, auto&& add) {
      const Pack<float, kVec> w = load_weight<W, kVec>(a.weight, a.weight_offset, col);
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        const float grad = to_float(pdy.values[i]), n = normalized(px.values[i]);
        products += grad * w.values[i] * n;
        if constexpr (kCentered) grads += grad * w.values[i];
        add(i, grad * (!kCentered && a.round_before_weight ? to_float(from_float<X>(n)) : n), grad);
      }
    };
    Pack<X, kVec> cached_x[kCached];
    Pack<Y, kVec> cached_dy[kCached];
#pragma unroll
    for (int j = 0; j < kCached; ++j)
      if (column(j) < a.n_cols) {
        cached_x[j] = load<X, kVec>(x + column(j));
        cached_dy[j] = load<Y, kVec>(dy + column(j));
      }
#pragma unroll
    for (int j = 0; j < kCached; ++j)
      if (column(j) < a.n_cols)
        accumulate(column(j), cached_x[j], cached_dy[j], [&](int i, float v, float grad) {
          dw[j][i] += live ? v : 0.f;
          if constexpr (kCentered) db[j][i] += live ? grad : 0.f;
        });
    for (int64_t col = column(kCached); col < a.n_cols; col += kThreads * kVec)  // only where one group is the block
      accumulate(col, load<X, kVec>(x + col), load<Y, kVec>(dy + col), [&](int i, float v, float grad) {
        if (partial) partial[col + i] = iteration == 0 ? v : partial[col + i] + v;
        if constexpr (kCentered)
          if (db_partial) db_partial[col + i] = iteration == 0 ? grad : db_partial[col + i] + grad;
      });

    const int call = kCentered ? 2 * iteration : iteration;
    const float mean = group_sum<kThreads>(products, call) / static_cast<float>(a.n_cols);
    float grad_mean = 0.f;
    if constexpr (kCentered) grad_mean = group_sum<kThreads>(grads, call + 1) / static_cast<float>(a.n_cols);
    if (!a.dx || !live) continue;
    const auto write = [&](int64_t col, const Pack<X, kVec>& px, const Pack<Y, kVec>& pdy) {
      const Pack<float, kVec> w = load_weight<W, kVec>(a.weight, a.weight_offset, col);
      Pack<X, kVec> more{}, out, dropped;
      if (dh) more = load<X, kVec>(dh + col);
      float factors[kVec];
      if constexpr (kDropout) dropout_factors(factors, a.dropout, seed, row, col);
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        float grad = to_float(pdy.values[i]) * w.values[i];
        if constexpr (kCentered) grad -= grad_mean;
        float v = rstd * (grad - normalized(px.values[i]) * mean);
        if (dh) v += to_float(more.values[i]);
        out.values[i] = from_float<X>(v);
        if constexpr (kDropout) dropped.values[i] = from_float<X>(v * factors[i]);
      }
      if constexpr (kDropout) {
        store(static_cast<X*>(a.dresidual) + row * a.n_cols + col, out);
        store(dx + col, dropped);
      } else {
        store(dx + col, out);
      }
    };
#pragma unroll
    for (int j = 0; j < kCached; ++j)
      if (column(j) < a.n_cols) write(column(j), cached_x[j], cached_dy[j]);
    for (int64_t col = column(kCached); col < a.n_cols; col += kThreads * kVec)
      write(col, load<X, kVec>(x + col), load<Y, kVec>(dy + col));
  }
  if (partial) write_partial<kThreads>(dw, partial, a.n_cols);
  if constexpr (kCentered)
    if (db_partial) {
      if (partial) __syncthreads();  // the sums of dW have been read
      write_partial<kThreads>(db, db_partial, a.n_cols);
    }
}

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

// Calls f(values per read, threads per row). Rows that are not aligned are rare: two sizes cover them.
template <int kVec, class F>
cudaError_t with_shape(int64_t n_cols, bool vectors, F&& f) {
  if (!vectors) return n_cols <= 32 * kCached ? f(Constant<1>{}, Constant<32>{}) : f(Constant<1>{}, Constant<256>{});
  const int64_t reads = n_cols / kVec;
  if (reads <= 8 * kCached) return f(Constant<kVec>{}, Constant<8>{});
  if (reads <= 32 * kCached) return f(Constant<kVec>{}, Constant<32>{});
  if (reads <= 128 * kCached) return f(Constant<kVec>{}, Constant<128>{});
  return f(Constant<kVec>{}, Constant<256>{});
}

template <bool kCentered, bool kDropout>
cudaError_t launch_forward(const RmsNormForward& a, cudaStream_t stream) {
  const bool vectors = aligned(a.x, a.x_type, {a.n_cols}) && aligned(a.x, a.x_type, a.rows, a.x_strides) &&
                       aligned(a.residual, a.x_type, a.rows, a.residual_strides) && aligned(a.weight) &&
                       aligned(a.bias) && aligned(a.y) && aligned(a.h);
  return with_types<kCentered>(a.x_type, a.weight_type, a.y_type, [&](auto x, auto w, auto y) {
    using X = FK_TYPE(x);
    using W = FK_TYPE(w);
    using Y = FK_TYPE(y);
    return with_shape<16 / sizeof(X)>(a.n_cols, vectors, [&](auto vec, auto threads) {
      constexpr int kVec = decltype(vec)::value, kThreads = decltype(threads)::value;
      const int block = kThreads > kBlock ? kThreads : kBlock;
      const int64_t per_block = block / kThreads, blocks = (a.rows.count() + per_block - 1) / per_block;
      if (blocks > kMaxBlocks) return cudaErrorInvalidConfiguration;
      const dim3 grid(static_cast<unsigned>(blocks));
      return launch(forward_kernel<X, W, Y, kVec, kThreads, kCentered, kDropout>, grid, dim3(block), 0, stream, a);
    });
  });
}

// Calls f(Constant<values per read>, Constant<threads per row>, kernel) for a backward pass.
template <bool kCentered, bool kDropout, class F>
cudaError_t with_backward_kernel(const RmsNormBackward& a, F&& f) {
  const bool vectors = aligned(a.x, a.x_type, {a.n_cols}) && aligned(a.x, a.x_type, a.rows, a.x_strides) &&
                       aligned(a.dy, a.y_type, a.rows, a.dy_strides) && aligned(a.dh, a.x_type, a.rows, a.dh_strides) &&
                       aligned(a.weight) && aligned(a.dx) && aligned(a.dresidual);
  return with_types<kCentered>(a.x_type, a.weight_type, a.y_type, [&](auto x, auto w, auto y) {
    using X = FK_TYPE(x);
    using W = FK_TYPE(w);
    using Y = FK_TYPE(y);
    return with_shape<16 / sizeof(X)>(a.n_cols, vectors, [&](auto vec, auto threads) {
      constexpr int kVec = decltype(vec)::value, kThreads = decltype(threads)::value;
      return f(w, backward_kernel<X, W, Y, kVec, kThreads, kCentered, kDropout>, kThreads);
    });
  });
}

template <bool kCentered, bool kDropout>
int blocks_of(const RmsNormBackward& a, int multiprocessors) {
  int64_t useful = 1, resident = 1;
  with_backward_kernel<kCentered, kDropout>(a, [&](auto, auto kernel, int threads) {
    const int block = threads > kBlock ? threads : kBlock;
    const int64_t rows_per_block = block / threads;
    useful = (a.rows.count() + rows_per_block - 1) / rows_per_block;
    resident = static_cast<int64_t>(resident_blocks(kernel, block)) * multiprocessors;
    return cudaSuccess;
  });
  return static_cast<int>(useful < resident ? useful : resident);
}

template <bool kCentered, bool kDropout>
cudaError_t launch_backward(const RmsNormBackward& a, cudaStream_t stream) {
  return with_backward_kernel<kCentered, kDropout>(a, [&](auto w, auto kernel, int threads) {
    const dim3 grid(a.n_blocks), block(threads > kBlock ? threads : kBlock);
    cudaError_t error = launch(kernel, grid, block, 0, stream, a);
    if (error == cudaSuccess && a.dw)
      error = sum_partials(a.dw_partial, a.n_blocks, a.n_cols, static_cast<FK_TYPE(w)*>(a.dw), stream);
    if (error == cudaSuccess && kCentered && a.db)
      error = sum_partials(a.db_partial, a.n_blocks, a.n_cols, static_cast<FK_TYPE(w)*>(a.db), stream);
    return error;
  });
}

// Calls f(Constant<centered>, Constant<dropout>) as a call says.
template <class Call, class F>
auto with_flags(const Call& a, F&& f) {
  const bool dropout = a.dropout.seed != nullptr;
  if (a.centered) return dropout ? f(Constant<true>{}, Constant<true>{}) : f(Constant<true>{}, Constant<false>{});
  return dropout ? f(Constant<false>{}, Constant<true>{}) : f(Constant<false>{}, Constant<false>{});
}

}  // namespace

cudaError_t rms_norm_forward(const RmsNormForward& a, cudaStream_t stream) {
  return with_flags(
      a, [&](auto centered, auto dropout) { return launch_forward<centered.value, dropout.value>(a, stream); });
}

int rms_norm_backward_blocks(const RmsNormBackward& a, int multiprocessors) {
  return with_flags(
      a, [&](auto centered, auto dropout) { return blocks_of<centered.value, dropout.value>(a, multiprocessors); });
}

cudaError_t rms_norm_backward(const RmsNormBackward& a, cudaStream_t stream) {
  return with_flags(
      a, [&](auto centered, auto dropout) { return launch_backward<centered.value, dropout.value>(a, stream); });
}

}  // namespace cuda
}  // namespace foundry
