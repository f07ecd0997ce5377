// Attention forward with one warp per few rows, for all inputs that the tensor core kernels do not support. Also: how
// the work of the tensor core kernels is split, and how split keys are combined.
#include "flash_attention_forward.cuh"
#include "flash_attention_rows.cuh"

#include <algorithm>

namespace foundry {
namespace cuda {
namespace {

using namespace rows;

// A warp's shared memory: its queries, and the weights of 32 keys.
inline __host__ __device__ int forward_floats(int head_dim) { return kRows * (head_dim + 32); }

template <class T, int kCols>
__global__ void __launch_bounds__(32 * kWarps) attention_forward_rows(AttentionForward a) {
  FK_DYNAMIC_SHARED(float, shared);
  const Place place(a.n_heads, a.n_queries, kWarps * kRows, blockIdx.x);
  const Head h(a, place.sequence, place.head);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int first = (place.tile * kWarps + warp) * kRows, last = min(first + kRows, h.q_len) - 1;
  if (first > last) return;
  const int d = a.head_dim, dv = a.head_dim_v, queries = warp * forward_floats(d), weights = queries + kRows * d;
  const T* k = static_cast<const T*>(a.k) + h.key_at(a.k_strides, 0);
  const T* v = static_cast<const T*>(a.v) + h.key_at(a.v_strides, 0);
  const uint64_t seed = a.dropout.threshold ? static_cast<uint64_t>(*a.dropout.seed) : 0;

  read_rows(shared, queries, d, static_cast<const T*>(a.q) + h.query_at(a.q_strides, first), a.q_strides.token, first,
            h.q_len, d);
  __syncwarp();
  RowSums row[kRows];
  float values[kRows][kCols] = {};
#pragma unroll
  for (int r = 0; r < kRows; ++r) row[r] = {kNone, 0.f, 0.f};

  const int begin = h.first_key(first), end = h.end_key(last);
  for (int key = begin; key < end; key += 32) {
    const int j = key + lane;
    float products[kRows] = {};
    if (j < end) multiply(products, shared, queries, d, k + j * a.k_strides.token, d);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int i = first + r;
      float s = kNone, unused;
      if (i <= last && j >= h.first_key(i) && j < h.end_key(i)) s = logit(a, h, products[r], i, j, unused);
      const float top = fmaxf(row[r].max, warp_max(s)), base = top == kNone ? 0.f : top;
      const float shrink = expf(row[r].max - base), w = s == kNone ? 0.f : expf(s - base);
      row[r].entropy = (shrink > 0.f ? shrink * (row[r].entropy + (row[r].max - base) * row[r].sum) : 0.f) +
                       (w > 0.f ? w * (s - base) : 0.f);
      row[r].sum = row[r].sum * shrink + w;
      row[r].max = top;
      float kept = w;
      if (a.dropout.threshold && w != 0.f) kept *= dropout_factor(a.dropout, seed, h, i, j);
      shared[weights + r * 32 + lane] = kept;
#pragma unroll
      for (int c = 0; c < kCols; ++c) values[r][c] *= shrink;
    }
    __syncwarp();
    accumulate<kCols>(values, shared, weights, v + key * a.v_strides.token, a.v_strides.token, min(32, end - key), dv);
    __syncwarp();
  }

  T* out = static_cast<T*>(a.out) + h.query_at(a.out_strides, first);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    row[r].sum = warp_sum<32>(row[r].sum);
    row[r].entropy = warp_sum<32>(row[r].entropy);
    if (first + r > last) continue;
    const float factor = finish_row(a, h, first + r, row[r], lane == 0);
    write_row(out + r * a.out_strides.token, values[r], factor, dv);
  }
}

template <class T, int kCols>
cudaError_t forward_rows(const AttentionForward& a, cudaStream_t stream) {
  const int64_t blocks = blocks_of(a, a.n_heads, a.n_queries, kWarps * kRows);
  if (blocks > kMaxBlocks) return cudaErrorInvalidConfiguration;
  const size_t bytes = kWarps * forward_floats(a.head_dim) * sizeof(float);
  return launch(attention_forward_rows<T, kCols>, dim3(static_cast<unsigned>(blocks)), dim3(32 * kWarps), bytes, stream,
                a);
}

// --- split keys
// -------------------------------------------------------------------------------------------------------

constexpr int kMostSplits = 64, kInFlight = 32;  // kInFlight: loads that a thread issues before it uses any

// One warp per row. It reads the maxima and sums of all splits at once, two splits per lane. Then it adds the sums of
// values in the order of the splits, with several loads in flight to hide memory latency.
template <class T, int kCols>
__global__ void __launch_bounds__(32, 16) attention_combine(AttentionForward a, Splits splits) {
  constexpr int kAtOnce = kInFlight / kCols;
  const int64_t index = blockIdx.x;
  const int lane = threadIdx.x, dv = a.head_dim_v, heads = static_cast<int>(a.n_heads / splits.pack);
  const int64_t rows_most = a.n_queries * splits.pack, place = index / rows_most;
  const int row = static_cast<int>(index % rows_most), i = row / splits.pack;
  Head h(a, static_cast<int>(place / heads), static_cast<int>(place % heads) * splits.pack);
  if (i >= h.q_len) return;
  h.head += row % splits.pack;
  const int64_t step = splits.rows * splits.row_floats(dv);
  const float* from = splits.sums + index * splits.row_floats(dv);

  RowSums part[2], total{kNone, 0.f, 0.f};
  FK_UNROLL for (int e = 0; e < 2; ++e) {
    const int s = lane + 32 * e;
    part[e] = {kNone, 0.f, 0.f};
    if (s < splits.count) part[e] = {from[s * step + dv], from[s * step + dv + 1], from[s * step + dv + 2]};
  }
  total.max = warp_max(fmaxf(part[0].max, part[1].max));
  float weights[2];
  FK_UNROLL for (int e = 0; e < 2; ++e) {
    const float fall = part[e].max - total.max, w = part[e].max == kNone ? 0.f : expf(fall);
    weights[e] = w;
    total.sum += w * part[e].sum;
    total.entropy += w > 0.f ? w * (part[e].entropy + fall * part[e].sum) : 0.f;
  }
  total.sum = warp_sum<32>(total.sum);
  total.entropy = warp_sum<32>(total.entropy);

  float values[kCols] = {};
  for (int first = 0; first < splits.count; first += kAtOnce) {
    float loaded[kAtOnce][kCols];
    FK_UNROLL for (int e = 0; e < kAtOnce; ++e) FK_UNROLL for (int c = 0; c < kCols; ++c) {
      const bool there = first + e < splits.count && 32 * c + lane < dv;
      loaded[e][c] = there ? from[(first + e) * step + 32 * c + lane] : 0.f;
    }
    FK_UNROLL for (int e = 0; e < kAtOnce; ++e) {
      const float w = __shfl_sync(kAll, first + e < 32 ? weights[0] : weights[1], (first + e) % 32);
      FK_UNROLL for (int c = 0; c < kCols; ++c) values[c] = fmaf(loaded[e][c], w, values[c]);
    }
  }
  const float factor = finish_row(a, h, i, total, lane == 0);
  write_row(static_cast<T*>(a.out) + h.query_at(a.out_strides, i), values, factor, dv);
}

template <class T>
cudaError_t combine(const AttentionForward& a, const Splits& splits, cudaStream_t stream) {
  const dim3 blocks(static_cast<unsigned>(splits.rows));
  if (a.head_dim_v <= 128) return launch(attention_combine<T, 4>, blocks, dim3(32), 0, stream, a, splits);
  return launch(attention_combine<T, 8>, blocks, dim3(32), 0, stream, a, splits);
}

}  // namespace

Splits plan_forward(const AttentionForward& a, const Gpu& gpu) {
  Splits plan{1, 1, false, 0, nullptr};
  if (!forward_in_tiles(a)) return plan;
  if (a.batch_invariant) {
    plan.rows = a.n_sequences * a.n_heads * a.n_queries;
    return plan;
  }
  constexpr int64_t kRows = 64, kTwoBlocks = 160 << 10;  // shared memory of two blocks with the largest tiles
  if (a.n_queries * a.group <= kRows) plan.pack = static_cast<int>(a.group);
  const int64_t rows = a.n_queries * plan.pack, heads = a.n_sequences * (a.n_heads / plan.pack);
  plan.rows = heads * rows;
  const int width = a.head_dim > a.head_dim_v ? a.head_dim : a.head_dim_v;
  const bool room = width <= 64 || (width <= 128 && gpu.shared >= kTwoBlocks && gpu.is_8x);
  plan.large = room && heads * ((rows + 2 * kRows - 1) / (2 * kRows)) >= gpu.multiprocessors && rows > kRows;
  const int64_t blocks = heads * ((rows + kRows - 1) / kRows), key_tiles = (a.n_keys + 63) / 64;
  if (blocks < gpu.multiprocessors) {  // two blocks per multiprocessor, each with at least two tiles of keys
    const int64_t wanted = std::min((2 * gpu.multiprocessors + blocks - 1) / blocks, key_tiles / 2);
    plan.count = static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(wanted, kMostSplits)));
  }
  return plan;
}

cudaError_t attention_forward(const AttentionForward& a, const Splits& splits, cudaStream_t stream) {
  if (forward_in_tiles(a)) {
    const cudaError_t error = forward_tiles(a, splits, stream);
    if (error != cudaSuccess || splits.count == 1) return error;
    return a.type == Dtype::bf16 ? combine<__nv_bfloat16>(a, splits, stream) : combine<__half>(a, splits, stream);
  }
  return with_type(a.type, [&](auto type) {
    using T = FK_TYPE(type);
    return a.head_dim_v <= 128 ? forward_rows<T, 4>(a, stream) : forward_rows<T, kMaxDim / 32>(a, stream);
  });
}

}  // namespace cuda
}  // namespace foundry
