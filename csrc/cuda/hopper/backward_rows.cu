// The launches of the backward pass before and after its main kernel.
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

// --- before, a block per tile of queries and head: of each row its delta and its log-sum-exp in powers of 2 ----------

constexpr int kThreads = 256;

// By a warp: places of the tiles of keys of packed sequence `n`, and with the first one what is left. The sequences
// with the most queries come first, because a block visits its sequence's.
__device__ __forceinline__ void write_places(const AttentionBackward& a, const BackwardWork& work, int n, int lane) {
  const auto tiles_of = [](const Head& h) { return (h.k_len + kKeyTile - 1) / kKeyTile; };
  const Head own(a, n, 0);
  int before = 0, all = 0;
  for (int other = lane; other < a.n_sequences; other += 32) {
    const Head h(a, other, 0);
    if (h.q_len > own.q_len || (h.q_len == own.q_len && other < n)) before += tiles_of(h);
    all += tiles_of(h);
  }
  before = static_cast<int>(__reduce_add_sync(0xFFFFFFFFu, before));
  all = static_cast<int>(__reduce_add_sync(0xFFFFFFFFu, all));
  const auto write = [&](int unit, int sequence, int tile) {
    work.places[2 * unit] = sequence;
    work.places[2 * unit + 1] = tile;
  };
  for (int tile = lane; tile < tiles_of(own); tile += 32) write(before + tile, n, tile);
  if (n == 0)
    for (int unit = all + lane; unit < work.units; unit += 32) write(unit, -1, 0);
}

template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads) backward_numbers(AttentionBackward a, BackwardWork work) {
  constexpr int kQueries = query_tile_of(kWidth), kLanes = value_width_of(kWidth) / 8, kAtOnce = 4 * kThreads / kLanes;
  for (int64_t i = blockIdx.x * kThreads + threadIdx.x; i < work.counters; i += gridDim.x * kThreads) work.done[i] = 0;
  if (a.starts_k && blockIdx.x < a.n_sequences && threadIdx.x < 32) write_places(a, work, blockIdx.x, threadIdx.x);
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

// --- after, a block per piece of dq, and of dk and dv if they are in parts: sums, scaled and rounded -----------------

struct Piece {
  float sums[8][4] = {};

  __device__ __forceinline__ void add(const float* from) {
    FK_UNROLL for (int r = 0; r < 8; ++r) {
      const Pack<float, 4> four = load<float, 4>(from + r * 512 + threadIdx.x * 4);
      FK_UNROLL for (int e = 0; e < 4; ++e) sums[r][e] += four.values[e];
    }
  }
  // Writes the rows [first, end) of data, of which row i begins at offset_of(i), from `column` on.
  template <class T, class F>
  __device__ __forceinline__ void write(void* data, F&& offset_of, int first, int end, int column, float scale,
                                        int width) const {
    const int lane = threadIdx.x % 32;
    FK_UNROLL for (int half = 0; half < 2; ++half) {
      const int row = first + threadIdx.x / 32 * 16 + lane / 4 + 8 * half;
      T* const to = static_cast<T*>(data) + offset_of(row) + column;
      tiles::write_row<T, 64>(row < end ? to : nullptr, sums, half, scale, width - column, lane);
    }
  }
};

template <class T, int kWidth>
__device__ __forceinline__ void write_keys(const AttentionBackward& a, const BackwardWork& work, int64_t index) {
  constexpr int kPieces = 2 * kWidth / 64;  // of 128 keys
  wait_for_launch_before();
  const int piece = static_cast<int>(index % kPieces), column = piece % (kPieces / 2) * 64;
  const int64_t tile = index / kPieces % work.key_tiles, of = index / kPieces / work.key_tiles;
  const bool of_dv = of % 2;
  if (column >= (of_dv ? a.head_dim_v : a.head_dim)) return;
  const int kv_head = static_cast<int>(of / 2);
  const TileOf place = find_tile(a.starts_k, a.total_k, a.n_sequences, a.n_keys, kKeyTile, tile);
  const Head h(a, place.sequence, kv_head * static_cast<int>(a.group));
  const int first = place.tile * kKeyTile + piece / (kPieces / 2) * 64;
  if (first >= h.k_len) return;
  Piece sum;
#pragma unroll 1  // more shares at a time would spill
  for (int i = 0; i < work.splits; ++i)
    sum.add(part_at<kWidth>(a, work, of_dv, kv_head * work.splits + i, static_cast<int>(tile)) + piece * kPieceFloats);
  const HeadStrides& strides = of_dv ? a.dv_strides : a.dk_strides;
  sum.write<T>(
      of_dv ? a.dv : a.dk, [&](int row) { return h.key_at(strides, row); }, first, h.k_len, column,
      of_dv ? 1.f : a.scale, of_dv ? a.head_dim_v : a.head_dim);
}

// Begins while the main kernel still runs, on multiprocessors without blocks of it, with the parts that are done.
template <class T, int kWidth>
__global__ void __launch_bounds__(128) backward_results(AttentionBackward a, BackwardWork work) {
  constexpr int kQueries = query_tile_of(kWidth), kPieces = kQueries * kWidth / kPieceFloats;
  const int64_t of_queries = a.n_heads * work.query_tiles * kPieces;
  if (blockIdx.x >= of_queries) return write_keys<T, kWidth>(a, work, blockIdx.x - of_queries);
  const int piece = static_cast<int>(blockIdx.x % kPieces);
  const QueryTile tile = QueryTile::of<kQueries>(a, work, blockIdx.x / kPieces);
  const Head h(a, tile.place.sequence, tile.head);
  const int share = tile.head / work.heads * work.row_splits + tile.place.tile % work.row_splits;
  const int* const done = work.done + share * a.n_sequences + h.n;
  // This kernel must not end before the main one; the last block ensures that.
  if (load_acquire(done) < writers_of(work, h) || blockIdx.x == gridDim.x - 1) wait_for_launch_before();
  const int first = tile.place.tile * kQueries, last = min(first + kQueries, h.q_len) - 1;
  if (first > last) return;

  Piece sum;
  if (h.end_key(last) > h.first_key(first)) {  // otherwise no block has added
    const auto add = [&](int part) {
      constexpr int kAll = pieces_of(kWidth);
      sum.add(work.dq + (tile.index * kAll + part) * kPieceFloats);
      if (work.pairs && work.in_order && tile.place.tile >= work.first_upper)
        sum.add(work.dq + (upper_tile_at(a, work, h.head, h.n, tile.place.tile) * kAll + part) * kPieceFloats);
    };
    add(piece);
    if constexpr (kWidth == 192)
      if (piece == 2) add(3);
  }
  sum.write<T>(
      a.dq, [&](int row) { return h.query_at(a.dq_strides, row); }, first + (kQueries == 64 ? 0 : piece * 64), last + 1,
      kQueries == 64 ? piece * 64 : 0, a.scale, a.head_dim);
}

// --- launches --------------------------------------------------------------------------------------------------------

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
    const int64_t of_keys = work.splits > 1 ? a.n_heads / a.group * 2 * work.key_tiles * (2 * kWidth / 64) : 0;
    const int64_t blocks = a.n_heads * work.query_tiles * (query_tile_of(kWidth) * kWidth / kPieceFloats) + of_keys;
    if (blocks > kMaxBlocks) return cudaErrorInvalidConfiguration;
    return launch_hopper(backward_results<FK_TYPE(type), kWidth>, dim3(static_cast<unsigned>(blocks)), dim3(128), 0,
                         stream, true, a, work);
  });
}

}  // namespace hopper
}  // namespace cuda
}  // namespace foundry
