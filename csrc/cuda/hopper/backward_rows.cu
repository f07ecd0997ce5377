// The launches of the backward pass before and after its main kernel, one block per tile of queries and head.
#include "backward_order.cuh"

namespace foundry {
namespace cuda {
namespace hopper {
namespace {

// Tile of queries number `index` of all.
struct QueryTile {
  int64_t index;
  int head;
  TileOf place;

  template <int kQueries>
  __device__ static QueryTile of(const AttentionBackward& a, const BackwardWork& work, unsigned index) {
    const unsigned tiles = work.query_tiles;
    return {index, static_cast<int>(index / tiles),
            find_tile(a.starts_q, a.total_q, a.n_sequences, a.n_queries, kQueries, index % tiles)};
  }
};

// --- before: of each row its delta and its log-sum-exp in powers of 2
// --------------------------------------------------

constexpr int kThreads = 256;

template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads) backward_numbers(AttentionBackward a, BackwardWork work) {
  constexpr int kQueries = query_tile_of(kWidth), kLanes = value_width_of(kWidth) / 8, kAtOnce = 4 * kThreads / kLanes;
  const QueryTile tile = QueryTile::of<kQueries>(a, work, blockIdx.x);
  const Head h(a, tile.place.sequence, tile.head);
  const int first = tile.place.tile * kQueries;
  if (first >= h.q_len) return;
  if (!work.in_order) {
    float* const sums = work.dq + tile.index * (pieces_of(kWidth) * kPieceFloats) + threadIdx.x * 4;
    for (int i = 0; i < kQueries * kWidth; i += kThreads * 4) store_four(sums + i, 0.f, 0.f, 0.f, 0.f);
  }
  const int column = threadIdx.x % kLanes * 8;
  for (int start = 0; start < kQueries; start += kAtOnce) {
    const auto row_of = [&](int i) { return start + i * (kThreads / kLanes) + static_cast<int>(threadIdx.x) / kLanes; };
    Pack<T, 8> out[4], dout[4];
    FK_UNROLL for (int i = 0; i < 4; ++i) {
      const int query = first + row_of(i);
      if (query >= h.q_len || column >= a.head_dim_v) continue;
      out[i] = load<T, 8>(static_cast<const T*>(a.out) + h.query_at(a.out_strides, query) + column);
      dout[i] = load<T, 8>(static_cast<const T*>(a.dout) + h.query_at(a.dout_strides, query) + column);
    }
    FK_UNROLL for (int i = 0; i < 4; ++i) {
      const int row = row_of(i), query = first + row;
      float sum = 0.f;
      if (query < h.q_len && column < a.head_dim_v)
        FK_UNROLL for (int e = 0; e < 8; ++e) sum = fmaf(to_float(dout[i].values[e]), to_float(out[i].values[e]), sum);
      sum = warp_sum<kLanes>(sum);
      if (column != 0) continue;
      float lse = INFINITY, delta = 0.f;  // beyond the end, and for a row without keys: weights of 0
      if (query < h.q_len) {
        constexpr double kLog2e = 1.4426950408889634;
        const int64_t at = h.row_at(a, query);
        if (a.lse[at] != static_cast<double>(kNone)) {
          lse = static_cast<float>(a.lse[at] * kLog2e);
          delta = a.dlse ? sum - a.dlse[at] : sum;
        }
        a.delta[at] = delta;
      }
      work.lse[tile.index * kQueries + row] = lse;
      work.delta[tile.index * kQueries + row] = delta;
    }
  }
}

// --- after: dq from its sums, a block for each piece
// -------------------------------------------------------------------

// Begins while the main kernel still runs, on multiprocessors without blocks of it, with the parts that are done.
template <class T, int kWidth>
__global__ void __launch_bounds__(128) backward_dq(AttentionBackward a, BackwardWork work) {
  constexpr int kQueries = query_tile_of(kWidth), kPieces = kQueries * kWidth / kPieceFloats;
  const int piece = static_cast<int>(blockIdx.x % kPieces), lane = threadIdx.x % 32;
  const QueryTile tile = QueryTile::of<kQueries>(a, work, blockIdx.x / kPieces);
  const Head h(a, tile.place.sequence, tile.head);
  const int* const done = work.done + h.kv_head * a.n_sequences + h.n;
  // This kernel must not end before the main one; the last block ensures that.
  if (load_acquire(done) < writers_of(work, h) || blockIdx.x == gridDim.x - 1) wait_for_launch_before();
  const int first = tile.place.tile * kQueries, last = min(first + kQueries, h.q_len) - 1;
  if (first > last) return;

  float sums[8][4] = {};
  if (h.end_key(last) > h.first_key(first)) {  // otherwise no block has added
    const float* const from = work.dq + (tile.index * pieces_of(kWidth) + piece) * kPieceFloats + threadIdx.x * 4;
    FK_UNROLL for (int part = 0; part < (kWidth == 192 && piece == 2 ? 2 : 1); ++part)
        FK_UNROLL for (int r = 0; r < 8; ++r) {
      const Pack<float, 4> four = load<float, 4>(from + part * kPieceFloats + r * 512);
      FK_UNROLL for (int e = 0; e < 4; ++e) sums[r][e] += four.values[e];
    }
  }
  const int column = kQueries == 64 ? piece * 64 : 0;
  FK_UNROLL for (int half = 0; half < 2; ++half) {
    const int query = first + (kQueries == 64 ? 0 : piece * 64) + threadIdx.x / 32 * 16 + lane / 4 + 8 * half;
    T* const to = static_cast<T*>(a.dq) + h.query_at(a.dq_strides, query) + column;
    tiles::write_row<T, 64>(query <= last ? to : nullptr, sums, half, a.scale, a.head_dim - column, lane);
  }
}

// --- launches
// ---------------------------------------------------------------------------------------------------------

// Calls launch(type, width) for the call.
template <class F>
cudaError_t with_shape(const AttentionBackward& a, F&& launch) {
  const auto of_type = [&](auto type) {
    const int width = width_of(a);
    return width == 64    ? launch(type, Constant<64>{})
           : width == 128 ? launch(type, Constant<128>{})
           : width == 192 ? launch(type, Constant<192>{})
                          : launch(type, Constant<256>{});
  };
  return a.type == Dtype::bf16 ? of_type(Tag<__nv_bfloat16>{}) : of_type(Tag<__half>{});
}

}  // namespace

cudaError_t launch_before_backward(const AttentionBackward& a, const BackwardWork& work, cudaStream_t stream) {
  return with_shape(a, [&](auto type, auto width) {
    const int64_t blocks = a.n_heads * work.query_tiles;
    if (blocks > kMaxBlocks) return cudaErrorInvalidConfiguration;
    return launch(backward_numbers<FK_TYPE(type), decltype(width)::value>, dim3(static_cast<unsigned>(blocks)),
                  dim3(kThreads), 0, stream, a, work);
  });
}

cudaError_t launch_after_backward(const AttentionBackward& a, const BackwardWork& work, cudaStream_t stream) {
  return with_shape(a, [&](auto type, auto width) {
    constexpr int kWidth = decltype(width)::value;
    const int64_t blocks = a.n_heads * work.query_tiles * (query_tile_of(kWidth) * kWidth / kPieceFloats);
    if (blocks > kMaxBlocks) return cudaErrorInvalidConfiguration;
    return launch_hopper(backward_dq<FK_TYPE(type), kWidth>, dim3(static_cast<unsigned>(blocks)), dim3(128), 0, stream,
                         true, a, work);
  });
}

}  // namespace hopper
}  // namespace cuda
}  // namespace foundry
