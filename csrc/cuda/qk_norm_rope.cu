// RMSNorm of each head of q and k followed by RoPE, forward and backward.
//
// A group of kThreads lanes of a warp handles a head. The heads of a token are adjacent, so only the first one loads
// the table row from beyond the L1 cache. Backward blocks are persistent and loop over heads. dW is summed as in
// rms_norm.cu: each block over its heads, then a second kernel over the blocks, always in the same order.
#include "rope.cuh"

namespace foundry {
namespace cuda {
namespace {

// Units that a lane caches in registers; the rest of a wider head is read again.
template <int kVec>
constexpr int kCached = kVec == 1 ? 4 : 1;

// weight + offset of a unit; 1 without a weight.
template <int kVec, bool kInterleaved>
__device__ __forceinline__ void load_weight(const void* weight, Dtype type, float offset,
                                            const Units<kVec, kInterleaved>& units, int64_t unit,
                                            float (&out)[2 * kVec]) {
#pragma unroll
  for (int i = 0; i < 2 * kVec; ++i) out[i] = 1.f;
  if (weight == nullptr) return;
#pragma unroll
  for (int read = 0; read < 2; ++read) {
    if (read == 1 && !units.has_second(unit)) return;
    float values[kVec];
    load_floats<kVec>(weight, type, read == 0 ? units.first(unit) : units.second(unit), values);
#pragma unroll
    for (int i = 0; i < kVec; ++i) out[read * kVec + i] = values[i] + offset;
  }
}

template <class X, int kVec, int kThreads, bool kInterleaved>
__global__ void __launch_bounds__(kRopeBlock) norm_forward_kernel(const QkNormRopeForward a) {
  const Units<kVec, kInterleaved> units{a.tables.half, a.width};
  const int lane = threadIdx.x % kThreads;
  const int64_t all_heads = a.heads[0].n_heads + a.heads[1].n_heads, n_rows = a.all_tokens * all_heads;
  const int64_t wanted = static_cast<int64_t>(blockIdx.x) * (kRopeBlock / kThreads) + threadIdx.x / kThreads;
  // A group past the last head repeats it without writing, so that all lanes reach every shuffle.
  const bool live = wanted < n_rows;
  const int64_t at = live ? wanted : n_rows - 1, token = at / all_heads;
  int64_t h = at % all_heads;
  const QkNormRopeHeads& heads = heads_of(a.heads, h);
  const int64_t b = token / a.n_tokens, t = token % a.n_tokens, row = a.tables.row(b, t);
  const bool has_row = a.tables.has_row(row);
  const X* x = static_cast<const X*>(heads.x) + heads.x_strides.offset(b, h, t);
  X* y = static_cast<X*>(heads.y) + heads.y_strides.offset(b, h, t);

  float squares = 0.f;
  const auto add_squares = [&](const Raw<X, kVec>& raw) {
    float v[2 * kVec];
    widen(raw, v);
#pragma unroll
    for (int i = 0; i < 2 * kVec; ++i) squares += v[i] * v[i];
  };
  const auto unit_of = [&](int j) { return static_cast<int64_t>(j) * kThreads + lane; };
  Raw<X, kVec> cached[kCached<kVec>];
#pragma unroll
  for (int j = 0; j < kCached<kVec>; ++j)  // all reads are issued before any is used
    if (unit_of(j) < units.count()) cached[j] = load_unit(x, units, unit_of(j));
#pragma unroll
  for (int j = 0; j < kCached<kVec>; ++j)
    if (unit_of(j) < units.count()) add_squares(cached[j]);
  for (int64_t unit = unit_of(kCached<kVec>); unit < units.count(); unit += kThreads)
    add_squares(load_unit(x, units, unit));

  const float rstd = 1.f / sqrtf(warp_sum<kThreads>(squares) / static_cast<float>(a.width) + a.eps);
  if (!live) return;
  if (heads.rstd && lane == 0) heads.rstd[(b * heads.n_heads + h) * a.n_tokens + t] = rstd;

  const auto write = [&](int64_t unit, const Raw<X, kVec>& raw) {
    float v[2 * kVec], w[2 * kVec];
    widen(raw, v);
    load_weight(heads.weight, heads.weight_type, a.weight_offset, units, unit, w);
#pragma unroll
    for (int i = 0; i < 2 * kVec; ++i) {
      v[i] *= rstd;
      if (a.round_before_weight) v[i] = to_float(from_float<X>(v[i]));
      v[i] *= w[i];
    }
    if (has_row && units.rotates(unit)) rotate<kVec, kInterleaved>(v, load_angles<kVec>(a.tables, b, row, unit), 1.f);
    if (!has_row) fill_nan(v);
    store_unit(y, units, unit, v);
  };
#pragma unroll
  for (int j = 0; j < kCached<kVec>; ++j)
    if (unit_of(j) < units.count()) write(unit_of(j), cached[j]);
  for (int64_t unit = unit_of(kCached<kVec>); unit < units.count(); unit += kThreads)
    write(unit, load_unit(x, units, unit));
}

// blockIdx.y selects q or k. If a head has more units than are cached, the block is a single group.
template <class X, int kVec, int kThreads, bool kInterleaved>
__global__ void __launch_bounds__(kRopeBlock, 1) norm_backward_kernel(const QkNormRopeBackward a) {
  constexpr int kUnits = kCached<kVec>;
  const QkNormRopeGradients& heads = a.heads[blockIdx.y];
  if (static_cast<int>(blockIdx.x) >= heads.n_blocks) return;
  const Units<kVec, kInterleaved> units{a.tables.half, a.width};
  const int lane = threadIdx.x % kThreads, group = threadIdx.x / kThreads, groups = blockDim.x / kThreads;
  const int64_t n_rows = a.all_tokens * heads.n_heads;
  const auto unit_of = [&](int j) { return static_cast<int64_t>(j) * kThreads + lane; };
  float* partial = heads.dw_partial ? heads.dw_partial + static_cast<int64_t>(blockIdx.x) * a.width : nullptr;
  float dw[kUnits][2 * kVec] = {};

  int iteration = 0;
  const int64_t stride = static_cast<int64_t>(heads.n_blocks) * groups;
  for (int64_t begin = static_cast<int64_t>(blockIdx.x) * groups; begin < n_rows; begin += stride, ++iteration) {
    const bool live = begin + group < n_rows;
    const int64_t at = live ? begin + group : n_rows - 1;  // as in the forward pass
    const int64_t token = at / heads.n_heads, h = at % heads.n_heads;
    const int64_t b = token / a.n_tokens, t = token % a.n_tokens, row = a.tables.row(b, t);
    const bool has_row = a.tables.has_row(row);
    const X* x = static_cast<const X*>(heads.x) + heads.x_strides.offset(b, h, t);
    const X* dy = static_cast<const X*>(heads.dy) + heads.dy_strides.offset(b, h, t);
    X* dx = static_cast<X*>(heads.dx) + heads.dx_strides.offset(b, h, t);
    const float rstd = heads.rstd[(b * heads.n_heads + h) * a.n_tokens + t];

    // grad = the gradient rotated back, times the weight. Adds to the sum of grad * x * rstd. Calls `add` with the
    // unit's contribution to dW.
    float products = 0.f;
    const auto accumulate = [&](int64_t unit, const Raw<X, kVec>& raw_x, const Raw<X, kVec>& raw_dy,
                                float (&grad)[2 * kVec], auto&& add) {
      float v[2 * kVec], w[2 * kVec];
      widen(raw_x, v);
      widen(raw_dy, grad);
      load_weight(heads.weight, heads.weight_type, a.weight_offset, units, unit, w);
      if (has_row && units.rotates(unit))
        rotate<kVec, kInterleaved>(grad, load_angles<kVec>(a.tables, b, row, unit), -1.f);
      if (!has_row) fill_nan(grad);
#pragma unroll
      for (int i = 0; i < 2 * kVec; ++i) {
        const float n = v[i] * rstd;
        add(i, grad[i] * (a.round_before_weight ? to_float(from_float<X>(n)) : n));
        grad[i] *= w[i];
        products += grad[i] * n;
      }
    };
    Raw<X, kVec> cached[kUnits];
    float cached_grad[kUnits][2 * kVec];
#pragma unroll
    for (int j = 0; j < kUnits; ++j)
      if (unit_of(j) < units.count()) {
        cached[j] = load_unit(x, units, unit_of(j));
        accumulate(unit_of(j), cached[j], load_unit(dy, units, unit_of(j)), cached_grad[j],
                   [&](int i, float v) { dw[j][i] += live ? v : 0.f; });
      }
    for (int64_t unit = unit_of(kUnits); unit < units.count(); unit += kThreads) {  // only if the block is one group
      float grad[2 * kVec];
      accumulate(unit, load_unit(x, units, unit), load_unit(dy, units, unit), grad, [&](int i, float v) {
        const int64_t col = (i < kVec ? units.first(unit) : units.second(unit)) + i % kVec;
        if (partial && col < a.width) partial[col] = iteration == 0 ? v : partial[col] + v;
      });
    }

    const float mean = warp_sum<kThreads>(products) / static_cast<float>(a.width);
    if (!heads.dx || !live) continue;
    const auto write = [&](int64_t unit, const Raw<X, kVec>& raw_x, float (&grad)[2 * kVec]) {
      float v[2 * kVec];
      widen(raw_x, v);
#pragma unroll
      for (int i = 0; i < 2 * kVec; ++i) v[i] = rstd * (grad[i] - v[i] * rstd * mean);
      store_unit(dx, units, unit, v);
    };
#pragma unroll
    for (int j = 0; j < kUnits; ++j)
      if (unit_of(j) < units.count()) write(unit_of(j), cached[j], cached_grad[j]);
    for (int64_t unit = unit_of(kUnits); unit < units.count(); unit += kThreads) {
      const Raw<X, kVec> raw = load_unit(x, units, unit);
      float grad[2 * kVec];
      accumulate(unit, raw, load_unit(dy, units, unit), grad, [](int, float) {});
      write(unit, raw, grad);
    }
  }
  if (!partial) return;

  // The groups of the block add to shared memory one after another.
  constexpr int kSums = kThreads * kUnits * 2 * kVec;
  FK_SHARED(float, sums, kSums);
  for (int adding = 0; adding < groups; ++adding) {
    if (group == adding)
#pragma unroll
      for (int j = 0; j < kUnits; ++j)
#pragma unroll
        for (int i = 0; i < 2 * kVec; ++i) {
          const int at = static_cast<int>(unit_of(j)) * 2 * kVec + i;
          sums[at] = adding == 0 ? dw[j][i] : sums[at] + dw[j][i];
        }
    __syncthreads();
  }
  for (int at = threadIdx.x; at < kSums; at += blockDim.x) {
    const int64_t unit = at / (2 * kVec);
    const int i = at % (2 * kVec);
    if (unit >= units.count()) continue;
    const int64_t col = (i < kVec ? units.first(unit) : units.second(unit)) + i % kVec;
    if (col < a.width) partial[col] = sums[at];
  }
}

// Calls f(lanes per head).
template <int kVec, class F>
cudaError_t with_threads(int64_t units, F&& f) {
  if constexpr (kVec > 1) {
    if (units <= 8) return f(Constant<8>{});
    if (units <= 16) return f(Constant<16>{});
  }
  return f(Constant<32>{});
}

}  // namespace

cudaError_t qk_norm_rope_forward(const QkNormRopeForward& a, cudaStream_t stream) {
  bool vectors = rope_vectors(a.tables, a.width, a.type);
  for (const QkNormRopeHeads& h : a.heads)
    vectors = vectors && aligned(h.x, a.type, h.x_strides) && aligned(h.y, a.type, h.y_strides) && aligned(h.weight);
  return with_rope_reads(a.type, vectors, a.interleaved, [&](auto x, auto vec, auto interleaved) {
    constexpr int kVec = decltype(vec)::value;
    return with_threads<kVec>(rope_units(a.tables, a.width, kVec), [&](auto threads) {
      constexpr int kThreads = decltype(threads)::value;
      const int64_t per_block = kRopeBlock / kThreads, all_heads = a.heads[0].n_heads + a.heads[1].n_heads;
      const int64_t blocks = (a.all_tokens * all_heads + per_block - 1) / per_block;
      if (blocks > kMaxBlocks) return cudaErrorInvalidConfiguration;
      const auto kernel = norm_forward_kernel<FK_TYPE(x), kVec, kThreads, decltype(interleaved)::value>;
      return launch(kernel, dim3(static_cast<unsigned>(blocks)), dim3(kRopeBlock), 0, stream, a);
    });
  });
}

int qk_norm_rope_backward_blocks(int64_t n_rows, int multiprocessors) {
  const int64_t useful = (n_rows + 15) / 16, resident = 4LL * multiprocessors;  // a block handles up to 16 at a time
  return static_cast<int>(useful < resident ? useful : resident);
}

cudaError_t qk_norm_rope_backward(const QkNormRopeBackward& a, cudaStream_t stream) {
  bool vectors = rope_vectors(a.tables, a.width, a.type);
  for (const QkNormRopeGradients& h : a.heads)
    vectors = vectors && aligned(h.x, a.type, h.x_strides) && aligned(h.dy, a.type, h.dy_strides) &&
              aligned(h.dx, a.type, h.dx_strides) && aligned(h.weight);
  const cudaError_t error = with_rope_reads(a.type, vectors, a.interleaved, [&](auto x, auto vec, auto interleaved) {
    constexpr int kVec = decltype(vec)::value;
    const int64_t units = rope_units(a.tables, a.width, kVec);
    return with_threads<kVec>(units, [&](auto threads) {
      constexpr int kThreads = decltype(threads)::value;
      const int blocks = a.heads[0].n_blocks > a.heads[1].n_blocks ? a.heads[0].n_blocks : a.heads[1].n_blocks;
      const int block = units > kThreads * kCached<kVec> ? kThreads : kRopeBlock;
      const auto kernel = norm_backward_kernel<FK_TYPE(x), kVec, kThreads, decltype(interleaved)::value>;
      return launch(kernel, dim3(blocks, 2), dim3(block), 0, stream, a);
    });
  });
  if (error != cudaSuccess) return error;
  for (const QkNormRopeGradients& h : a.heads) {
    if (!h.dw) continue;
    const cudaError_t summed = with_type(h.weight_type, [&](auto w) {
      return sum_partials(h.dw_partial, h.n_blocks, a.width, static_cast<FK_TYPE(w)*>(h.dw), stream);
    });
    if (summed != cudaSuccess) return summed;
  }
  return cudaSuccess;
}

}  // namespace cuda
}  // namespace foundry
