// Attention, forward: by warps for all inputs that the matrix instructions do not take.
#include "flash_attention_rows.cuh"

namespace foundry {
namespace cuda {
namespace {

using namespace rows;

// Shared memory of a warp: its queries, and the weights of 32 keys.
inline __host__ __device__ int forward_floats(int head_dim) { return kRows * (head_dim + 32); }

template <class T, int kCols>
__global__ void __launch_bounds__(32 * kWarps) attention_forward_rows(AttentionForward a) {
  FK_DYNAMIC_SHARED(float, shared);
  const Place place(a.n_heads, a.n_queries, kWarps * kRows);
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

}  // namespace

cudaError_t attention_forward(const AttentionForward& a, cudaStream_t stream) {
  return with_type(a.type, [&](auto type) {
    using T = FK_TYPE(type);
    return a.head_dim_v <= 128 ? forward_rows<T, 4>(a, stream) : forward_rows<T, kMaxDim / 32>(a, stream);
  });
}

}  // namespace cuda
}  // namespace foundry
