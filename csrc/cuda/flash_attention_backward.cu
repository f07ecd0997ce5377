// Attention backward with one warp per few rows, for all inputs that the tensor core kernels do not support. One kernel
// computes dq and one dk and dv; each recomputes the weights. No two blocks add to the same element, so equal inputs
// give equal bits.
#include "flash_attention_backward.cuh"
#include "flash_attention_rows.cuh"

namespace foundry {
namespace cuda {
namespace {

using namespace rows;

// --- delta, and the gradient of the sinks
// -----------------------------------------------------------------------------

constexpr int kDeltaWarps = 4;

template <class T>
__global__ void __launch_bounds__(32 * kDeltaWarps) attention_delta(AttentionBackward a) {
  const Place place(a.n_heads, a.n_queries, kDeltaWarps, blockIdx.x);
  const Head h(a, place.sequence, place.head);
  const int lane = threadIdx.x % 32, i = place.tile * kDeltaWarps + threadIdx.x / 32;
  if (i >= h.q_len) return;
  const T* out = static_cast<const T*>(a.out) + h.query_at(a.out_strides, i);
  const T* dout = static_cast<const T*>(a.dout) + h.query_at(a.dout_strides, i);
  float sum = 0.f;
  for (int d = lane; d < a.head_dim_v; d += 32) sum = fmaf(to_float(dout[d]), to_float(out[d]), sum);
  sum = warp_sum<32>(sum);
  const int64_t at = h.query_at(a.row_strides, i);
  if (lane != 0) return;
  if (a.dlse) sum -= a.dlse[at];
  const bool empty = a.lse[at] == static_cast<double>(kNone);  // a row without keys
  a.delta[at] = empty ? 0.f : sum;
  if (!a.numbers) return;
  const SplitLse lse(a.lse[at]);
  constexpr double kLog2e = 1.4426950408889634;
  Pack<float, 2> numbers{static_cast<float>(a.lse[at] * kLog2e), sum};
  if (a.bias) numbers = {lse.lse, static_cast<float>(lse.rest * kLog2e)};
  if (empty) numbers = {INFINITY, 0.f};
  store(a.numbers + 2 * at, numbers);
}

constexpr int kSinkThreads = 256;

// One block per head, over all its rows.
__global__ void __launch_bounds__(kSinkThreads) sum_dsinks(AttentionBackward a) {
  FK_SHARED(double, sums, kSinkThreads);
  const int head = blockIdx.x;
  const bool packed = a.starts_q != nullptr;
  const int64_t rows_each = packed ? a.total_q : a.n_queries, n = packed ? 1 : a.n_sequences;
  double sum = 0.0;
  for (int64_t b = 0; b < n; ++b)
    for (int64_t i = threadIdx.x; i < rows_each; i += kSinkThreads) {
      const int64_t at = b * a.row_strides.batch + head * a.row_strides.head + i * a.row_strides.token;
      if (a.lse[at] == static_cast<double>(kNone)) continue;
      const SplitLse lse(a.lse[at]);
      sum -= exp((static_cast<double>(a.sinks[head]) - lse.lse) - lse.rest) * static_cast<double>(a.delta[at]);
    }
  sums[threadIdx.x] = sum;
  __syncthreads();
  for (int step = kSinkThreads / 2; step > 0; step /= 2) {
    if (static_cast<int>(threadIdx.x) < step) sums[threadIdx.x] = sums[threadIdx.x] + sums[threadIdx.x + step];
    __syncthreads();
  }
  if (threadIdx.x == 0) a.dsinks[head] = static_cast<float>(double(sums[0]));
}

// --- dq
// ---------------------------------------------------------------------------------------------------------------

// A warp's shared memory: its rows of two tensors, and two weights for 32 rows of the others.
inline __host__ __device__ int backward_floats(int head_dim, int head_dim_v) {
  return kRows * (head_dim + head_dim_v + 64);
}

template <class T, int kCols>
__global__ void __launch_bounds__(32 * kWarps) attention_dq_rows(AttentionBackward a) {
  FK_DYNAMIC_SHARED(float, shared);
  const Place place(a.n_heads, a.n_queries, kWarps * kRows, blockIdx.x);
  const Head h(a, place.sequence, place.head);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int first = (place.tile * kWarps + warp) * kRows, last = min(first + kRows, h.q_len) - 1;
  if (first > last) return;
  const int d = a.head_dim, dv = a.head_dim_v;
  const int queries = warp * backward_floats(d, dv), douts = queries + kRows * d, weights = douts + kRows * dv;
  const T* k = static_cast<const T*>(a.k) + h.key_at(a.k_strides, 0);
  const T* v = static_cast<const T*>(a.v) + h.key_at(a.v_strides, 0);
  const uint64_t seed = a.dropout.threshold ? static_cast<uint64_t>(*a.dropout.seed) : 0;

  read_rows(shared, queries, d, static_cast<const T*>(a.q) + h.query_at(a.q_strides, first), a.q_strides.token, first,
            h.q_len, d);
  read_rows(shared, douts, dv, static_cast<const T*>(a.dout) + h.query_at(a.dout_strides, first), a.dout_strides.token,
            first, h.q_len, dv);
  __syncwarp();
  float sums[kRows][kCols] = {};
  const int begin = h.first_key(first), end = h.end_key(last);
  for (int key = begin; key < end; key += 32) {
    const int j = key + lane;
    float products[kRows] = {}, grads[kRows] = {};
    if (j < end) {
      multiply(products, shared, queries, d, k + j * a.k_strides.token, d);
      multiply(grads, shared, douts, dv, v + j * a.v_strides.token, dv);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int i = first + r;
      float ds = 0.f;
      if (i <= last && j >= h.first_key(i) && j < h.end_key(i)) {
        const int64_t at = h.query_at(a.row_strides, i);
        const SplitLse lse(a.lse[at]);
        float derivative;
        const float w = weight_of(logit(a, h, products[r], i, j, derivative), lse);
        const float factor = a.dropout.threshold ? dropout_factor(a.dropout, seed, h, i, j) : 1.f;
        if (w != 0.f) ds = w * (factor * grads[r] - a.delta[at]) * derivative;
      }
      shared[weights + r * 32 + lane] = ds;
    }
    __syncwarp();
    accumulate<kCols>(sums, shared, weights, k + key * a.k_strides.token, a.k_strides.token, min(32, end - key), d);
    __syncwarp();
  }
  T* dq = static_cast<T*>(a.dq) + h.query_at(a.dq_strides, first);
#pragma unroll
  for (int r = 0; r < kRows; ++r)
    if (first + r <= last) write_row(dq + r * a.dq_strides.token, sums[r], a.scale, d);
}

// --- dk and dv
// --------------------------------------------------------------------------------------------------------

template <class T, int kCols, bool kDk, bool kDv>
__global__ void __launch_bounds__(32 * kWarps, 1) attention_dkdv_rows(AttentionBackward a) {
  FK_DYNAMIC_SHARED(float, shared);
  const Place place(a.n_heads / a.group, a.n_keys, kWarps * kRows, blockIdx.x);
  const int kv_head = place.head, group = static_cast<int>(a.group);
  const Head any(a, place.sequence, kv_head * group);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int first = (place.tile * kWarps + warp) * kRows, last = min(first + kRows, any.k_len) - 1;
  if (first > last) return;
  const int d = a.head_dim, dv = a.head_dim_v, keys = warp * backward_floats(d, dv), values = keys + kRows * d;
  const int kept = values + kRows * dv, weights = kept + kRows * 32;
  const uint64_t seed = a.dropout.threshold ? static_cast<uint64_t>(*a.dropout.seed) : 0;

  read_rows(shared, keys, d, static_cast<const T*>(a.k) + any.key_at(a.k_strides, first), a.k_strides.token, first,
            any.k_len, d);
  read_rows(shared, values, dv, static_cast<const T*>(a.v) + any.key_at(a.v_strides, first), a.v_strides.token, first,
            any.k_len, dv);
  __syncwarp();
  float dk_sums[kRows][kCols] = {}, dv_sums[kRows][kCols] = {};
  for (int in_group = 0; in_group < group; ++in_group) {
    const Head h(a, place.sequence, kv_head * group + in_group);
    const T* q = static_cast<const T*>(a.q) + h.query_at(a.q_strides, 0);
    const T* dout = static_cast<const T*>(a.dout) + h.query_at(a.dout_strides, 0);
    const int begin = h.first_query(first), end = h.end_query(last);
    for (int query = begin; query < end; query += 32) {
      const int i = query + lane;
      float products[kRows] = {}, grads[kRows] = {}, delta = 0.f;
      SplitLse lse(0.0);
      if (i < end) {
        multiply(products, shared, keys, d, q + i * a.q_strides.token, d);
        multiply(grads, shared, values, dv, dout + i * a.dout_strides.token, dv);
        const int64_t at = h.query_at(a.row_strides, i);
        lse = SplitLse(a.lse[at]);
        delta = a.delta[at];
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int j = first + r;
        float ds = 0.f, p = 0.f;
        if (j <= last && i >= h.first_query(j) && i < h.end_query(j)) {
          float derivative;
          const float w = weight_of(logit(a, h, products[r], i, j, derivative), lse);
          const float factor = a.dropout.threshold ? dropout_factor(a.dropout, seed, h, i, j) : 1.f;
          if (w != 0.f) ds = w * (factor * grads[r] - delta) * derivative;
          p = w * factor;
        }
        shared[kept + r * 32 + lane] = p;
        shared[weights + r * 32 + lane] = ds;
      }
      __syncwarp();
      const int n = min(32, end - query);
      if constexpr (kDv)
        accumulate<kCols>(dv_sums, shared, kept, dout + query * a.dout_strides.token, a.dout_strides.token, n, dv);
      if constexpr (kDk)
        accumulate<kCols>(dk_sums, shared, weights, q + query * a.q_strides.token, a.q_strides.token, n, d);
      __syncwarp();
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (first + r > last) continue;
    if constexpr (kDk) write_row(static_cast<T*>(a.dk) + any.key_at(a.dk_strides, first + r), dk_sums[r], a.scale, d);
    if constexpr (kDv) write_row(static_cast<T*>(a.dv) + any.key_at(a.dv_strides, first + r), dv_sums[r], 1.f, dv);
  }
}

// --- the gradient of a bias
// -------------------------------------------------------------------------------------------

constexpr int kBiasWarps = 4;

// The range that one element of dbias covers in a dimension: one index, or all that share it.
struct Shared {
  int begin, end;
  __device__ Shared(int64_t size, int64_t index, int64_t all)
      : begin(static_cast<int>(size == 1 ? 0 : index)),
        end(static_cast<int>(size == 1 ? all : index + 1)) {}
};

// One warp for 32 neighbouring elements of a row of dbias, or for one element that all its keys share.
template <class T>
__global__ void __launch_bounds__(32 * kBiasWarps) attention_dbias(AttentionBackward a, int64_t n_warps) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kBiasWarps + threadIdx.x / 32;
  if (index >= n_warps) return;
  const int lane = threadIdx.x % 32;
  const int64_t chunks = (a.dbias_sizes[3] + 31) / 32;
  const int64_t chunk = index % chunks, row = index / chunks, query = row % a.dbias_sizes[2];
  const int64_t head = row / a.dbias_sizes[2] % a.dbias_sizes[1], batch = row / a.dbias_sizes[2] / a.dbias_sizes[1];
  const Shared sequences(a.dbias_sizes[0], batch, a.n_sequences), heads(a.dbias_sizes[1], head, a.n_heads);
  const Shared queries(a.dbias_sizes[2], query, a.n_queries);
  const bool of_all_keys = a.dbias_sizes[3] == 1;
  const int key = static_cast<int>(chunk * 32 + lane);
  const uint64_t seed = a.dropout.threshold ? static_cast<uint64_t>(*a.dropout.seed) : 0;
  double sum = 0.0;
  for (int n = sequences.begin; n < sequences.end; ++n)
    for (int of = heads.begin; of < heads.end; ++of) {
      const Head h(a, n, of);
      for (int i = queries.begin; i < queries.end; ++i) {
        const int64_t at = h.query_at(a.row_strides, i);
        const SplitLse lse(a.lse[at]);
        const T* q = static_cast<const T*>(a.q) + h.query_at(a.q_strides, i);
        const T* dout = static_cast<const T*>(a.dout) + h.query_at(a.dout_strides, i);
        const int end = h.end_key(i);
        for (int j = of_all_keys ? h.first_key(i) + lane : key; j < end; j += 32) {
          if (j >= h.first_key(i)) {
            const T* k = static_cast<const T*>(a.k) + h.key_at(a.k_strides, j);
            float product = 0.f, grad = 0.f, unused;
            for (int d = 0; d < a.head_dim; ++d) product = fmaf(to_float(q[d]), to_float(k[d]), product);
            const float w = weight_of(logit(a, h, product, i, j, unused), lse);
            if (w != 0.f) {
              const T* v = static_cast<const T*>(a.v) + h.key_at(a.v_strides, j);
              for (int d = 0; d < a.head_dim_v; ++d) grad = fmaf(to_float(dout[d]), to_float(v[d]), grad);
              const float factor = a.dropout.threshold ? dropout_factor(a.dropout, seed, h, i, j) : 1.f;
              sum += static_cast<double>(w * (factor * grad - a.delta[at]));
            }
          }
          if (!of_all_keys) break;
        }
      }
    }
  if (of_all_keys) {
#pragma unroll
    for (int other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(kAll, sum, other);
    if (lane != 0) return;
  } else if (key >= a.dbias_sizes[3]) {
    return;
  }
  const PairStrides& s = a.dbias_strides;
  const int64_t to = batch * s.batch + head * s.head + query * s.query + (of_all_keys ? 0 : key) * s.key;
  write_bias_at(a, to, static_cast<float>(sum));
}

// --- launches
// ---------------------------------------------------------------------------------------------------------

template <class... Params, class... Args>
cudaError_t launch_blocks(void (*kernel)(Params...), int64_t blocks, int warps, size_t bytes, cudaStream_t stream,
                          const Args&... args) {
  if (blocks == 0) return cudaSuccess;
  if (blocks > kMaxBlocks) return cudaErrorInvalidConfiguration;
  return launch(kernel, dim3(static_cast<unsigned>(blocks)), dim3(32 * warps), bytes, stream, args...);
}

template <class T, int kCols>
cudaError_t backward_rows(const AttentionBackward& a, cudaStream_t stream) {
  const size_t bytes = kWarps * backward_floats(a.head_dim, a.head_dim_v) * sizeof(float);
  cudaError_t error = cudaSuccess;
  if (a.dq)
    error = launch_blocks(attention_dq_rows<T, kCols>, blocks_of(a, a.n_heads, a.n_queries, kWarps * kRows), kWarps,
                          bytes, stream, a);
  const auto of_keys = [&](auto kernel) {
    return launch_blocks(kernel, blocks_of(a, a.n_heads / a.group, a.n_keys, kWarps * kRows), kWarps, bytes, stream, a);
  };
  if constexpr (kCols <= 4)  // for wide heads the registers do not hold both
    if (error == cudaSuccess && a.dk && a.dv) return of_keys(attention_dkdv_rows<T, kCols, true, true>);
  if (error == cudaSuccess && a.dk) error = of_keys(attention_dkdv_rows<T, kCols, true, false>);
  if (error == cudaSuccess && a.dv) error = of_keys(attention_dkdv_rows<T, kCols, false, true>);
  return error;
}

}  // namespace

cudaError_t attention_dsinks(const AttentionBackward& a, cudaStream_t stream) {
  return launch_blocks(sum_dsinks, a.n_heads, kSinkThreads / 32, 0, stream, a);
}

cudaError_t attention_backward(const AttentionBackward& a, cudaStream_t stream) {
  const bool in_tiles = backward_in_tiles(a);
  return with_type(a.type, [&](auto type) {
    using T = FK_TYPE(type);
    const int64_t blocks = blocks_of(a, a.n_heads, a.n_queries, kDeltaWarps);
    cudaError_t error = launch_blocks(attention_delta<T>, blocks, kDeltaWarps, 0, stream, a);
    if (error == cudaSuccess && a.dsinks) error = attention_dsinks(a, stream);
    if (error == cudaSuccess && a.dbias && !(a.own_dbias && in_tiles)) {
      const int64_t n = a.dbias_sizes[0] * a.dbias_sizes[1] * a.dbias_sizes[2] * ((a.dbias_sizes[3] + 31) / 32);
      error = launch_blocks(attention_dbias<T>, (n + kBiasWarps - 1) / kBiasWarps, kBiasWarps, 0, stream, a, n);
    }
    if (error != cudaSuccess) return error;
    if (in_tiles) {
      AttentionBackward rest = a;
      if (!a.own_dbias) rest.dbias = nullptr;
      return backward_tiles(rest, stream);
    }
    const int width = a.head_dim > a.head_dim_v ? a.head_dim : a.head_dim_v;
    return width <= 128 ? backward_rows<T, 4>(a, stream) : backward_rows<T, kMaxDim / 32>(a, stream);
  });
}

}  // namespace cuda
}  // namespace foundry
