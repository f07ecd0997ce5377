// RMSNorm and, with kCentered, LayerNorm, forward and backward.
//
// A group of kThreads threads handles a row; narrow rows share a block. A thread reads kVec neighbouring values (16
// bytes if rows are aligned to that, else one value) at a stride of the group. It keeps the first kCached reads in
// registers and issues all of them before it uses any; the rest of a wider row is read again. Sums are in float.
// LayerNorm computes the variance around the rounded mean and then corrects for the rounding, which avoids cancellation
// for large means.
//
// Backward blocks are persistent: they loop over rows and load the next row while they work on the current one. Each
// block sums dW and the bias gradient over its rows (in registers or, for columns that are not cached, in the block's
// row of the partial buffer). A second kernel sums over the blocks, always in the same order and without atomics.
#include "rms_norm.h"

#include "dropout.cuh"
#include "rms_norm_rows.cuh"

namespace foundry {
namespace cuda {
namespace {

template <class X, class W, class Y, int kVec, int kThreads, int kCached, bool kCentered, bool kDropout>
__global__ void __launch_bounds__(kBlock<kThreads>, 1) forward_kernel(const RmsNormForward a, float per_column) {
  const int64_t n_rows = a.rows.count();
  const int64_t wanted = static_cast<int64_t>(blockIdx.x) * (kBlock<kThreads> / kThreads) + threadIdx.x / kThreads;
  // A group past the last row repeats it without writing, so that all threads reach every shuffle and barrier.
  const bool live = kThreads >= kMinBlock || wanted < n_rows;
  const int64_t row = live ? wanted : n_rows - 1;
  const Columns<kVec, kThreads, kCached> columns(a.n_cols);
  const X* x = static_cast<const X*>(a.x) + a.x_strides.offset(a.rows, row);
  Pack<X, kVec> cached[kCached] = {};
#pragma unroll
  for (int j = 0; j < kCached; ++j)
    if (columns.has(j)) cached[j] = load_global<Reuse::none, X, kVec>(x + columns.of(j));

  const X* residual = nullptr;
  X* h = static_cast<X*>(a.h) + row * a.n_cols;
  Y* y = static_cast<Y*>(a.y) + row * a.n_cols;
  const float weight_offset = a.weight ? a.weight_offset : 0.f;
  [[maybe_unused]] uint64_t seed = 0;
  if constexpr (kDropout) seed = static_cast<uint64_t>(*a.dropout.seed);
  const auto added = [&](int64_t col, const Pack<X, kVec>& v, const Pack<X, kVec>& r) {
    float values[kVec], more[kVec];
    to_floats(v, values);
    to_floats(r, more);
    if constexpr (kDropout) {
      float factors[kVec];
      dropout_factors(factors, a.dropout, seed, row, col);
#pragma unroll
      for (int i = 0; i < kVec; ++i) values[i] *= factors[i];
    }
#pragma unroll
    for (int i = 0; i < kVec; ++i) values[i] += more[i];
    return from_floats<X>(values);
  };
  if (a.residual) {
    residual = static_cast<const X*>(a.residual) + a.residual_strides.offset(a.rows, row);
    Pack<X, kVec> more[kCached] = {};
#pragma unroll
    for (int j = 0; j < kCached; ++j)
      if (columns.has(j)) more[j] = load_global<Reuse::none, X, kVec>(residual + columns.of(j));
#pragma unroll
    for (int j = 0; j < kCached; ++j)
      if (columns.has(j)) {
        cached[j] = added(columns.of(j), cached[j], more[j]);
        if (live) store_global(h + columns.of(j), cached[j]);
      }
  }
  // Calls f(column, values) for each read of the thread. What is not cached is read again.
  const auto for_each = [&](auto&& f) {
#pragma unroll
    for (int j = 0; j < kCached; ++j)
      if (columns.has(j)) f(static_cast<int64_t>(columns.of(j)), cached[j]);
    for (int64_t col = columns.first + columns.kWidth; col < a.n_cols; col += kThreads * kVec) {
      Pack<X, kVec> v = load<X, kVec>(x + col);
      if (residual) v = added(col, v, load<X, kVec>(residual + col));
      f(col, v);
    }
  };

  float total[1] = {};  // sum of squares, or of values for a mean
  for_each([&](int64_t, const Pack<X, kVec>& v) {
    float values[kVec];
    to_floats(v, values);
#pragma unroll
    for (int i = 0; i < kVec; ++i) total[0] += kCentered ? values[i] : values[i] * values[i];
  });
  group_sum<kThreads>(total, 0);
  float mean_square = total[0] * per_column;
  [[maybe_unused]] float mean = mean_square, rest = 0.f;
  if constexpr (kCentered) {
    float sums[2] = {};  // of deviations from the mean, and of their squares
    for_each([&](int64_t, const Pack<X, kVec>& v) {
      float values[kVec];
      to_floats(v, values);
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        const float d = values[i] - mean;
        sums[0] += d;
        sums[1] += d * d;
      }
    });
    group_sum<kThreads>(sums, 0);
    rest = sums[0] * per_column;
    const float variance = sums[1] * per_column - rest * rest;
    mean_square = variance < 0.f ? 0.f : variance;
  }
  const float rstd = rsqrtf(mean_square + a.eps);
  if (!live) return;
  if (a.rstd && threadIdx.x % kThreads == 0) {
    a.rstd[row] = rstd;
    if constexpr (kCentered) a.mean[row] = mean + rest;
  }
  for_each([&](int64_t col, const Pack<X, kVec>& v) {
    if (residual && col >= columns.kWidth) store_global(h + col, v);
    float values[kVec], w[kVec];
    to_floats(v, values);
    weight_to_floats<kCentered>(load_weight<W, kVec>(a.weight, col), weight_offset, w);
    if constexpr (kCentered) {
      Pack<W, kVec> raw{};
      if (a.bias) raw = load_global<Reuse::by_other_blocks, W, kVec>(static_cast<const W*>(a.bias) + col);
      float bias[kVec];
      to_floats(raw, bias);
#pragma unroll
      for (int i = 0; i < kVec; ++i) values[i] = (values[i] - mean - rest) * rstd * w[i] + bias[i];
    } else {
#pragma unroll
      for (int i = 0; i < kVec; ++i) values[i] *= rstd;
      if (a.round_before_weight) to_floats(from_floats<X>(values), values);
#pragma unroll
      for (int i = 0; i < kVec; ++i) values[i] *= w[i];
    }
    store_global(y + col, from_floats<Y>(values));
  });
}

template <class X, class W, class Y, int kVec, int kThreads, int kCached, bool kCentered, bool kDropout>
__global__ void __launch_bounds__(kBlock<kThreads>, kThreads == 256 ? 2 : 1)
    backward_kernel(const RmsNormBackward a, float per_column) {
  constexpr int kGroups = kBlock<kThreads> / kThreads;
  const int group = threadIdx.x / kThreads;
  const int64_t n_rows = a.rows.count(), stride = static_cast<int64_t>(gridDim.x) * kGroups;
  const Columns<kVec, kThreads, kCached> columns(a.n_cols);
  float* partial = a.dw_partial ? a.dw_partial + blockIdx.x * a.n_cols : nullptr;
  float* db_partial = nullptr;
  if constexpr (kCentered)
    if (a.db_partial) db_partial = a.db_partial + blockIdx.x * a.n_cols;
  float dw[kCached][kVec] = {}, db[kCached][kVec] = {};
  const float weight_offset = a.weight ? a.weight_offset : 0.f;
  [[maybe_unused]] uint64_t seed = 0;
  if constexpr (kDropout) seed = static_cast<uint64_t>(*a.dropout.seed);
  // A thread with few columns keeps their weight in registers; otherwise L1 does.
  constexpr bool kKeepsWeight = kCached * sizeof(Pack<W, kVec>) <= 32;
  Pack<W, kVec> kept[kCached] = {};
  if constexpr (kKeepsWeight) {
#pragma unroll
    for (int j = 0; j < kCached; ++j)
      if (columns.has(j)) kept[j] = load_weight<W, kVec>(a.weight, columns.of(j));
  }
  const auto weight_of = [&](int j) { return kKeepsWeight ? kept[j] : load_weight<W, kVec>(a.weight, columns.of(j)); };

  // The row of this group among those that begin at `first`. Past the last row it is repeated, as in the forward pass.
  const auto is_live = [&](int64_t first) { return kGroups == 1 || first + group < n_rows; };
  const auto row_of = [&](int64_t first) { return is_live(first) ? first + group : n_rows - 1; };
  const auto x_of = [&](int64_t row) { return static_cast<const X*>(a.x) + a.x_strides.offset(a.rows, row); };
  const auto dy_of = [&](int64_t row) { return static_cast<const Y*>(a.dy) + a.dy_strides.offset(a.rows, row); };
  const auto dh_of = [&](int64_t row) { return static_cast<const X*>(a.dh) + a.dh_strides.offset(a.rows, row); };
  const auto read_row = [&](int64_t row) {
    RowValues<X, Y, kVec, kCached> read{};
    const X* x = x_of(row);
    const Y* dy = dy_of(row);
#pragma unroll
    for (int j = 0; j < kCached; ++j)
      if (columns.has(j)) {
        read.x[j] = load_global<Reuse::none, X, kVec>(x + columns.of(j));
        read.dy[j] = load_global<Reuse::none, Y, kVec>(dy + columns.of(j));
      }
    read.rstd = a.rstd[row];
    if constexpr (kCentered) read.mean = a.mean[row];
    return read;
  };

  int iteration = 0;
  int64_t first = static_cast<int64_t>(blockIdx.x) * kGroups;
  RowValues<X, Y, kVec, kCached> next{};
  if (first < n_rows) next = read_row(row_of(first));
  for (; first < n_rows; first += stride, ++iteration) {
    const RowValues<X, Y, kVec, kCached> now = next;
    const bool live = is_live(first), last = first + stride >= n_rows;
    const int64_t row = row_of(first);
    Pack<X, kVec> more[kCached] = {};
    if (a.dh) {
      const X* dh = dh_of(row);
#pragma unroll
      for (int j = 0; j < kCached; ++j)
        if (columns.has(j)) more[j] = load_global<Reuse::none, X, kVec>(dh + columns.of(j));
    }
    if (!last) {
      next = read_row(row_of(first + stride));
      if (kVec > 1 && a.dh) {
        const X* dh = dh_of(row_of(first + stride));
#pragma unroll
        for (int j = 0; j < kCached; ++j)
          if (columns.has(j)) prefetch_to_l2(dh + columns.of(j));
      }
    }
    const float rstd = live ? now.rstd : 0.f;
    const auto normalize = [&](const Pack<X, kVec>& px, float (&n)[kVec]) {
      to_floats(px, n);
#pragma unroll
      for (int i = 0; i < kVec; ++i) n[i] = kCentered ? (n[i] - now.mean) * rstd : n[i] * rstd;
    };

    // Adds to the sum of dy * weight * x * rstd and, if centered, of dy * weight. Calls `add` with the row's
    // contributions to dW and the bias gradient.
    float sums[kCentered ? 2 : 1] = {};
    const auto accumulate = [&](const Pack<W, kVec>& weight, const Pack<X, kVec>& px, const Pack<Y, kVec>& pdy,
                                auto&& add) {
      float w[kVec], n[kVec], grad[kVec];
      weight_to_floats<kCentered>(weight, weight_offset, w);
      to_floats(pdy, grad);
      normalize(px, n);
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        sums[0] += grad[i] * w[i] * n[i];
        if constexpr (kCentered) sums[1] += grad[i] * w[i];
      }
      if (!kCentered && a.round_before_weight) to_floats(from_floats<X>(n), n);
#pragma unroll
      for (int i = 0; i < kVec; ++i) add(i, grad[i] * n[i], grad[i]);
    };
#pragma unroll
    for (int j = 0; j < kCached; ++j)
      if (columns.has(j))
        accumulate(weight_of(j), now.x[j], now.dy[j], [&](int i, float v, float grad) {
          dw[j][i] += live ? v : 0.f;
          if constexpr (kCentered) db[j][i] += live ? grad : 0.f;
        });
    if (a.n_cols > columns.kWidth) {  // the block is one group
      const X* x = x_of(row);
      const Y* dy = dy_of(row);
      for (int64_t col = columns.first + columns.kWidth; col < a.n_cols; col += kThreads * kVec)
        accumulate(load_weight<W, kVec>(a.weight, col), load<X, kVec>(x + col), load<Y, kVec>(dy + col),
                   [&](int i, float v, float grad) {
                     if (partial) partial[col + i] = iteration == 0 ? v : partial[col + i] + v;
                     if constexpr (kCentered)
                       if (db_partial) db_partial[col + i] = iteration == 0 ? grad : db_partial[col + i] + grad;
                   });
    }

    group_sum<kThreads>(sums, iteration);
    if (!a.dx || !live) continue;
    const float mean = sums[0] * per_column;
    [[maybe_unused]] float grad_mean = 0.f;
    if constexpr (kCentered) grad_mean = sums[1] * per_column;
    const auto write = [&](int64_t col, const Pack<W, kVec>& weight, const Pack<X, kVec>& px, const Pack<Y, kVec>& pdy,
                           const Pack<X, kVec>& pdh) {
      float w[kVec], n[kVec], grad[kVec], dh[kVec];
      weight_to_floats<kCentered>(weight, weight_offset, w);
      to_floats(pdy, grad);
      to_floats(pdh, dh);
      normalize(px, n);
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        grad[i] *= w[i];
        if constexpr (kCentered) grad[i] -= grad_mean;
        grad[i] = rstd * (grad[i] - n[i] * mean) + dh[i];
      }
      if constexpr (kDropout) {
        store_global(static_cast<X*>(a.dresidual) + row * a.n_cols + col, from_floats<X>(grad));
        float factors[kVec];
        dropout_factors(factors, a.dropout, seed, row, col);
#pragma unroll
        for (int i = 0; i < kVec; ++i) grad[i] *= factors[i];
      }
      store_global(static_cast<X*>(a.dx) + row * a.n_cols + col, from_floats<X>(grad));
    };
#pragma unroll
    for (int j = 0; j < kCached; ++j)
      if (columns.has(j)) write(columns.of(j), weight_of(j), now.x[j], now.dy[j], more[j]);
    if (a.n_cols > columns.kWidth) {
      const X* x = x_of(row);
      const Y* dy = dy_of(row);
      const X* dh = a.dh ? dh_of(row) : nullptr;
      for (int64_t col = columns.first + columns.kWidth; col < a.n_cols; col += kThreads * kVec) {
        Pack<X, kVec> pdh{};
        if (dh) pdh = load<X, kVec>(dh + col);
        write(col, load_weight<W, kVec>(a.weight, col), load<X, kVec>(x + col), load<Y, kVec>(dy + col), pdh);
      }
    }
  }
  if (partial) write_partial<kThreads>(dw, partial, a.n_cols);
  if constexpr (kCentered)
    if (db_partial) {
      if (kGroups > 1 && partial) __syncthreads();  // the sums of dW have been read
      write_partial<kThreads>(db, db_partial, a.n_cols);
    }
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
    const auto launch_shape = [&](auto shape) {
      using S = decltype(shape);
      constexpr int kPerBlock = kBlock<S::kThreads> / S::kThreads;
      const int64_t blocks = (a.rows.count() + kPerBlock - 1) / kPerBlock;
      if (blocks > kMaxBlocks) return cudaErrorInvalidConfiguration;
      return launch(forward_kernel<X, W, Y, S::kVec, S::kThreads, S::kCached, kCentered, kDropout>,
                    dim3(static_cast<unsigned>(blocks)), dim3(kBlock<S::kThreads>), 0, stream, a,
                    1.f / static_cast<float>(a.n_cols));
    };
    return vectors ? with_shape_of(ForwardShapes<16 / sizeof(X), kDropout>(), a.n_cols, launch_shape)
                   : with_shape_of(ScalarShapes<kDropout>(), a.n_cols, launch_shape);
  });
}

// Calls f(Tag<W>, threads per block, rows per block, kernel) for a backward pass.
template <bool kCentered, bool kDropout, class F>
cudaError_t with_backward_kernel(const RmsNormBackward& a, F&& f) {
  const bool vectors = aligned(a.x, a.x_type, {a.n_cols}) && aligned(a.x, a.x_type, a.rows, a.x_strides) &&
                       aligned(a.dy, a.y_type, a.rows, a.dy_strides) && aligned(a.dh, a.x_type, a.rows, a.dh_strides) &&
                       aligned(a.weight) && aligned(a.dx) && aligned(a.dresidual) && aligned(a.dw_partial) &&
                       aligned(a.db_partial);
  return with_types<kCentered>(a.x_type, a.weight_type, a.y_type, [&](auto x, auto w, auto y) {
    using X = FK_TYPE(x);
    using W = FK_TYPE(w);
    using Y = FK_TYPE(y);
    const auto call = [&](auto shape) {
      using S = decltype(shape);
      constexpr int kThreads = kBlock<S::kThreads>;
      return f(w, kThreads, kThreads / S::kThreads,
               backward_kernel<X, W, Y, S::kVec, S::kThreads, S::kCached, kCentered, kDropout>);
    };
    return vectors ? with_shape_of(BackwardShapes<16 / sizeof(X), kDropout>(), a.n_cols, call)
                   : with_shape_of(ScalarShapes<kDropout>(), a.n_cols, call);
  });
}

template <bool kCentered, bool kDropout>
int blocks_of(const RmsNormBackward& a, int multiprocessors) {
  int64_t useful = 1, resident = 1;
  with_backward_kernel<kCentered, kDropout>(a, [&](auto, int threads, int rows_per_block, auto kernel) {
    useful = (a.rows.count() + rows_per_block - 1) / rows_per_block;
    resident = static_cast<int64_t>(resident_blocks(kernel, threads)) * multiprocessors;
    return cudaSuccess;
  });
  return static_cast<int>(useful < resident ? useful : resident);
}

template <bool kCentered, bool kDropout>
cudaError_t launch_backward(const RmsNormBackward& a, cudaStream_t stream) {
  return with_backward_kernel<kCentered, kDropout>(a, [&](auto w, int threads, int, auto kernel) {
    const float per_column = 1.f / static_cast<float>(a.n_cols);
    cudaError_t error = launch(kernel, dim3(a.n_blocks), dim3(threads), 0, stream, a, per_column);
    if (error == cudaSuccess && a.dw)
      error = sum_partials(a.dw_partial, a.n_blocks, a.n_cols, static_cast<FK_TYPE(w)*>(a.dw), stream);
    if (error == cudaSuccess && kCentered && a.db)
      error = sum_partials(a.db_partial, a.n_blocks, a.n_cols, static_cast<FK_TYPE(w)*>(a.db), stream);
    return error;
  });
}

// Calls f(Constant<centered>, Constant<dropout>) for the call.
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
