// Cross-entropy forward and backward.
//
// Forward: one block per row. A thread reads kVec neighbouring logits (16 bytes if rows are aligned to that, else one)
// at a stride of the block, with its own maximum and sum of exponentials, without the target's; the block combines
// them. One more block sums a reduced loss, always in the same order. Backward: a block handles a tile of a row. An
// invalid target gives NaN, because a GPU cannot raise an error without a synchronisation.
#include "cross_entropy.h"

#include <limits>

#include "dispatch.cuh"

namespace foundry {
namespace cuda {
namespace {

constexpr int kReads = 4;      // per thread in the backward pass, issued before any is used
constexpr int kThreads = 128;  // of a block in the backward pass, at most
constexpr int kSumThreads = 256;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNotANumber = std::numeric_limits<float>::quiet_NaN();

__device__ __forceinline__ float warp_max(float v) {
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) v = fmaxf(v, __shfl_xor_sync(0xFFFFFFFFu, v, lane));
  return v;
}

// Reduces the block's values; every thread gets the result. kTurn: the calls of one kernel use different shared memory.
template <int kTurn, bool kMax>
__device__ __forceinline__ float block_combine(float v) {
  FK_SHARED(float, scratch, 32);
  const int warps = blockDim.x / 32;
  v = kMax ? warp_max(v) : warp_sum<32>(v);
  if (warps == 1) return v;
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = v;
  __syncthreads();
  float total = scratch[0];
  for (int w = 1; w < warps; ++w) total = kMax ? fmaxf(total, scratch[w]) : total + scratch[w];
  return total;
}

// The soft cap of logits and its derivative.
template <bool kCap>
__device__ __forceinline__ float capped(float x, float cap) {
  return kCap ? cap * tanhf(x / cap) : x;
}
__device__ __forceinline__ float cap_slope(float y, float cap) {
  const float t = y / cap;
  return 1.f - t * t;
}

template <class X, int kVec, bool kCap, bool kSmooth>
__global__ void __launch_bounds__(512) forward_kernel(const CrossEntropyForward a) {
  const CrossEntropyOptions& o = a.options;
  const int64_t row = blockIdx.x, target = a.target[row];
  const bool counts = target != o.ignore_index, known = counts && target >= 0 && target < a.n_cols;
  if (!known) {  // the whole block leaves
    if (threadIdx.x != 0) return;
    const float v = counts ? kNotANumber : 0.f;
    a.loss[row] = v;
    if (a.lse) a.lse[row] = v;
    if (a.lse_low) a.lse_low[row] = v;
    if (a.z_loss) a.z_loss[row] = v;
    return;
  }
  const X* x = static_cast<const X*>(a.logits) + a.logits_strides.offset(a.rows, row);
  const float picked = capped<kCap>(to_float(x[target]), o.softcap);
  const float center = fabsf(picked) < kInfinity ? picked : 0.f;
  float max = -kInfinity, sum = 0.f, offset = 0.f;
  const auto add = [&](int64_t col, const auto& pack) {
    constexpr int kCount = sizeof(pack) / sizeof(X);
    float y[kCount], top = max;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      y[i] = capped<kCap>(to_float(pack.values[i]), o.softcap);
      top = fmaxf(top, y[i]);
    }
    const float shift = top == -kInfinity ? 0.f : top;
    sum *= expf(max - shift);
    max = top;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (col + i == target) continue;
      sum += expf(y[i] - shift);
      if constexpr (kSmooth) offset += (a.weight ? a.weight[col + i] : 1.f) * (y[i] - center);
    }
  };
  const int64_t whole = a.n_cols - a.n_cols % kVec;
  for (int64_t col = static_cast<int64_t>(threadIdx.x) * kVec; col < whole; col += blockDim.x * kVec)
    add(col, load<X, kVec>(x + col));
  if (const int64_t col = whole + threadIdx.x; col < a.n_cols) add(col, load<X, 1>(x + col));

  const float highest = fmaxf(block_combine<0, true>(max), picked);
  const float rest = block_combine<1, false>(sum * expf(max - (highest == -kInfinity ? 0.f : highest)));
  if constexpr (kSmooth) offset = block_combine<2, false>(offset);
  if (threadIdx.x != 0) return;
  const float log_sum = highest == picked ? log1pf(rest) : logf(rest + expf(picked - highest));
  const float total = highest + log_sum, part = total - highest;
  const float lse = highest == kInfinity && picked == picked ? highest : total;  // then the sum is NaN
  const float weight = a.weight ? a.weight[target] : 1.f, z = o.z_loss * weight * lse * lse;
  float loss = weight * (1.f - o.label_smoothing) * ((highest - picked) + log_sum) + z;
  if constexpr (kSmooth) {
    offset += weight * (picked - center);
    const float n = static_cast<float>(a.n_cols), weight_sum = a.weight_sum ? *a.weight_sum : n;
    loss += o.label_smoothing / n * (weight_sum * ((highest - center) + log_sum) - offset);
  }
  a.loss[row] = loss;
  if (a.lse) a.lse[row] = lse;
  if (a.lse_low) a.lse_low[row] = (highest - (total - part)) + (log_sum - part);
  if (a.z_loss) a.z_loss[row] = z;
}

__global__ void __launch_bounds__(kSumThreads) reduce_kernel(const CrossEntropyReduce a) {
  float loss = 0.f, z = 0.f, weight = 0.f;
  for (int64_t row = threadIdx.x; row < a.n_rows; row += kSumThreads) {
    loss += a.losses[row];
    if (a.zs) z += a.zs[row];
    if (!a.mean) continue;
    const int64_t target = a.target[row];
    if (target != a.ignore_index && target >= 0 && target < a.n_cols) weight += a.weight ? a.weight[target] : 1.f;
  }
  loss = block_combine<0, false>(loss);
  z = block_combine<1, false>(z);
  weight = block_combine<2, false>(weight);
  if (threadIdx.x != 0) return;
  const auto reduced = [&](float v) { return !a.mean ? v : weight != 0.f ? v / weight : v == v ? 0.f : v; };
  *a.loss = reduced(loss);
  if (a.z_loss) *a.z_loss = reduced(z);
  if (a.total_weight) *a.total_weight = weight;
}

template <class X, int kVec, bool kCap, bool kSmooth>
__global__ void __launch_bounds__(kThreads) backward_kernel(const CrossEntropyBackward a, unsigned tiles) {
  const CrossEntropyOptions& o = a.options;
  const int64_t row = blockIdx.x / tiles, target = a.target[row];
  const int64_t first = static_cast<int64_t>(blockIdx.x % tiles) * blockDim.x * kReads * kVec;
  const bool counts = target != o.ignore_index, known = counts && target >= 0 && target < a.n_cols;
  float dloss = known ? a.dloss[a.dloss_a_row ? row : 0] : counts ? kNotANumber : 0.f;
  if (a.total_weight && known) dloss = *a.total_weight == 0.f ? 0.f : dloss / *a.total_weight;
  const bool read = known && dloss != 0.f;
  const X* x = static_cast<const X*>(a.logits) + a.logits_strides.offset(a.rows, row);
  X* dx = static_cast<X*>(a.dlogits) + row * a.n_cols;

  const float lse = read ? a.lse[row] : 0.f, low = read ? a.lse_low[row] : 0.f;
  const float weight = known && a.weight ? a.weight[target] : 1.f;
  const float hard = weight * (1.f - o.label_smoothing), from_z = 2.f * o.z_loss * weight * lse;
  const float each = kSmooth ? o.label_smoothing / static_cast<float>(a.n_cols) : 0.f;
  const float weight_sum = a.weight_sum ? *a.weight_sum : static_cast<float>(a.n_cols);
  const float share = hard + from_z + (kSmooth ? each * weight_sum : 0.f);
  const auto write = [&](int64_t col, const auto& pack) {
    auto out = pack;
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(pack) / sizeof(X)); ++i) {
      const float y = capped<kCap>(to_float(pack.values[i]), o.softcap);
      float v;
      if (col + i == target) {
        const float nll = (lse - y) + low, p = expf(-nll);
        v = hard * expm1f(-nll) + from_z * p;
        if constexpr (kSmooth) v += each * (weight_sum * p - weight);
      } else {
        v = share * expf((y - lse) - low);
        if constexpr (kSmooth) v -= each * (a.weight ? a.weight[col + i] : 1.f);
      }
      if constexpr (kCap) v *= cap_slope(y, o.softcap);
      out.values[i] = from_float<X>(read ? v * dloss : dloss);
    }
    store(dx + col, out);
  };
  const auto column = [&](int j) { return first + (static_cast<int64_t>(j) * blockDim.x + threadIdx.x) * kVec; };
  Pack<X, kVec> held[kReads] = {};
#pragma unroll
  for (int j = 0; j < kReads; ++j)
    if (read && column(j) + kVec <= a.n_cols) held[j] = load<X, kVec>(x + column(j));
#pragma unroll
  for (int j = 0; j < kReads; ++j)
    if (column(j) + kVec <= a.n_cols) write(column(j), held[j]);
  if (kVec == 1 || blockIdx.x % tiles != tiles - 1) return;
  const int64_t col = a.n_cols - a.n_cols % kVec + threadIdx.x;  // what no whole read covers
  if (col < a.n_cols) write(col, read ? load<X, 1>(x + col) : Pack<X, 1>{});
}

// Calls f(Tag<X>, values per read, whether there is a cap, whether there is smoothing).
template <class F>
cudaError_t with_kinds(Dtype type, const CrossEntropyOptions& options, bool vectors, F&& f) {
  const auto smoothed = [&](auto x, auto vec, auto cap) {
    return options.label_smoothing > 0.f ? f(x, vec, cap, Constant<true>{}) : f(x, vec, cap, Constant<false>{});
  };
  const auto sized = [&](auto x, auto vec) {
    return options.softcap > 0.f ? smoothed(x, vec, Constant<true>{}) : smoothed(x, vec, Constant<false>{});
  };
  return with_type(type, [&](auto x) {
    constexpr int kVec = 16 / sizeof(FK_TYPE(x));
    return vectors ? sized(x, Constant<kVec>{}) : sized(x, Constant<1>{});
  });
}

// Threads for n reads: a power of two of whole warps, at most `most`.
int threads_for(int64_t n, int most) {
  int threads = 32;
  while (threads < most && threads < n) threads *= 2;
  return threads;
}

// Whether logits are read 16 bytes at a time. One row alone is treated like one of several contiguous rows, so that it
// gets the same bits.
bool by_vectors(const void* logits, Dtype type, const Rows& rows, const RowStrides& strides, int64_t n_cols) {
  return aligned(logits, type, rows, strides) && (rows.count() > 1 || aligned(logits, type, {n_cols}));
}

}  // namespace

cudaError_t cross_entropy_forward(const CrossEntropyForward& a, cudaStream_t stream) {
  const int64_t rows = a.rows.count();
  if (rows > kMaxBlocks) return cudaErrorInvalidConfiguration;
  const bool vectors = by_vectors(a.logits, a.type, a.rows, a.logits_strides, a.n_cols);
  return with_kinds(a.type, a.options, vectors, [&](auto x, auto vec, auto cap, auto smooth) {
    constexpr int kVec = decltype(vec)::value;
    const auto kernel = forward_kernel<FK_TYPE(x), kVec, decltype(cap)::value, decltype(smooth)::value>;
    const int threads = threads_for(a.n_cols / kVec / 4, 512);  // of a narrow row, each reads a few times
    return launch(kernel, dim3(static_cast<unsigned>(rows)), dim3(threads), 0, stream, a);
  });
}

cudaError_t cross_entropy_reduce(const CrossEntropyReduce& a, cudaStream_t stream) {
  return launch(reduce_kernel, dim3(1), dim3(kSumThreads), 0, stream, a);
}

cudaError_t cross_entropy_backward(const CrossEntropyBackward& a, cudaStream_t stream) {
  const RowStrides out{{a.n_cols, a.n_cols, a.n_cols}};
  const bool vectors =
      by_vectors(a.logits, a.type, a.rows, a.logits_strides, a.n_cols) && aligned(a.dlogits, a.type, a.rows, out);
  return with_kinds(a.type, a.options, vectors, [&](auto x, auto vec, auto cap, auto smooth) {
    constexpr int kVec = decltype(vec)::value;
    const auto kernel = backward_kernel<FK_TYPE(x), kVec, decltype(cap)::value, decltype(smooth)::value>;
    const int threads = threads_for((a.n_cols + kReads * kVec - 1) / (kReads * kVec), kThreads);
    const int64_t width = static_cast<int64_t>(threads) * kReads * kVec, tiles = (a.n_cols + width - 1) / width;
    const int64_t blocks = a.rows.count() * tiles;
    if (blocks > kMaxBlocks) return cudaErrorInvalidConfiguration;
    return launch(kernel, dim3(static_cast<unsigned>(blocks)), dim3(threads), 0, stream, a,
                  static_cast<unsigned>(tiles));
  });
}

}  // namespace cuda
}  // namespace foundry
